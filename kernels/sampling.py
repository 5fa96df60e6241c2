"""What sampling asks of all logits."""

from __future__ import annotations

import torch

from kvferry.kernels.cpu import operations as cpu
from kvferry.kernels.cpu.available import kernels_for


def argmax(x: torch.Tensor) -> tuple[list[float], list[int]]:
    """Each row's largest value and the first place where it stands; NaN if the row holds one. x: `[rows, width]`."""
    if x.is_contiguous() and (lib := kernels_for(x, 0)) is not None:
        return cpu.argmax(lib, x)
    values, ids = x.max(dim=-1)
    return values.tolist(), ids.tolist()
