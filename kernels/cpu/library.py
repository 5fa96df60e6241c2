"""Opens what `build.py` compiled."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from kvferry.kernels.cpu.build import source_digest

_P, _I64, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
_SIGNATURES: dict[str, tuple[type | None, list[type]]] = {
    "kvferry_build": (ctypes.c_char_p, []),
    "kvferry_levels": (_INT, []),
    "kvferry_skip_levels": (None, [_INT]),
    "kvferry_use_threads_of": (None, [_P, _P]),
    "kvferry_scratch_floats": (_I64, [_I64, _I64]),
    "kvferry_embed_packed": (_INT, [_INT, _P, _P, _P, _FLOAT, _I64, _I64, _I64, _INT]),
    "kvferry_add_norm": (_INT, [_INT, _P, _P, _P, _P, _FLOAT, _I64, _I64, _INT]),
    "kvferry_gated": (_INT, [_INT, _P, _P, _I64, _I64, _I64, _INT]),
    "kvferry_argmax": (None, [_INT, _P, _I64, _I64, _P, _P, _INT]),
    "kvferry_draw_bytes": (_I64, [_I64]),
    "kvferry_draw": (None, [_INT, _P, _I64, _P, _I64, _P, _P, _INT]),
    "kvferry_packed_linear_bytes": (_I64, [_INT, _I64, _I64]),
    "kvferry_pack_linear": (None, [_INT, _P, _P, _I64, _I64, _INT]),
    "kvferry_linear": (None, [_INT, _P, _P, _P, _P, _I64, _I64, _I64, _I64, _I64, _INT]),
    "kvferry_quantized_row_units": (_I64, [_INT, _I64]),
    "kvferry_linear_quantized": (None, [_INT, _INT, *[_P] * 5, *[_I64] * 5, _INT]),
    "kvferry_attend": (_INT, [_INT, _P, _P, _P, _I64, _P, _P, _FLOAT, _FLOAT, _FLOAT, _P, _P]),
    "kvferry_place_tokens": (None, [_P, _I64, _P, _P]),
    "kvferry_cut_tiles": (_I64, [_P, _I64, _P, _I64]),
    "kvferry_share_cores": (None, [_P]),
    "kvferry_run": (None, [_P, _I64, _P, _INT, _INT]),
}
REMEDY = "build them with `python -m kvferry.kernels.cpu.build`"


class Unusable(Exception):
    """The library cannot be used; the message says why and what to do."""


def load(path: Path) -> ctypes.CDLL:
    """Raises `Unusable` for a file that is missing, broken or older than the sources beside this one."""
    if not path.exists():
        raise Unusable(f"{path} does not exist; {REMEDY}")
    try:
        found = ctypes.CDLL(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(found, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise Unusable(f"{path} cannot be loaded ({error}); {REMEDY}") from error
    if found.kvferry_build().decode() != source_digest():
        raise Unusable(f"{path} was built from other sources; {REMEDY}")
    found.kvferry_use_threads_of(*_openmp())
    return found


def _openmp() -> tuple[int | None, int | None]:
    """How torch's own OpenMP starts threads and counts them: a process may hold several OpenMPs."""
    try:
        torch_cpu = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        parallel, count = torch_cpu.GOMP_parallel, torch_cpu.omp_get_num_threads
        return ctypes.cast(parallel, _P).value, ctypes.cast(count, _P).value
    except (OSError, AttributeError):
        return None, None
