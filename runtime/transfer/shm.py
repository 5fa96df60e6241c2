"""Transport between processes of one machine: payloads through shared memory, everything else through a local socket.

    source                                          destination
      │ connect (abstract socket, named by the kernel)   │ listens from the start
      │ ── its tag, link name, memory descriptor ──────▶ │ maps the same memory
      │ ◀──────────────────────── accepted, its tag ──── │
      │ ── HEADER payload size, header ────────────────▶ │
      │ copy into slot k   ── FILLED length ───────────▶ │ copy out of slot k
      │ ◀──────────────────────────────────── FREED ──── │

Slots are used in turn; the sender knows how many are free by counting. The socket wakes whoever waits, and its end
tells of a peer's death at once. The memory has no name (`memfd`), so nothing is left behind however a process dies, and
the size of `/dev/shm` does not matter.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import struct
import threading
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from kvferry.runtime.transfer.meeting import Arrivals, Deadline, OpenEnds, machine_id
from kvferry.runtime.transfer.secret import TAG_BYTES, is_tag, tag
from kvferry.runtime.transfer.ticket import RankAddress
from kvferry.runtime.transfer.transport import MAX_HEADER_BYTES, LinkClosed, LinkName

SLOT_BYTES = 1 << 20
NUM_SLOTS = 4
HANDSHAKE_S = 2.0
HEADER, FILLED, FREED, ACCEPTED, OFFERED = b"H", b"F", b"R", b"A", b"O"
_SIZE = struct.Struct("<cQ")
_LARGEST = _SIZE.size + MAX_HEADER_BYTES
_CREDENTIALS = struct.Struct("3i")


class _End:
    """One end of a link: the socket and the mapped slots. One thread uses it; any thread may close it."""

    def __init__(self, name: str, sock: socket.socket, memory: int, ends: OpenEnds) -> None:
        """Takes over `sock` and registers with `ends`; maps `memory`, which the caller closes."""
        self._name = name
        self._socket = sock
        self._ends = ends
        self._using = threading.Lock()
        self._closed = False
        ring = np.frombuffer(mmap.mmap(memory, NUM_SLOTS * SLOT_BYTES), dtype=np.uint8)
        self._slots: NDArray[np.uint8] | None = ring.reshape(NUM_SLOTS, SLOT_BYTES)
        self._next_slot = 0
        self._num_free = NUM_SLOTS
        self._unread = 0
        ends.add(self)

    @contextlib.contextmanager
    def _use(self) -> Iterator[NDArray[np.uint8]]:
        """Keeps memory and socket while a call works on them. A call that fails leaves a dead link."""
        with self._using:
            if self._slots is None:
                raise LinkClosed(f"{self._name}: closed")
            try:
                yield self._slots
            except LinkClosed:
                self._shut()
                raise
            except OSError as error:
                why = "closed" if self._closed else str(error)
                self._shut()
                if isinstance(error, TimeoutError):
                    why = "no answer in time"
                raise LinkClosed(f"{self._name}: {why}") from error

    def _put(self, packet: bytes, deadline: Deadline) -> None:
        self._socket.settimeout(deadline.remaining())
        self._socket.send(packet)

    def _get(self, kind: bytes, timeout_s: float) -> bytes:
        self._socket.settimeout(timeout_s)
        packet = self._socket.recv(_LARGEST)
        if packet[:1] != kind:
            raise LinkClosed(f"{self._name}: " + ("a packet out of turn" if packet else "the other end is gone"))
        return packet

    def wait_accepted(self, secret: bytes, deadline: Deadline) -> None:
        with self._use():
            packet = self._get(ACCEPTED, deadline.remaining())
            if not is_tag(packet[len(ACCEPTED) :], secret, ACCEPTED, self._name.encode()):
                raise LinkClosed(f"{self._name}: the other end does not know the cluster's secret")

    def accept(self, secret: bytes, deadline: Deadline) -> None:
        with self._use():
            self._put(ACCEPTED + tag(secret, ACCEPTED, self._name.encode()), deadline)

    def send(self, header: bytes, payload: torch.Tensor, timeout_s: float) -> None:
        data = payload.numpy()
        deadline = Deadline(timeout_s, f"sending on {self._name}")
        with self._use() as slots:
            self._put(_SIZE.pack(HEADER, data.size) + header, deadline)
            for start in range(0, data.size, SLOT_BYTES):
                if self._num_free == 0:
                    self._get(FREED, deadline.remaining())
                    self._num_free += 1
                piece = data[start : start + SLOT_BYTES]
                slots[self._next_slot, : piece.size] = piece
                self._next_slot = (self._next_slot + 1) % NUM_SLOTS
                self._num_free -= 1
                self._put(_SIZE.pack(FILLED, piece.size), deadline)

    def receive_header(self, timeout_s: float) -> tuple[bytes, int] | None:
        with self._use():
            try:
                packet = self._get(HEADER, max(timeout_s, 0.001))
            except TimeoutError:
                return None
            self._unread = _SIZE.unpack_from(packet)[1]
            return packet[_SIZE.size :], self._unread

    def receive_payload(self, into: torch.Tensor, timeout_s: float) -> None:
        data = into.numpy()
        deadline = Deadline(timeout_s, f"receiving on {self._name}")
        with self._use() as slots:
            if data.size != self._unread:
                raise LinkClosed(f"{self._name}: {data.size} bytes of room for {self._unread}")
            filled = 0
            while filled < data.size:
                size = _SIZE.unpack(self._get(FILLED, deadline.remaining()))[1]
                if size > min(SLOT_BYTES, data.size - filled):
                    raise LinkClosed(f"{self._name}: more payload than announced")
                data[filled : filled + size] = slots[self._next_slot, :size]
                self._next_slot = (self._next_slot + 1) % NUM_SLOTS
                filled += size
                self._put(FREED, deadline)
            self._unread = 0

    def _shut(self) -> None:
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes both ends

    def close(self) -> None:
        self._shut()
        with self._using:
            self._socket.close()
            self._slots = None
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
        packet, descriptors, _, _ = socket.recv_fds(sock, _LARGEST, 1)
        try:
            if len(descriptors) != 1:
                raise LinkClosed("no memory came with the link's name")
            if not is_tag(packet[:TAG_BYTES], self._secret, OFFERED, packet[TAG_BYTES:]):
                raise LinkClosed("it does not know the cluster's secret")
            name = packet[TAG_BYTES:].decode()
            self._arrivals.put(name, _End(name, sock, descriptors[0], self._ends))
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

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
        memory = os.memfd_create("kvferry-link")
        try:
            os.ftruncate(memory, NUM_SLOTS * SLOT_BYTES)
            sock.settimeout(deadline.remaining())
            sock.connect(f"\0{destination.store_port:05x}")
            offer = str(name).encode()
            socket.send_fds(sock, [tag(self._secret, OFFERED, offer) + offer], [memory])
            end = _End(str(name), sock, memory, self._ends)
        except OSError as error:
            sock.close()
            raise LinkClosed(f"{name}: cannot reach the destination: {error}") from error
        finally:
            os.close(memory)
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
