"""A pool's pages, taken from the system before a step writes them.

The first write to a page of 4 KiB is a fault, 2 µs where nothing else goes on and 20 where threads of a step meet in
them: 7 ms of a step of 60 that writes 1.5 MB of KV (docs/log.md). Taken in pieces and in one row they cost 2.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Sequence

import torch

_libc = ctypes.CDLL(None)
_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of linux/mman.h (5.14): as if every page was written, but nothing in it changes."""
_PAGE = 4096
_PIECE = 256 << 10
"""Bytes at a time: whoever maps memory meanwhile waits for so many."""
CLOSE_TIMEOUT_S = 5.0


class PageTaker:
    """Takes all pages of CPU tensors in a thread of its own, so that nobody waits for it: 2 GB/s.

    Where the system has no such call, pages come as they are written.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        """tensors: contiguous; they are kept until all is done."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(list(tensors),), name="kv-pages", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Takes no more. Idempotent."""
        self._stop.set()
        self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            first = tensor.data_ptr() // _PAGE * _PAGE
            end = tensor.data_ptr() + tensor.numel() * tensor.element_size()
            for address in range(first, end, _PIECE):
                if self._stop.is_set() or not take(address, min(_PIECE, end - address)):
                    return


def take(address: int, size: int) -> bool:
    """False: the system cannot."""
    if sys.platform != "linux":
        return False
    taken: int = _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), _POPULATE_WRITE)
    return taken == 0
