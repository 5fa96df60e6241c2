"""Rotary position embedding: halves rotated, as Hugging Face stores q and k.

Legend: T tokens, H heads, D head dim.
"""

from __future__ import annotations

import math

import torch


def inverse_frequencies(head_dim: int, theta: float) -> torch.Tensor:
    """`theta^(-2i/D)` in radians a position, float32 `[D/2]`. Source: Su et al. 2021, RoFormer."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    return 1.0 / (theta**exponents)


def scale_llama3(frequencies: torch.Tensor, factor: float, low: float, high: float, context: int) -> torch.Tensor:
    """Slows the waves that are longer than `context / low` by `factor`, keeps those shorter than `context / high`.

    In between the two are blended by the number of turns within `context`. Source: Llama 3.1 release, `apply_scaling`.
    """
    turns = context * frequencies / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return keep * frequencies + (1 - keep) * frequencies / factor


def rope_angles(positions_T: torch.Tensor, frequencies: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """cos and sin, `[2, T, 1, D/2]`; the angles are computed in float32."""
    angles = positions_T.float()[:, None, None] * frequencies
    return torch.stack((angles.cos(), angles.sin())).to(dtype)


def apply_rope_(x_THD: torch.Tensor, angles: torch.Tensor) -> None:
    """Rotates every head by its token's angles. Mutates `x_THD` (any strides); `angles` as `rope_angles` gives them."""
    cos, sin = angles
    left, right = x_THD.chunk(2, dim=-1)
    rotated = (left * cos).addcmul_(right, sin, value=-1)
    right.mul_(cos).addcmul_(left, sin)
    left.copy_(rotated)
