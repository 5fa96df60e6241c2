"""Normalisation."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x / rms(x) * weight` over the last dimension, reduced in float32.

    x: `[..., D]`; weight: `[D]`; returns a new tensor of x's shape and dtype. Source: Zhang & Sennrich 2019.
    """
    x32 = x.float()
    scaled = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return weight * scaled.to(x.dtype)
