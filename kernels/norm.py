"""Normalisation."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x / rms(x) * weight` over the last dimension, reduced in float32.

    x: `[..., D]`; weight: `[D]`; returns a new tensor of x's shape and dtype. Source: Zhang & Sennrich 2019.
    """
    return F.rms_norm(x, (x.shape[-1],), weight, eps)
