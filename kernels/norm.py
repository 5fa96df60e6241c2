"""Normalisation."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kvferry.kernels.cpu import operations as cpu
from kvferry.kernels.cpu.available import kernels_for


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x / rms(x) * weight` over the last dimension, reduced in float32.

    x: `[..., D]`; weight: `[D]`; returns a new tensor of x's shape and dtype. Source: Zhang & Sennrich 2019.
    """
    if x.dim() == 2 and x.is_contiguous() and (lib := kernels_for(x, x.shape[-1])) is not None:
        return cpu.add_norm_(lib, x, None, weight, eps)
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def add_norm_(x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Adds delta to x (mutates x), then returns `rms_norm` of the sum. x, delta: contiguous `[rows, D]`."""
    if (lib := kernels_for(x, x.shape[-1])) is not None:
        return cpu.add_norm_(lib, x, delta, weight, eps)
    return F.rms_norm(x.add_(delta), (x.shape[-1],), weight, eps)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """`(x - mean(x)) / std(x) * weight + bias` over the last dimension, a new tensor. Source: Ba et al. 2016."""
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)
