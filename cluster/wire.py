"""Frames over TCP between a gateway and a group's leader, each preceded by its length (4 bytes, little-endian).

`send` writes at once, in the caller's thread: while the other side keeps up, a step's tokens cost the engine's thread
one system call and wake no other thread here. What the socket does not take waits, bounded, for the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import structlog

MAX_FRAME_BYTES = 64 << 20
"""A snapshot of a million hashes is 18 MB."""
MAX_FIRST_BYTES = 4096
"""Of the frame with which a stranger must open."""
MAX_UNSENT_FRAMES = 2048
"""Who is further behind is cut off; nobody waits for one who does not read."""
MAX_UNREAD_FRAMES = 64
"""So many, and this side reads no more until they are taken."""
READ_BYTES = 64 << 10
ACCEPT_PAUSE_S = 1.0
"""After a connection that could not be taken, as when the process has no descriptor left."""

_LENGTH = struct.Struct("<I")
_log = structlog.get_logger(__name__)


class Wire(Protocol):
    """One end of a connection."""

    def send(self, frame: bytes, /) -> None:
        """Never waits, never fails: a connection that is broken shows in `receive`. From any thread."""

    async def receive(self) -> bytes | None:
        """The next frame; `None` at the orderly end. For one reader. Raises `OSError` when the connection broke."""

    def trust(self) -> None:
        """The other side has shown who it is: its frames may be large from now on."""

    def close(self) -> None:
        """Idempotent. What was not sent or read is lost."""


Dial = Callable[[str], Awaitable[Wire]]


class TcpWire:
    """Implements `Wire` on a connected socket. Make it, read and close it on the event loop."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._max_frame_bytes = MAX_FIRST_BYTES
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        """Of `_unsent`, `_ended`, and of writing."""
        self._unsent: deque[memoryview] = deque()
        self._ended = False
        self._error: OSError | None = None
        self._received = bytearray()
        self._unread: deque[bytes] = deque()
        self._reader: asyncio.Future[None] | None = None
        self._paused = False
        self._loop.add_reader(sock, self._on_readable)

    # ------------------------------------------------------------ out
    def send(self, frame: bytes, /) -> None:
        data = memoryview(_LENGTH.pack(len(frame)) + frame)
        with self._lock:
            if self._ended:
                return
            error, waited = None, bool(self._unsent)
            if not waited:
                try:
                    data = data[self._sock.send(data) :]
                except BlockingIOError:
                    pass
                except OSError as failure:
                    error = failure
                if not data:
                    return
            self._unsent.append(data)
            if len(self._unsent) > MAX_UNSENT_FRAMES:
                error = ConnectionError(f"the other side is more than {MAX_UNSENT_FRAMES} frames behind")
        if error is not None:
            self._on_loop(self._end, error)
        elif not waited:
            self._on_loop(self._await_room)

    def _on_loop(self, function: Callable[..., None], *args: Any) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *args)

    def _await_room(self) -> None:
        if not self._ended:
            self._loop.add_writer(self._sock, self._on_writable)

    def _on_writable(self) -> None:
        with self._lock:
            try:
                while self._unsent:
                    data = self._unsent[0]
                    sent = self._sock.send(data)
                    if sent < len(data):
                        self._unsent[0] = data[sent:]
                        return
                    self._unsent.popleft()
            except BlockingIOError:
                return
            except OSError as failure:
                error: OSError | None = failure
            else:
                error = None
                self._loop.remove_writer(self._sock)
        if error is not None:
            self._end(error)

    # ------------------------------------------------------------ in
    async def receive(self) -> bytes | None:
        while not self._unread:
            if self._error is not None:
                raise self._error
            if self._ended:
                return None
            self._reader = self._loop.create_future()
            await self._reader
        frame = self._unread.popleft()
        if self._paused and not self._unread and not self._ended:
            self._paused = False
            self._loop.add_reader(self._sock, self._on_readable)
        return frame

    def _on_readable(self) -> None:
        try:
            data = self._sock.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._end(error)
            return
        if not data:
            self._end(ConnectionError("it ended within a frame") if self._received else None)
            return
        self._received += data
        if (size := self._split()) is not None:
            self._end(ConnectionError(f"a frame of {size} bytes, at most {self._max_frame_bytes}"))
        elif self._unread:
            self._wake_reader()
            if len(self._unread) >= MAX_UNREAD_FRAMES:
                self._paused = True
                self._loop.remove_reader(self._sock)

    def _split(self) -> int | None:
        """Frames out of the bytes so far. Returns the size of one that is too large."""
        received, at = self._received, 0
        while len(received) - at >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(received, at)
            if size > self._max_frame_bytes:
                return int(size)
            begin = at + _LENGTH.size
            if len(received) - begin < size:
                break
            at = begin + size
            self._unread.append(bytes(received[begin:at]))
        del received[:at]
        return None

    def _wake_reader(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def trust(self) -> None:
        self._max_frame_bytes = MAX_FRAME_BYTES

    # ------------------------------------------------------------ its end
    def close(self) -> None:
        self._unread.clear()
        self._end(None)

    def _end(self, error: OSError | None) -> None:
        with self._lock:
            if self._ended:
                return
            self._ended = True
            self._unsent.clear()
        self._error = error
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        self._sock.close()
        self._wake_reader()


async def dial_tcp(target: str) -> Wire:
    """Connects to `host:port`. Raises `OSError`; put a deadline around it."""
    host, _, port = target.rpartition(":")
    sock = socket.socket(_family(host), socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
        wire = TcpWire(sock)
    except BaseException:
        sock.close()
        raise
    wire.trust()
    return wire


class WireServer:
    """A listening port; `serve` runs for each connection, which is closed after it."""

    def __init__(self, host: str, serve: Callable[[Wire], Awaitable[None]]) -> None:
        self._serve = serve
        self._listener = socket.create_server((host, 0), family=_family(host), backlog=64)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        self._keep(asyncio.ensure_future(self._accept()))

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self) -> None:
        while True:
            try:
                sock, _ = await asyncio.get_running_loop().sock_accept(self._listener)
            except OSError as error:
                _log.warning("connection_not_taken", error=str(error))
                await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            self._keep(asyncio.ensure_future(self._run(sock)))

    async def _run(self, sock: socket.socket) -> None:
        with contextlib.closing(TcpWire(sock)) as wire:
            try:
                await self._serve(wire)
            except Exception:  # noqa: BLE001  a fault of this process, not of the connection: loud, and it ends
                _log.exception("connection_failed")

    async def stop(self) -> None:
        """Breaks off what is open."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listener.close()


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
