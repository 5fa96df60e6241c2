"""Transport over TCP between any two machines: one gloo process group per link, of two ranks and no world.

Messages use one tag per kind. What precedes a payload has one size, so that it takes one message; the next is under
way before the last has been acknowledged. gloo leaves whoever waits for a message that broke off in its middle waiting
until the deadline, but a receive whose message has not begun fails within milliseconds of the peer's death. So nobody
waits for a payload: the receiver waits for the END that follows it on the same stream, the sender for the receiver's
ACK. An expired wait closes the pair on both sides; that is also how `close` wakes a thread that waits.
"""

from __future__ import annotations

import contextlib
import queue
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


def _nothing() -> None:
    """Memory of somebody else's is not given back."""


def cut(places: Sequence[torch.Tensor], sizes: Sequence[int]) -> list[torch.Tensor]:
    """Pieces of these sizes; none if one would cross from one place into the next."""
    pieces: list[torch.Tensor] = []
    left = deque(places)
    for size in sizes:
        if not left or left[0].numel() < size:
            return []
        pieces.append(left[0][:size])
        rest = left.popleft()[size:]
        if rest.numel():
            left.appendleft(rest)
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
        with self._closing:
            if self._closed:
                return
            self._closed = True
        self._ends.remove(self)
        with contextlib.suppress(RuntimeError):  # raised at once if the peer has closed the pair already
            self._group.recv([_bytes(1)], self._other, NEVER).wait(seconds(0.001))


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
        received, sent, _ = self._begun[0]
        self._pair.wait(received, timeout_s)
        for work in sent:
            self._pair.wait(work, timeout_s)  # over before the ACK came
        self._begun.popleft()
        return True

    def wake(self) -> None:
        """A message is acknowledged as soon as it has arrived."""

    def close(self) -> None:
        self._pair.close()


class GlooReceiveEnd:
    """A thread of its own waits for headers: a wait of gloo's that runs out of time would close the link."""

    def __init__(self, name: str, pair: _Pair, timeout_s: float, buffers: Buffers) -> None:
        self._name = name
        self._pair = pair
        self._timeout_s = timeout_s
        self._buffers = buffers
        self._headers: queue.Queue[tuple[bytes, list[int]] | LinkClosed] = queue.Queue(4)
        self._unread: list[int] | None = None
        """Sizes of the pieces that come next."""
        threading.Thread(target=self._read_headers, name=f"kvferry-gloo-{name}", daemon=True).start()

    def _read_headers(self) -> None:
        try:
            while True:
                first = _bytes(_HEADER_BYTES)
                self._pair.wait(self._pair.ireceive(first, HEADER), FOREVER_S)
                data = first.numpy().tobytes()
                header_size, num_pieces, *sizes = _SIZES.unpack_from(data)
                if not (0 < header_size <= MAX_HEADER_BYTES and num_pieces <= MAX_PIECES):
                    raise LinkClosed(f"{self._name}: a header of {header_size} bytes for {num_pieces} pieces")
                self._put((data[_SIZES.size : _SIZES.size + header_size], sizes[:num_pieces]))
        except LinkClosed as closed:
            self._pair.close()
            with contextlib.suppress(LinkClosed):
                self._put(closed)

    def _put(self, header: tuple[bytes, list[int]] | LinkClosed) -> None:
        """Raises `LinkClosed` when nobody reads them."""
        try:
            self._headers.put(header, timeout=self._timeout_s)
        except queue.Full:
            raise LinkClosed(f"{self._name}: nobody has read its headers for {self._timeout_s:g} s") from None

    def receive_header(self, timeout_s: float) -> tuple[bytes, int] | None:
        try:
            header = self._headers.get(timeout=max(timeout_s, 0.001))
        except queue.Empty:
            return None
        if isinstance(header, LinkClosed):
            self._put(header)  # for whoever asks again
            raise LinkClosed(str(header))
        self._unread = header[1]
        return header[0], sum(header[1])

    def receive_payload(self, timeout_s: float, into: Sequence[torch.Tensor] = ()) -> Payload:
        sizes, self._unread = self._unread, None
        if sizes is None:
            raise LinkClosed(f"{self._name}: no header before the payload")
        begin = time.perf_counter()
        pieces, free = cut(into, sizes), _nothing
        if not pieces and sizes:
            memory = self._buffers.take(sum(sizes))
            pieces, free = list(torch.split(memory[: sum(sizes)], sizes)), partial(self._buffers.free, memory)
        works = [self._pair.ireceive(piece, PAYLOAD) for piece in pieces]
        self._pair.wait(self._pair.ireceive(_bytes(1), END), timeout_s)
        for work in works:
            self._pair.wait(work, timeout_s)  # over before the END came
        self._pair.wait(self._pair.isend(_bytes(1), ACK), timeout_s)  # the sender asked for it before all else
        return Payload(pieces, free, time.perf_counter() - begin, in_place=free is _nothing)

    def close(self) -> None:
        self._pair.close()  # wakes the thread as well


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
        return GlooReceiveEnd(
            str(name), self._pair(name, store, prefix, DESTINATION, deadline), timeout_s, self._buffers
        )

    def close(self) -> None:
        self._ends.close()
