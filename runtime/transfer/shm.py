"""Transport between processes of one machine: payloads through shared memory, everything else through a local socket.

    source                                              destination
      │ connect (abstract socket, named by the kernel)       │ listens from the start
      │ ── its tag, link name ─────────────────────────────▶ │
      │ ◀──────────────────────────── accepted, its tag ──── │
      │ copy into a buffer that is free                      │
      │ ── HEADER size, buffer's number [, descriptor] ────▶ │ maps it, if it is new
      │ ◀──────────────── FREED number, once imported ────── │ the pool's blocks are copied straight from it

A payload is copied once on either side: out of the pool, into the pool. Buffers are used again, for the pages of a new
one cost more than the copy. The socket wakes whoever waits, and its end tells of a peer's death at once. The memory has
no name (`memfd`), so nothing is left behind however a process dies, and the size of `/dev/shm` does not matter.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from kvferry.runtime.transfer.buffers import best_fit
from kvferry.runtime.transfer.meeting import Arrivals, Deadline, OpenEnds, machine_id
from kvferry.runtime.transfer.secret import TAG_BYTES, is_tag, tag
from kvferry.runtime.transfer.ticket import RankAddress
from kvferry.runtime.transfer.transport import MAX_HEADER_BYTES, LinkClosed, LinkName, Payload

LINK_BYTES = 32 << 20
"""Of a link's buffers; it may have one of more."""
SMALLEST_BYTES = 1 << 20
"""So that buffers are few; pages that nobody writes do not exist."""
MAX_BUFFERS = LINK_BYTES // SMALLEST_BYTES
HANDSHAKE_S = 2.0
HEADER, FREED, ACCEPTED, OFFERED = b"H", b"F", b"A", b"O"
_HEADER = struct.Struct("<cQIdI")
"""Kind, payload's size, buffer's number, seconds it took to fill, how many buffers are given up (numbers follow)."""
_FREED = struct.Struct("<cI")
_LARGEST = _HEADER.size + 4 * MAX_BUFFERS + MAX_HEADER_BYTES
_CREDENTIALS = struct.Struct("3i")
_Bytes = NDArray[np.uint8]


def _map(descriptor: int) -> _Bytes:
    """All of a memory object, as long as somebody holds the array."""
    size = os.fstat(descriptor).st_size
    return np.frombuffer(mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE), dtype=np.uint8)


class _Buffers:
    """A sending end's. `lent`: the other end reads them; only it can give them back."""

    def __init__(self) -> None:
        self._free: dict[int, _Bytes] = {}
        self._lent: dict[int, _Bytes] = {}
        self._given_up: list[int] = []
        self._next = 0

    def take(self, size: int) -> tuple[int, _Bytes, int | None] | None:
        """Number, memory, and a descriptor if the other end has not seen it. `None`: wait for one to be freed."""
        number = best_fit(((n, memory.size) for n, memory in self._free.items()), size)
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
        os.ftruncate(descriptor, size)
        number, self._next = self._next, self._next + 1
        self._lent[number] = np.frombuffer(mmap.mmap(descriptor, size), dtype=np.uint8)
        return number, self._lent[number], descriptor

    def _total(self) -> int:
        return sum(memory.size for memory in (*self._free.values(), *self._lent.values()))

    def freed(self, number: int) -> None:
        """Raises `LinkClosed` if it is not lent."""
        if number not in self._lent:
            raise LinkClosed(f"buffer {number} was given back twice")
        self._free[number] = self._lent.pop(number)

    def take_given_up(self) -> list[int]:
        numbers, self._given_up = self._given_up, []
        return numbers


