"""How many threads a step program uses: a fixed number, or what `runtime/cores.py` says while the program runs.

Imports no torch.
"""

from __future__ import annotations

import ctypes


class Cores(ctypes.Structure):
    """As in `program.h`."""

    _fields_ = (
        ("notes", ctypes.c_void_p),
        *[(name, ctypes.c_int64) for name in ("count", "group", "group_size", "one_free_until")],
    )
    start: ctypes.c_char
    """Keeps the notes where they are."""


_shared: Cores | None = None


def share_cores(lib: ctypes.CDLL, cores: Cores | None) -> None:
    """From now on programs of this process use as many threads as `cores` allows; None: as many as they are told."""
    global _shared
    lib.kvferry_share_cores(None if cores is None else ctypes.byref(cores))
    _shared = cores


def program_threads(told: int) -> int:
    """How many a program may use at most, where it was told so many."""
    return told if _shared is None else max(1, int(_shared.count // _shared.group_size))
