"""What sampling asks of all logits."""

from __future__ import annotations

import torch

from kvferry.kernels.cpu import operations as cpu
from kvferry.kernels.cpu.available import kernels_for

Largest = tuple[list[float], list[int]]
"""Of each row the largest value and the first place where it stands; NaN if the row holds one."""


def argmax(x: torch.Tensor) -> Largest:
    """x: `[rows, width]`."""
    if x.is_contiguous() and (lib := kernels_for(x, 0)) is not None:
        return cpu.argmax(lib, x)
    values, ids = x.max(dim=-1)
    return values.tolist(), ids.tolist()
