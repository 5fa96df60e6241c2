"""Transport over TCP between any two machines: one gloo process group per link, of two ranks and no world.

Messages use one tag per kind. What precedes a payload has one size, so that it takes one message; the next is under
way before the last has been acknowledged. gloo leaves whoever waits for a message that broke off in its middle waiting
until the deadline, but a receive whose message has not begun fails within milliseconds of the peer's death. So nobody
waits for a payload: the receiver waits for the END that follows it on the same stream, the sender for the receiver's
ACK. An expired wait closes the pair on both sides; that is also how `close` wakes a thread that waits.
"""

from __future__ import annotations

import contextlib
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore, Work  # type: ignore[attr-defined]

from kvferry.runtime.transfer.buffers import Buffers
from kvferry.runtime.transfer.meeting import Deadline, OpenEnds
from kvferry.runtime.transfer.store import StoreMeeting, first_line, seconds
from kvferry.runtime.transfer.ticket import RankAddress
from kvferry.runtime.transfer.transport import MAX_HEADER_BYTES, MAX_PIECES, LinkClosed, LinkName, Payload

HEADER, PAYLOAD, END, ACK, NEVER = range(1, 6)
FOREVER_S = 365 * 86400.0
_SIZES = struct.Struct(f"<II{MAX_PIECES}Q")
"""Of the header, number of pieces, of each piece."""
_HEADER_BYTES = _SIZES.size + MAX_HEADER_BYTES
SOURCE, DESTINATION = 0, 1


def _bytes(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8)


def _keep() -> None:
    """There is nothing to give back."""


def cut(places: Sequence[torch.Tensor], sizes: Sequence[int]) -> list[torch.Tensor]:
    """Pieces of these sizes; none if one would cross from one place into the next."""
    pieces: list[torch.Tensor] = []
    left = deque(places)
    for size in sizes:
        place = left.popleft() if left else _bytes(0)
        if (rest := place.numel() - size) < 0:
            return []
        pieces.append(place[:size] if rest else place)
        if rest:
            left.appendleft(place[size:])
    return [] if left else pieces


class _Pair:
    """A process group of two; every failure is `LinkClosed` and final."""

    def __init__(self, name: str, group: Any, other: int, ends: OpenEnds) -> None:
        self._name = name
        self._group = group
        self._other = other
        self._ends = ends
        self._closing = threading.Lock()
        self._closed = False
        ends.add(self)

    def isend(self, tensor: torch.Tensor, tag: int) -> Work:
        return self._start(self._group.send, tensor, tag)

    def ireceive(self, tensor: torch.Tensor, tag: int) -> Work:
        return self._start(self._group.recv, tensor, tag)

    def _start(self, operation: Callable[..., Work], tensor: torch.Tensor, tag: int) -> Work:
        if self._closed:
            self.close()
            raise LinkClosed(f"{self._name}: closed")
        try:
            return operation([tensor], self._other, tag)
        except RuntimeError as error:
            raise self._broken(error) from error

    def wait(self, work: Work, timeout_s: float) -> None:
        try:
            work.wait(seconds(timeout_s))
        except RuntimeError as error:
            raise self._broken(error) from error

    def _broken(self, error: RuntimeError) -> LinkClosed:
        self.close()
        return LinkClosed(f"{self._name}: {first_line(error)}")

    def close(self) -> None:
        """Nothing is read or written once this returns, whoever called it first."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
            with contextlib.suppress(RuntimeError):  # raised at once if the peer has closed the pair already
                self._group.recv([_bytes(1)], self._other, NEVER).wait(seconds(0.001))
        self._ends.remove(self)


class GlooSendEnd:
    max_unfinished = 2

    def __init__(self, pair: _Pair) -> None:
        self._pair = pair
        self._begun: deque[tuple[Work, list[Work], list[torch.Tensor]]] = deque()
        """What tells of each one's arrival, what sends it, and the memory that is being read."""

    def send(self, header: bytes, pieces: Sequence[torch.Tensor], timeout_s: float) -> None:
        del timeout_s  # nothing waits here
        received = self._pair.ireceive(_bytes(1), ACK)
        sizes = [piece.numel() for piece in pieces]
        first = bytearray(_HEADER_BYTES)
        _SIZES.pack_into(first, 0, len(header), len(sizes), *sizes, *[0] * (MAX_PIECES - len(sizes)))
        first[_SIZES.size : _SIZES.size + len(header)] = header
        parts = [(torch.frombuffer(first, dtype=torch.uint8), HEADER)]
        parts += [(piece, PAYLOAD) for piece in pieces] + [(_bytes(1), END)]
        sent = [self._pair.isend(tensor, tag) for tensor, tag in parts]
        self._begun.append((received, sent, [tensor for tensor, _ in parts]))

    def wait_sent(self, timeout_s: float) -> bool:
        self._pair.wait(self._begun[0][0], timeout_s)
        self._begun.popleft()  # what was sent is over before the ACK came
        return True

    def wake(self) -> None:
        """A message is acknowledged as soon as it has arrived."""

    def close(self) -> None:
        self._pair.close()


