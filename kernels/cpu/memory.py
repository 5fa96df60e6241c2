"""Memory for weights, in huge pages where the system has them.

A step reads every weight once. In pages of 4 KiB that is a walk through the page tables every 4 KiB, behind which the
processor does not fetch ahead: one thread then reads about half as fast as in pages of 2 MiB, two threads 3/4.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import weakref

import torch

_HUGE = 2 << 20
_ALIGNMENT = 64
_CHUNK = 64 << 20
_LEAST = 64 << 10
"""What is smaller is left to torch: a small model shall not take a huge page."""


class WeightMemory:
    """Gives out chunks from their beginning to their end; a chunk lives as long as a tensor in it. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunk: weakref.ref[mmap.mmap] | None = None
        self._next = self._stop = 0

    def empty(self, size: int) -> torch.Tensor:
        """uint8 `[size]`. Pages that nobody wrote take no memory."""
        if size < _LEAST:
            return torch.empty(size, dtype=torch.uint8)
        with self._lock:
            chunk = None if self._chunk is None else self._chunk()
            if chunk is None or self._next + size > self._stop:
                chunk = self._open(max(size, _CHUNK))
            found = torch.frombuffer(chunk, dtype=torch.uint8, count=size, offset=self._next)
            self._next += -(-size // _ALIGNMENT) * _ALIGNMENT
            return found

    def _open(self, size: int) -> mmap.mmap:
        chunk = mmap.mmap(-1, size + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(AttributeError, OSError):  # a system that knows no such pages
            chunk.madvise(mmap.MADV_HUGEPAGE)
        self._next = -torch.frombuffer(chunk, dtype=torch.uint8).data_ptr() % _HUGE
        self._stop = self._next + size
        self._chunk = weakref.ref(chunk)
        return chunk


_memory = WeightMemory()


def weight_empty(size: int) -> torch.Tensor:
    """uint8 `[size]` that begins on a cache line."""
    return _memory.empty(size)
