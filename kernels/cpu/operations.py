"""The kernels as operations on tensors, for tensors that `available.kernels_for` finds kernels for.

Results do not depend on the number of threads nor on what else is in the batch.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}
"""As in `api.h`."""
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


def gated(lib: ctypes.CDLL, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """As `kernels.activation.gated`, for one of `ACTIVATIONS`; gate_up: contiguous `[rows, 2·width]`."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((rows, width))
    lib.kvferry_gated(
        DTYPES[gate_up.dtype],
        gate_up.data_ptr(),
        out.data_ptr(),
        ACTIVATIONS[activation],
        rows,
        width,
        threads_for(rows * width),
    )
    return out


def argmax(lib: ctypes.CDLL, x: torch.Tensor) -> tuple[list[float], list[int]]:
    """As `kernels.sampling.argmax`; x: contiguous `[rows, width]`."""
    rows, width = x.shape
    values, ids = np.empty(rows, dtype=np.float32), np.empty(rows, dtype=np.int64)
    threads = min(rows, threads_for(rows * width // 8))
    lib.kvferry_argmax(DTYPES[x.dtype], x.data_ptr(), rows, width, values.ctypes.data, ids.ctypes.data, threads)
    return values.tolist(), ids.tolist()