class GlooReceiveEnd:
    """Always asks for the next header: so it may come while a payload is on its way."""

    in_place = True

    def __init__(self, name: str, pair: _Pair, buffers: Buffers) -> None:
        self._name = name
        self._pair = pair
        self._buffers = buffers
        self._next = self._ask()
        self._unread: list[int] | None = None
        """Sizes of the pieces that come next."""
        self._ack: Work | None = None
        """The last one, on its way."""

    def _ask(self) -> tuple[torch.Tensor, Work]:
        first = _bytes(_HEADER_BYTES)
        return first, self._pair.ireceive(first, HEADER)

    def receive_header(self, timeout_s: float) -> tuple[bytes, int]:
        """Waits on when the time is over, for a wait of gloo's that runs out of time closes the link."""
        del timeout_s
        first, work = self._next
        self._pair.wait(work, FOREVER_S)
        self._next = self._ask()
        data = first.numpy().tobytes()
        header_size, num_pieces, *sizes = _SIZES.unpack_from(data)
        if not (0 < header_size <= MAX_HEADER_BYTES and num_pieces <= MAX_PIECES):
            self._pair.close()
            raise LinkClosed(f"{self._name}: a header of {header_size} bytes for {num_pieces} pieces")
        self._unread = sizes[:num_pieces]
        return data[_SIZES.size : _SIZES.size + header_size], sum(self._unread)

    def receive_payload(self, timeout_s: float, into: Sequence[torch.Tensor] = ()) -> Payload:
        sizes, self._unread = self._unread, None
        if sizes is None:
            raise LinkClosed(f"{self._name}: no header before the payload")
        begin = time.perf_counter()
        pieces = cut(into, sizes)
        memory = None if pieces or not sizes else self._buffers.take(sum(sizes))
        if memory is not None:
            pieces = list(torch.split(memory[: sum(sizes)], sizes))
        works = [self._pair.ireceive(piece, PAYLOAD) for piece in pieces]
        end = self._pair.ireceive(_bytes(1), END)
        if self._ack is not None:
            self._pair.wait(self._ack, timeout_s)
        self._pair.wait(end, timeout_s)
        self._ack = self._pair.isend(_bytes(1), ACK)  # the sender asked for it before all else
        del works  # over before the END came
        took = time.perf_counter() - begin
        if memory is None:
            return Payload(into, _keep, took)
        data = memory[: sum(sizes)]
        if not into:
            return Payload([data], partial(self._buffers.free, memory), took)
        for place, part in zip(into, torch.split(data, [place.numel() for place in into]), strict=True):
            place.numpy()[:] = part.numpy()
        self._buffers.free(memory)
        return Payload(into, _keep, took)

    def close(self) -> None:
        self._pair.close()


class GlooTransport:
    """`host`: name or address of this machine's interface that peers reach."""

    def __init__(self, host: str, secret: bytes) -> None:
        self._host = host
        self._ends = OpenEnds()
        self._buffers = Buffers()
        self._meeting = StoreMeeting(host, self._ends, secret)

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def address(self) -> RankAddress:
        return self._meeting.address

    def _pair(self, name: LinkName, store: TCPStore, prefix: str, rank: int, deadline: Deadline) -> _Pair:
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname=self._host)]
        options._timeout = seconds(deadline.remaining())
        try:
            group = ProcessGroupGloo(PrefixStore(prefix, store), rank, 2, options)
        except RuntimeError as error:
            raise LinkClosed(f"{name}: {first_line(error)}") from error
        return _Pair(str(name), group, 1 - rank, self._ends)

    def connect(self, name: LinkName, destination: RankAddress, timeout_s: float) -> GlooSendEnd:
        deadline = Deadline(timeout_s, f"connecting {name}")
        store, prefix = self._meeting.connect(name, destination, deadline)
        return GlooSendEnd(self._pair(name, store, prefix, SOURCE, deadline))

    def accept(self, name: LinkName, source: RankAddress, timeout_s: float) -> GlooReceiveEnd:
        del source
        deadline = Deadline(timeout_s, f"accepting {name}")
        store, prefix = self._meeting.accept(name, deadline)
        return GlooReceiveEnd(str(name), self._pair(name, store, prefix, DESTINATION, deadline), self._buffers)

    def close(self) -> None:
        self._ends.close()
