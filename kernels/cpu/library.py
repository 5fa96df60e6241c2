"""Finds the compiled kernels, tests them once per process, and says once if the slower torch operations must do."""

from __future__ import annotations

import ctypes
import os
import warnings
from functools import cache
from pathlib import Path

import torch

from kvferry.kernels.cpu.build import HERE, LIBRARY, source_digest

SWITCH = "KVFERRY_CPU_KERNELS"
"""Environment variable; `0` turns the kernels off."""

_P, _I64, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
_SIGNATURES: dict[str, tuple[type | None, list[type]]] = {
    "kvferry_build": (ctypes.c_char_p, []),
    "kvferry_levels": (_INT, []),
    "kvferry_skip_levels": (None, [_INT]),
    "kvferry_use_threads_of": (None, [_P]),
    "kvferry_scratch_floats": (_I64, [_I64, _I64]),
    "kvferry_add_norm": (_INT, [_INT, _P, _P, _P, _P, _FLOAT, _I64, _I64, _INT]),
    "kvferry_silu_mul": (_INT, [_INT, _P, _P, _I64, _I64, _INT]),
    "kvferry_attend": (_INT, [_INT, _P, _P, _P, _P, _P, _FLOAT, _P, _P, _INT]),
}


class Unusable(Exception):
    """The library cannot be used; the message says why and what to do."""


@cache
def library() -> ctypes.CDLL | None:
    """The kernels, or None where they are turned off, missing, or wrong."""
    if os.environ.get(SWITCH) == "0":
        return None
    try:
        return load(HERE / LIBRARY)
    except Unusable as error:
        warnings.warn(f"the CPU kernels are not used, so torch computes more slowly: {error}", stacklevel=2)
        return None


def load(path: Path) -> ctypes.CDLL:
    """Opens a library and checks it. Raises `Unusable`."""
    remedy = "build them with `python -m kvferry.kernels.cpu.build`"
    if not path.exists():
        raise Unusable(f"{path} does not exist; {remedy}")
    try:
        found = ctypes.CDLL(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(found, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise Unusable(f"{path} cannot be loaded ({error}); {remedy}") from error
    if found.kvferry_build().decode() != source_digest():
        raise Unusable(f"{path} was built from other sources; {remedy}")
    found.kvferry_use_threads_of(_gomp_parallel())
    return found


def _gomp_parallel() -> int | None:
    """How torch's own OpenMP starts threads: looked up through torch, since a process may hold several OpenMPs."""
    try:
        torch_cpu = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        return ctypes.cast(torch_cpu.GOMP_parallel, ctypes.c_void_p).value
    except (OSError, AttributeError):
        return None
