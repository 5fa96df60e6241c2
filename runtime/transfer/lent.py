"""What the sending end of a `shm` link lends to the other: buffers, and blocks of a pool that both have mapped.

A message has a buffer in any case. Blocks of a shared pool do not go through it, and then its pages do not exist; but
when their sender cannot wait any longer, it copies them there, says so in the buffer, and only then lets them go. Who
has copied blocks and finds that nothing is said, has copied what was lent; otherwise he copies again, from the buffer.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from kvferry.runtime.transfer.buffers import best_fit
from kvferry.runtime.transfer.transport import LinkClosed

LINK_BYTES = 64 << 20
"""Of a link's buffers; it may have one of more."""
SMALLEST_BYTES = 2 << 20
"""So that buffers are few; pages that nobody writes do not exist."""
MAX_BUFFERS = LINK_BYTES // SMALLEST_BYTES
_STATE_BYTES = 64
Bytes = NDArray[np.uint8]


def _fence() -> None:
    """Orders what this thread has read and written with what it will: the one is over before the other begins."""
    order = threading.Lock()
    for _ in range(2):  # nothing moves down past the first release, nor up past the second acquisition
        with order:
            pass


class Buffer:
    """A memory object of which both ends have all mapped."""

    def __init__(self, descriptor: int, populate: bool = False) -> None:
        flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if populate else 0)
        mapped = np.frombuffer(mmap.mmap(descriptor, os.fstat(descriptor).st_size, flags=flags), dtype=np.uint8)
        self.memory: Bytes = mapped[:-_STATE_BYTES]
        self._moved: Bytes = mapped[-_STATE_BYTES:][:1]

    def fill(self, pieces: Sequence[torch.Tensor]) -> None:
        filled = 0
        for piece in pieces:
            self.memory[filled : filled + piece.numel()] = piece.numpy()
            filled += piece.numel()

    def say_moved(self, moved: bool) -> None:
        _fence()
        self._moved[0] = moved
        _fence()

    def moved(self, size: int) -> list[torch.Tensor] | None:
        """The payload, if it lies here since the message was sent."""
        _fence()
        moved = bool(self._moved[0])
        _fence()
        return [torch.from_numpy(self.memory[:size])] if moved else None


class Loan:
    """One message that the other end may be reading. `pieces`: in the sender's own memory; none: in the buffer."""

    def __init__(self, buffer: Buffer, pieces: Sequence[torch.Tensor], until: float) -> None:
        self.buffer = buffer
        self.pieces = pieces
        self.until = until
        """When the sender wants its memory back, by the monotonic clock."""

    def end(self) -> None:
        """The sender's memory may change from now on."""
        if self.pieces:
            self.buffer.fill(self.pieces)
            self.buffer.say_moved(True)
            self.pieces = ()


class Buffers:
    """A sending end's. Lent ones are the other end's; only it can give them back."""

    def __init__(self) -> None:
        self._free: dict[int, Buffer] = {}
        self._lent: dict[int, Buffer] = {}
        self._loans: dict[int, Loan] = {}
        self._given_up: list[int] = []
        self._next = 0

    def take(self, size: int) -> tuple[int, Buffer, int | None] | None:
        """Number, buffer, and a descriptor if the other end has not seen it. `None`: wait for one to be freed."""
        number = best_fit(((n, buffer.memory.size) for n, buffer in self._free.items()), size)
        if number is not None:
            self._lent[number] = self._free.pop(number)
            return number, self._lent[number], None
        size = max(size, SMALLEST_BYTES)
        while self._free and self._total() + size > LINK_BYTES:
            number = next(iter(self._free))
            del self._free[number]
            self._given_up.append(number)
        if self._lent and self._total() + size > LINK_BYTES:
            return None
        descriptor = os.memfd_create("kvferry-link")
        os.ftruncate(descriptor, size + _STATE_BYTES)
        number, self._next = self._next, self._next + 1
        self._lent[number] = Buffer(descriptor)
        return number, self._lent[number], descriptor

    def _total(self) -> int:
        return sum(buffer.memory.size for buffer in (*self._free.values(), *self._lent.values()))

    @property
    def any_lent(self) -> bool:
        return bool(self._lent)

    def lend(self, number: int, pieces: Sequence[torch.Tensor], until: float) -> Loan:
        """Of one that is taken."""
        loan = self._loans[number] = Loan(self._lent[number], pieces, until)
        loan.buffer.say_moved(False)
        return loan

    def freed(self, number: int) -> None:
        """Raises `LinkClosed` if it is not lent."""
        if number not in self._loans:
            raise LinkClosed(f"buffer {number} was given back twice")
        self._loans.pop(number).pieces = ()
        self._free[number] = self._lent.pop(number)

    def take_given_up(self) -> list[int]:
        numbers, self._given_up = self._given_up, []
        return numbers
