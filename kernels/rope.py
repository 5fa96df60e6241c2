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


def scale_yarn(
    frequencies: torch.Tensor, theta: float, factor: float, fast: float, slow: float, context: int, truncate: bool
) -> torch.Tensor:
    """Keeps the waves that turn more than `fast` times within `context`, slows those below `slow` turns by `factor`.

    In between the two are blended by index; `truncate` widens that range to whole indices.
    Source: Peng et al. 2023, YaRN, section 3.2; rounding and clamping as in transformers.
    """
    count = len(frequencies)
    first, last = (count * math.log(context / (2 * math.pi * turns)) / math.log(theta) for turns in (fast, slow))
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * count - 1)
    slowed = ((torch.arange(count) - first) / ((last - first) or 0.001)).clamp(0, 1)
    return (1 - slowed) * frequencies + slowed * frequencies / factor


def grow_theta(
    positions_T: torch.Tensor, frequencies: torch.Tensor, dim: int, factor: float, context: int
) -> torch.Tensor:
    """Frequencies `[T, 1, D/2]` as if theta had grown for a sequence that ends with the token ("dynamic NTK").

    Of the first `dim` dimensions; up to `context` tokens nothing changes. Source: Peng et al. 2023, YaRN, section 3.1.
    """
    length = (positions_T + 1).clamp(min=context).double()
    growth = factor * length / context - (factor - 1)
    exponents = torch.arange(len(frequencies), device=frequencies.device).double() * 2 / (dim - 2)
    return frequencies * (growth[:, None, None] ** -exponents).float()


def rope_angles(positions_T: torch.Tensor, frequencies: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """cos and sin, `[2, T, 1, D/2]`; the angles are computed in float32. frequencies: `[D/2]` or `[T, 1, D/2]`."""
    return cos_and_sin(positions_T, frequencies).to(dtype)


def cos_and_sin(positions_T: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """`rope_angles` in float32."""
    angles = positions_T.float()[:, None, None] * frequencies
    return torch.stack((angles.cos(), angles.sin()))


def apply_rope_(x_THD: torch.Tensor, angles: torch.Tensor) -> None:
    """Rotates every head by its token's angles. Mutates `x_THD` (any strides); `angles` as `rope_angles` gives them."""
    cos, sin = angles
    left, right = x_THD.chunk(2, dim=-1)
    rotated = (left * cos).addcmul_(right, sin, value=-1)
    right.mul_(cos).addcmul_(left, sin)
    left.copy_(rotated)
