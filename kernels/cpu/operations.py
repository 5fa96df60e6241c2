"""The kernels as operations on tensors, for tensors that `available.kernels_for` finds kernels for.

Results do not depend on the number of threads nor on what else is in the batch.
"""

from __future__ import annotations

import ctypes

import torch

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
_PARALLEL_ELEMENTS = 32_768
"""Less is done sooner by one thread than by waking others."""


def threads_for(elements: int) -> int:
    return torch.get_num_threads() if elements >= _PARALLEL_ELEMENTS else 1


def add_norm_(
    lib: ctypes.CDLL, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """As `kernels.norm.add_norm_`; x, delta: contiguous `[rows, width]`."""
    rows, width = x.shape
    out = torch.empty_like(x)
    lib.kvferry_add_norm(
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


def silu_mul(lib: ctypes.CDLL, gate_up: torch.Tensor) -> torch.Tensor:
    """As `kernels.activation.silu_mul`; gate_up: contiguous `[rows, 2·width]`."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((rows, width))
    lib.kvferry_silu_mul(
        DTYPES[gate_up.dtype], gate_up.data_ptr(), out.data_ptr(), rows, width, threads_for(rows * width)
    )
    return out
