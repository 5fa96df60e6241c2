"""Whether the kernels can be used: looked at once per process, and said once if torch's operations must do."""

from __future__ import annotations

import ctypes
import os
import warnings
from functools import cache
from pathlib import Path

import torch

from kvferry.kernels.cpu.build import HERE, LIBRARY
from kvferry.kernels.cpu.library import REMEDY, SWITCH, Unusable, load
from kvferry.kernels.cpu.operations import DTYPES
from kvferry.kernels.cpu.selftest import wrong_results

_ALIGNMENT = 8
"""Widths are multiples of it: two of the narrowest vectors."""


def kernels_for(x: torch.Tensor, width: int) -> ctypes.CDLL | None:
    """The kernels, if they take tensors like x whose rows are `width` long; else torch's operations are to be used."""
    return kernels_with(x.dtype, x.device, width)


def kernels_with(dtype: torch.dtype, device: torch.device, width: int) -> ctypes.CDLL | None:
    """As `kernels_for`, without a tensor."""
    return library() if dtype in DTYPES and device.type == "cpu" and width % _ALIGNMENT == 0 else None


def kernels_of(weight: torch.Tensor) -> ctypes.CDLL | None:
    """The kernels, if they multiply with such a weight `[out, in]`: whole 32-bit units of inputs."""
    fits = weight.dtype in DTYPES and weight.device.type == "cpu" and weight.shape[1] * weight.element_size() % 4 == 0
    return library() if fits else None


@cache
def library() -> ctypes.CDLL | None:
    """None where the kernels are turned off, missing or wrong."""
    if os.environ.get(SWITCH) == "0":
        return None
    try:
        found = load(HERE / LIBRARY)
        found.kvferry_use_threads_of(*_openmp())
        if wrong := wrong_results(found):
            raise Unusable(f"{', '.join(wrong)} computed wrong results on this machine; {REMEDY}, or set {SWITCH}=0")
    except Unusable as error:
        message = f"the CPU kernels are not used, torch computes more slowly: {error}"
        warnings.warn(message, RuntimeWarning, stacklevel=2)
        return None
    return found


def _openmp() -> tuple[int | None, int | None]:
    """How torch's own OpenMP starts threads and counts them: a process may hold several OpenMPs."""
    try:
        torch_cpu = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        parallel, count = torch_cpu.GOMP_parallel, torch_cpu.omp_get_num_threads
        return ctypes.cast(parallel, ctypes.c_void_p).value, ctypes.cast(count, ctypes.c_void_p).value
    except (OSError, AttributeError):
        return None, None
