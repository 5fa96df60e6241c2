"""Exchange between processes of one machine through a memory-mapped file on tmpfs.

    header   one cache line per rank: how many messages it has published
    data     per rank two buffers, used in turn

A rank writes its message s into buffer s mod 2, publishes s, and waits until all have published s. It may overwrite the
buffer at s + 2: by then all others have published s + 1, which they do only after they have read s. So one counter per
rank and one wait per message suffice.

The creator (rank 0) prepares the file under another name and renames it, so nobody sees half of it; it removes the
name as soon as all have attached, so nothing is left behind however the processes end.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from kvferry.kernels.cpu.program import Exchange
from kvferry.runtime.errors import DeviceError

_LINE_BYTES = 64
_BUFFER_BYTES = 1 << 20
_SPINS = 200
"""Looks before the core is offered to others: about 50 µs."""
_YIELDS = 200
"""Looks, each after an offer, before the waiter sleeps between them."""
_FIRST_NAP_S, _LONGEST_NAP_S = 20e-6, 2e-3


class ShmExchange:
    """One rank's end. Not safe for several threads."""

    def __init__(self, rank: int, size: int, name: str, timeout_s: float) -> None:
        self._rank, self._timeout_s = rank, timeout_s
        num_bytes = size * (_LINE_BYTES + 2 * _BUFFER_BYTES)
        folder = Path("/dev/shm")
        path = (folder if folder.is_dir() else Path(tempfile.gettempdir())) / f"kvferry-{name}"
        if rank == 0:
            self._map = _create(path, num_bytes)
        else:
            self._map = self._attach(path, num_bytes)
        memory = np.frombuffer(self._map, dtype=np.uint8)
        lines = memory[: size * _LINE_BYTES].view(np.uint64)
        self._published = lines[:: _LINE_BYTES // 8]
        data = torch.from_numpy(memory[size * _LINE_BYTES :])
        self._buffers = list(data.view(2, size, _BUFFER_BYTES))
        self._fence = threading.Lock()
        self.state = Exchange(
            published=memory.ctypes.data,
            data=data.data_ptr(),
            rank=rank,
            size=size,
            buffer_bytes=_BUFFER_BYTES,
            timeout_ns=int(timeout_s * 1e9),
        )
        """Shared with the step programs, which exchange messages on their own."""
        try:
            self._publish()  # message 1 says: attached
        finally:
            if rank == 0:
                path.unlink(missing_ok=True)

    def max_bytes(self) -> int:
        return _BUFFER_BYTES

    def swap(self, flat: torch.Tensor) -> Sequence[torch.Tensor]:
        num_bytes = flat.numel() * flat.element_size()
        buffer = self._buffers[(self.state.seq + 1) % 2][:, :num_bytes].view(flat.dtype)
        buffer[self._rank].copy_(flat)
        self._publish()
        return list(buffer)

    def close(self) -> None:
        """Drops the mapping (it goes with the last view of it)."""
        self._buffers.clear()

    def _publish(self) -> None:
        """Announces the next message and waits for everyone's."""
        self.state.seq = seq = self.state.seq + 1
        self._order_memory()
        self._published[self._rank] = seq
        self.state.late = self._wait(lambda: bool((self._published >= seq).all()))
        self._order_memory()
        self.check()

    def check(self) -> None:
        """Raises `DeviceError` if somebody was late, whoever waited."""
        if self.state.late:
            missing = (self._published < self.state.seq).nonzero()[0].tolist()
            raise DeviceError(
                f"rank {self._rank} waited {self._timeout_s:g} s for ranks {missing} of its tensor-parallel group"
            )

    def _order_memory(self) -> None:
        """Keeps data and counters in order on machines that reorder stores: two locks taken in turn are a barrier."""
        for _ in range(2):
            with self._fence:
                pass

    def _attach(self, path: Path, num_bytes: int) -> mmap.mmap:
        found: list[mmap.mmap] = []

        def attempt() -> bool:
            with contextlib.suppress(FileNotFoundError), path.open("r+b") as file:
                found.append(mmap.mmap(file.fileno(), num_bytes))
            return bool(found)

        if self._wait(attempt):
            raise DeviceError(f"rank {self._rank} waited {self._timeout_s:g} s for rank 0 to create {path}")
        return found[0]

    def _wait(self, ready: Callable[[], bool]) -> bool:
        """True if the deadline passed. Spins briefly (a peer is usually microseconds away), then yields, then naps."""
        for _ in range(_SPINS):
            if ready():
                return False
        deadline = time.monotonic() + self._timeout_s
        for _ in range(_YIELDS):
            os.sched_yield()
            if ready():
                return False
        nap = _FIRST_NAP_S
        while not ready():
            if time.monotonic() > deadline:
                return True
            time.sleep(nap)
            nap = min(nap * 1.5, _LONGEST_NAP_S)
        return False


def _create(path: Path, num_bytes: int) -> mmap.mmap:
    fd, draft = tempfile.mkstemp(prefix=path.name, dir=path.parent)
    try:
        os.ftruncate(fd, num_bytes)
        mapped = mmap.mmap(fd, num_bytes)
        os.rename(draft, path)
    except OSError as error:
        Path(draft).unlink(missing_ok=True)
        raise DeviceError(f"cannot make shared memory {path} of {num_bytes} bytes: {error}") from error
    finally:
        os.close(fd)
    return mapped
