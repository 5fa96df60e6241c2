"""Opens what `build.py` compiled."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path

from kvferry.kernels.cpu.build import HERE, LIBRARY, source_digest

SWITCH = "KVFERRY_CPU_KERNELS"
"""Environment variable; `0` turns all that is compiled off."""

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
    "kvferry_move_tokens": (None, [_P, _I64, _P, _P]),
    "kvferry_cut_tiles": (_I64, [_P, _I64, _P, _I64]),
    "kvferry_share_cores": (None, [_P]),
    "kvferry_run": (None, [_P, _I64, _P, _INT, _INT]),
    "kvferry_holders_new": (_P, []),
    "kvferry_holders_free": (None, [_P]),
    "kvferry_holders_put": (_I64, [_P, _I64, _INT, _P, _I64, _P]),
    "kvferry_holders_runs": (_I64, [_P, _P, _I64, _I64, _I64, _P, _P]),
    "kvferry_holders_narrow": (_I64, [_P, _P, _I64, _P, _I64, _P]),
    "kvferry_holders_sweep": (_I64, [_P, _I64, _P]),
    "kvferry_holders_names": (_I64, [_P, _I64, _I64, _P]),
    "kvferry_weigh": (None, [_P, _P, _P]),
}
REMEDY = "build them with `python -m kvferry.kernels.cpu.build`"


class Unusable(Exception):
    """The library cannot be used; the message says why and what to do."""


def load(path: Path, kind: type[ctypes.CDLL] = ctypes.CDLL) -> ctypes.CDLL:
    """Raises `Unusable` for a file that is missing, broken or older than the sources beside this one."""
    if not path.exists():
        raise Unusable(f"{path} does not exist; {REMEDY}")
    try:
        found = kind(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(found, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise Unusable(f"{path} cannot be loaded ({error}); {REMEDY}") from error
    if found.kvferry_build().decode() != source_digest():
        raise Unusable(f"{path} was built from other sources; {REMEDY}")
    return found


@cache
def short_calls() -> ctypes.CDLL | None:
    """For what takes microseconds and shall not give other threads a turn, and for processes without torch.

    None where it is turned off or missing; whoever computes says so.
    """
    if os.environ.get(SWITCH) == "0":
        return None
    try:
        return load(HERE / LIBRARY, ctypes.PyDLL)
    except Unusable:
        return None
