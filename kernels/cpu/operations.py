"""The kernels as operations on tensors. Each is to be called only where `covers` says so.

Results do not depend on the number of threads nor on what else is in the batch.
"""

from __future__ import annotations

import ctypes

import torch

from kvferry.kernels.cpu.library import library

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
_ALIGNMENT = 8
"""Widths are multiples of it: two of the narrowest vectors."""
_PARALLEL_ELEMENTS = 32_768
"""Less is done sooner by one thread than by waking others."""


def covers(x: torch.Tensor, width: int) -> bool:
    """Whether kernels for tensors like x exist here, whose rows are `width` long."""
    return x.dtype in DTYPES and x.device.type == "cpu" and width % _ALIGNMENT == 0 and library() is not None


def kernels() -> ctypes.CDLL:
    """Raises `RuntimeError` where there are none."""
    found = library()
    if found is None:
        raise RuntimeError("called without `covers`")
    return found


def threads_for(elements: int) -> int:
    return torch.get_num_threads() if elements >= _PARALLEL_ELEMENTS else 1


def add_norm_(x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As `kernels.norm.add_norm_`; x, delta: contiguous `[rows, width]`."""
    rows, width = x.shape
    out = torch.empty_like(x)
    kernels().kvferry_add_norm(
        DTYPES[x.dtype],
        x.data_ptr(),
        None if delta is None else delta.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        eps,
        rows,
        width,
        threads_for(rows * width),
    )
    return out


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """As `kernels.activation.silu_mul`; gate_up: contiguous `[rows, 2·width]`."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((rows, width))
    kernels().kvferry_silu_mul(
        DTYPES[gate_up.dtype], gate_up.data_ptr(), out.data_ptr(), rows, width, threads_for(rows * width)
    )
    return out