class _End:
    """One end of a link. One thread uses it; any thread may close it, or free a payload."""

    def __init__(self, name: str, sock: socket.socket, ends: OpenEnds) -> None:
        """Takes over `sock` and registers with `ends`."""
        self._name = name
        self._socket = sock
        self._ends = ends
        self._using = threading.Lock()
        self._freeing = threading.Lock()
        self._closed = False
        self._buffers = _Buffers()
        """Of the sending end."""
        self._mapped: dict[int, _Bytes] = {}
        """At the receiving end."""
        self._unread: Payload | None = None
        ends.add(self)

    @contextlib.contextmanager
    def _use(self) -> Iterator[None]:
        """Keeps the socket while a call works on it. A call that fails leaves a dead link."""
        with self._using:
            if self._closed:
                raise LinkClosed(f"{self._name}: closed")
            try:
                yield
            except LinkClosed:
                self._shut()
                raise
            except (OSError, ValueError, struct.error) as error:
                why = "closed" if self._closed else str(error)
                self._shut()
                if isinstance(error, TimeoutError):
                    why = "no answer in time"
                raise LinkClosed(f"{self._name}: {why}") from error

    def _put(self, packet: bytes, deadline: Deadline) -> None:
        self._socket.settimeout(deadline.remaining())
        self._socket.send(packet)

    def _check(self, packet: bytes, kind: bytes) -> bytes:
        if packet[:1] != kind:
            raise LinkClosed(f"{self._name}: " + ("a packet out of turn" if packet else "the other end is gone"))
        return packet

    def wait_accepted(self, secret: bytes, deadline: Deadline) -> None:
        with self._use():
            self._socket.settimeout(deadline.remaining())
            packet = self._check(self._socket.recv(_LARGEST), ACCEPTED)
            if not is_tag(packet[len(ACCEPTED) :], secret, ACCEPTED, self._name.encode()):
                raise LinkClosed(f"{self._name}: the other end does not know the cluster's secret")

    def accept(self, secret: bytes, deadline: Deadline) -> None:
        with self._use():
            self._put(ACCEPTED + tag(secret, ACCEPTED, self._name.encode()), deadline)

    # ------------------------------------------------------------ sending
    def send(self, header: bytes, pieces: Sequence[torch.Tensor], timeout_s: float) -> None:
        deadline = Deadline(timeout_s, f"sending on {self._name}")
        size = sum(piece.numel() for piece in pieces)
        with self._use():
            number, memory, descriptor = self._take(size, deadline)
            try:
                begin, filled = time.perf_counter(), 0
                for piece in pieces:
                    memory[filled : filled + piece.numel()] = piece.numpy()
                    filled += piece.numel()
                given_up = self._buffers.take_given_up()
                packet = _HEADER.pack(HEADER, size, number, time.perf_counter() - begin, len(given_up))
                packet += struct.pack(f"<{len(given_up)}I", *given_up) + header
                self._socket.settimeout(deadline.remaining())
                socket.send_fds(self._socket, [packet], [] if descriptor is None else [descriptor])
            finally:
                if descriptor is not None:
                    os.close(descriptor)

    def _take(self, size: int, deadline: Deadline) -> tuple[int, _Bytes, int | None]:
        while True:
            with contextlib.suppress(BlockingIOError):
                while True:
                    self._hear_freed(0.0)
            if (taken := self._buffers.take(size)) is not None:
                return taken
            self._hear_freed(deadline.remaining())

    def _hear_freed(self, timeout_s: float) -> None:
        self._socket.settimeout(timeout_s)
        self._buffers.freed(_FREED.unpack(self._check(self._socket.recv(_LARGEST), FREED))[1])

    def wait_sent(self, timeout_s: float) -> None:
        del timeout_s  # `send` has taken the bytes

    # ------------------------------------------------------------ receiving
    def receive_header(self, timeout_s: float) -> tuple[bytes, int] | None:
        with self._use():
            self._socket.settimeout(max(timeout_s, 0.001))
            try:
                packet, descriptors, _, _ = socket.recv_fds(self._socket, _LARGEST, 1)
            except TimeoutError:
                return None
            try:
                _, size, number, seconds, num_given_up = _HEADER.unpack_from(self._check(packet, HEADER))
                for old in struct.unpack_from(f"<{num_given_up}I", packet, _HEADER.size):
                    self._mapped.pop(old, None)
                if descriptors:
                    self._mapped[number] = _map(descriptors[0])
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
            memory = self._mapped.get(number)
            if memory is None or size > memory.size:
                raise LinkClosed(f"{self._name}: {size} bytes in buffer {number}, which has no room for them")
            self._unread = Payload(torch.from_numpy(memory[:size]), partial(self._give_back, number), seconds)
            return packet[_HEADER.size + 4 * num_given_up :], size

    def receive_payload(self, timeout_s: float) -> Payload:
        del timeout_s  # it is here already
        payload, self._unread = self._unread, None
        if payload is None:
            raise LinkClosed(f"{self._name}: no header before the payload")
        return payload

    def _give_back(self, number: int) -> None:
        """Does not wait: fewer such packets than the socket can hold are under way."""
        with self._freeing, contextlib.suppress(OSError):  # an end that is closed lends nothing any more
            self._socket.send(_FREED.pack(FREED, number))

    def _shut(self) -> None:
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes both ends

    def close(self) -> None:
        self._shut()
        with self._using, self._freeing:
            self._socket.close()
            self._buffers = _Buffers()
            self._mapped.clear()
            self._unread = None
        self._ends.remove(self)


