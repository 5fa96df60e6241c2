"""Transport between processes of one machine: payloads through shared memory, everything else through a local socket.

    source                                              destination
      │ connect (abstract socket, named by the kernel)       │ listens from the start
      │ ── its tag, link name ─────────────────────────────▶ │
      │ ◀──────────────────────────── accepted, its tag ──── │
      │ take a buffer that is free                           │
      │ ── HEADER size, buffer's number, places in a pool    │
      │           [, descriptors] ─────────────────────────▶ │ maps buffer and pool, if they are new
      │ ◀──────────────── FREED number, once imported ────── │ the pool's blocks are copied from the source's

Blocks of a pool that lies in shared memory (`kv/shared.py`) are copied once, by the destination; the source keeps them
until it hears FREED, or copies them into the buffer after `KEEP_S` (see `lent.py`). Everything else goes through the
buffer. Buffers are used again, for the pages of a new one cost more than the copy. The socket wakes whoever waits, and
its end tells of a peer's death at once. The memory has no name (`memfd`), so nothing is left behind however a process
dies, and the size of `/dev/shm` does not matter.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial

import torch

from kvferry.runtime.kv.shared import Bytes, Region, map_to_read, region_of
from kvferry.runtime.transfer.lent import MAX_BUFFERS, Buffer, Buffers, Loan
from kvferry.runtime.transfer.meeting import Arrivals, Deadline, OpenEnds, machine_id
from kvferry.runtime.transfer.secret import TAG_BYTES, is_tag, tag
from kvferry.runtime.transfer.ticket import RankAddress
from kvferry.runtime.transfer.transport import MAX_HEADER_BYTES, MAX_PIECES, LinkClosed, LinkName, Payload

HANDSHAKE_S = 2.0
KEEP_S = 1.0
"""How long blocks are kept for a destination that does not import; they cannot be evicted as long."""
MAX_REGIONS = 16
"""Of one source: its block groups."""
HEADER, FREED, ACCEPTED, OFFERED = b"H", b"F", b"A", b"O"
_HEADER = struct.Struct("<cQIdIII")
"""Kind, payload's size, buffer's number, seconds it took to fill, region's number, how many buffers are given up
(numbers follow), how many pieces lie in the region (place and size of each follow); none: all is in the buffer."""
_FREED = struct.Struct("<cI")
_LARGEST = _HEADER.size + 4 * MAX_BUFFERS + 16 * MAX_PIECES + MAX_HEADER_BYTES
_CREDENTIALS = struct.Struct("3i")


class _End:
    """One end of a link. One thread uses it; any thread may close it, or free a payload."""

    in_place = False
    """What arrives lies in the source's memory: importing it is the only copy."""

    def __init__(self, name: str, sock: socket.socket, ends: OpenEnds) -> None:
        """Takes over `sock` and registers with `ends`."""
        self._name = name
        self._socket = sock
        self._ends = ends
        self._using = threading.Lock()
        self._freeing = threading.Lock()
        self._closed = False
        self._buffers = Buffers()
        """Of the sending end, as are the next four."""
        self._regions: dict[Region, int] = {}
        """Those that the other end has, by number."""
        self._unfinished: deque[Loan] = deque()
        self._woken = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        for descriptor in (sock.fileno(), self._woken):
            self._poll.register(descriptor, select.POLLIN)
        self._mapped: dict[int, Buffer] = {}
        """At the receiving end, as are the next two."""
        self._mapped_regions: list[Bytes] = []
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
            except (OSError, ValueError, IndexError, StopIteration, struct.error) as error:
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
    @property
    def max_unfinished(self) -> int:
        return MAX_BUFFERS

    def send(self, header: bytes, pieces: Sequence[torch.Tensor], timeout_s: float) -> None:
        deadline = Deadline(timeout_s, f"sending on {self._name}")
        size = sum(piece.numel() for piece in pieces)
        region = region_of(pieces)
        if region not in self._regions and len(self._regions) == MAX_REGIONS:
            region = None
        with self._use():
            number, buffer, descriptor = self._take(size, deadline)
            try:
                begin = time.perf_counter()
                if region is None:
                    buffer.fill(pieces)
                self._unfinished.append(
                    self._buffers.lend(number, () if region is None else pieces, time.monotonic() + KEEP_S)
                )
                descriptors = [] if descriptor is None else [descriptor]
                places = []
                if region is not None:
                    places = [n for piece in pieces for n in (piece.data_ptr() - region.address, piece.numel())]
                    if region not in self._regions:
                        self._regions[region] = len(self._regions)
                        descriptors.append(region.descriptor)
                given_up = self._buffers.take_given_up()
                packet = _HEADER.pack(
                    HEADER,
                    size,
                    number,
                    time.perf_counter() - begin,
                    self._regions[region] if region is not None else MAX_REGIONS,
                    len(given_up),
                    len(places) // 2,
                )
                packet += struct.pack(f"<{len(given_up)}I{len(places)}Q", *given_up, *places) + header
                if descriptors:
                    self._socket.settimeout(deadline.remaining())
                    socket.send_fds(self._socket, [packet], descriptors)
                else:
                    self._put(packet, deadline)
            finally:
                if descriptor is not None:
                    os.close(descriptor)

    def _take(self, size: int, deadline: Deadline) -> tuple[int, Buffer, int | None]:
        while True:
            with contextlib.suppress(BlockingIOError):
                while self._buffers.any_lent:
                    self._hear_freed(0.0)
            if (taken := self._buffers.take(size)) is not None:
                return taken
            self._hear_freed(deadline.remaining())

    def _hear_freed(self, timeout_s: float) -> None:
        self._socket.settimeout(timeout_s)
        self._buffers.freed(_FREED.unpack(self._check(self._socket.recv(_LARGEST), FREED))[1])

    def wait_sent(self, timeout_s: float) -> bool:
        del timeout_s  # `KEEP_S` is soon over
        with self._use():
            loan = self._unfinished[0]
            while loan.pieces:
                left = loan.until - time.monotonic()
                if left <= 0:
                    loan.end()
                    break
                ready = [descriptor for descriptor, _ in self._poll.poll(left * 1e3)]
                if self._woken in ready:
                    os.eventfd_read(self._woken)
                    return False
                if ready:
                    self._hear_freed(0.0)
            self._unfinished.popleft()
            return True

    def wake(self) -> None:
        with self._freeing:
            if self._woken >= 0:
                os.eventfd_write(self._woken, 1)

    # ------------------------------------------------------------ receiving
    def receive_header(self, timeout_s: float) -> tuple[bytes, int] | None:
        with self._use():
            self._socket.settimeout(max(timeout_s, 0.001))
            try:
                packet, descriptors, _, _ = socket.recv_fds(self._socket, _LARGEST, 2)
            except TimeoutError:
                return None
            try:
                self._unread, header = self._read(self._check(packet, HEADER), descriptors)
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
            return header, self._unread.num_bytes

    def _read(self, packet: bytes, descriptors: list[int]) -> tuple[Payload, bytes]:
        _, size, number, seconds, region, num_given_up, num_pieces = _HEADER.unpack_from(packet)
        numbers = struct.unpack_from(f"<{num_given_up}I{2 * num_pieces}Q", packet, _HEADER.size)
        for old in numbers[:num_given_up]:
            self._mapped.pop(old, None)
        new = iter(descriptors)
        if number not in self._mapped:
            self._mapped[number] = Buffer(next(new), populate=not num_pieces)
        buffer = self._mapped[number]
        if size > buffer.memory.size:
            raise ValueError(f"{size} bytes in buffer {number}, which has no room for them")
        header = packet[_HEADER.size + 4 * num_given_up + 16 * num_pieces :]
        free = partial(self._give_back, number)
        if not num_pieces:
            return Payload([torch.from_numpy(buffer.memory[:size])], free, seconds), header
        if region == len(self._mapped_regions) < MAX_REGIONS:
            self._mapped_regions.append(map_to_read(next(new)))
        memory = self._mapped_regions[region]
        begins, sizes = numbers[num_given_up::2], numbers[num_given_up + 1 :: 2]
        pieces = [torch.from_numpy(memory[begin : begin + n]) for begin, n in zip(begins, sizes, strict=True)]
        if [piece.numel() for piece in pieces] != [*sizes] or sum(sizes) != size:
            raise ValueError(f"{size} bytes in pieces {sizes} at {begins} of {memory.size} bytes")
        return Payload(pieces, free, seconds, partial(buffer.moved, size)), header

    def receive_payload(self, timeout_s: float, into: Sequence[torch.Tensor] = ()) -> Payload:
        del timeout_s, into  # it is here already
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
        with self._using:
            for loan in self._unfinished:
                loan.end()
            self._unfinished.clear()
            self._buffers = Buffers()
            self._regions.clear()
            self._mapped.clear()
            self._mapped_regions.clear()
            self._unread = None
            with self._freeing:
                self._socket.close()
                if self._woken >= 0:
                    os.close(self._woken)
                self._woken = -1
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
