"""The C library's heap."""

from __future__ import annotations

import contextlib
import ctypes


def give_back() -> None:
    """Returns to the system what has been freed, say after loading; glibc would keep it."""
    with contextlib.suppress(AttributeError, OSError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