class ShmTransport:
    """`host` is only carried along: links never leave the machine."""

    def __init__(self, host: str, secret: bytes) -> None:
        self._secret = secret
        self._ends = OpenEnds()
        self._arrivals: Arrivals[_End] = Arrivals()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind("")  # the kernel picks a free abstract name: five hexadecimal digits
        self._listener.listen(128)
        number = int(self._listener.getsockname()[1:], 16)
        self._address = RankAddress(host, number, machine_id())
        self._thread = threading.Thread(target=self._listen, name="kvferry-shm-listen", daemon=True)
        self._thread.start()

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def address(self) -> RankAddress:
        return self._address

    def _listen(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return  # closed
            try:
                self._admit(sock)
            except (OSError, ValueError, LinkClosed):  # a stranger, or it left at once
                sock.close()

    def _admit(self, sock: socket.socket) -> None:
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        if _CREDENTIALS.unpack(credentials)[1] != os.getuid():
            raise LinkClosed("a process of another user")
        sock.settimeout(HANDSHAKE_S)
        packet = sock.recv(_LARGEST)
        if not is_tag(packet[:TAG_BYTES], self._secret, OFFERED, packet[TAG_BYTES:]):
            raise LinkClosed("it does not know the cluster's secret")
        name = packet[TAG_BYTES:].decode()
        self._arrivals.put(name, _End(name, sock, self._ends))

    def _same_machine(self, name: LinkName, other: RankAddress) -> None:
        if other.machine != self._address.machine:
            raise LinkClosed(
                f"{name}: transport 'shm' works within one machine, but the ends are on {other.machine!r} and "
                f"{self._address.machine!r}; use transport 'gloo' or 'nccl'"
            )

    def connect(self, name: LinkName, destination: RankAddress, timeout_s: float) -> _End:
        self._same_machine(name, destination)
        deadline = Deadline(timeout_s, f"connecting {name}")
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            sock.settimeout(deadline.remaining())
            sock.connect(f"\0{destination.store_port:05x}")
            offer = str(name).encode()
            sock.send(tag(self._secret, OFFERED, offer) + offer)
            end = _End(str(name), sock, self._ends)
        except OSError as error:
            sock.close()
            raise LinkClosed(f"{name}: cannot reach the destination: {error}") from error
        try:
            end.wait_accepted(self._secret, deadline)
        except LinkClosed:
            end.close()
            raise
        return end

    def accept(self, name: LinkName, source: RankAddress, timeout_s: float) -> _End:
        self._same_machine(name, source)
        deadline = Deadline(timeout_s, f"accepting {name}")
        while True:
            end = self._arrivals.take(str(name), deadline)
            try:
                end.accept(self._secret, deadline)
            except LinkClosed:
                end.close()  # it gave up; another may come
                continue
            return end

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes `_listen`
        self._thread.join(HANDSHAKE_S + 1)
        self._listener.close()
        self._arrivals.close()
        self._ends.close()
