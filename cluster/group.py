"""The channel inside a group: plans go from rank 0 to the other ranks, link reports and step notices come back.

    leader (rank 0)                          follower (rank 1 …)
        │ ◀──────────── Join(rank, secret) ───────── │
        │ ──────────────── StepPlan ───────────────▶ │ executes in order
        │ ◀──── Received · Sent · LinkDown · Done ── │

Frames are msgpack, each preceded by its length (4 bytes, little-endian). The loss of one rank is the end of the group:
whoever loses the other side calls `on_lost`, which ends the process; the supervisor starts a new group.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
import struct
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import structlog

from kvferry.runtime.errors import DeviceError, GroupUnavailable, InvalidArgument, Unauthenticated
from kvferry.runtime.step import StepPlan, make_table
from kvferry.runtime.transfer.ticket import LinkDown, LinkReport, Received, Sent

MAX_FRAME_BYTES = 64 << 20
SEND_TIMEOUT_S = 30.0
MAX_STEPS_AHEAD = 64
"""Plans without rows need no answer; a follower may lag by so many before the leader waits for it."""

_LENGTH = struct.Struct("<I")
_log = structlog.get_logger(__name__)

OnLost = Callable[[str], None]


class Join(msgspec.Struct, frozen=True, tag=True, array_like=True):
    rank: int
    secret: str


class Done(msgspec.Struct, frozen=True, tag=True, array_like=True):
    step: int


class Report(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Exactly one is set."""

    received: Received | None = None
    sent: Sent | None = None
    down: LinkDown | None = None


def _pack(table: Any) -> bytes:
    """Block tables travel as they lie in memory: number by number would cost each step what the contexts are long."""
    if isinstance(table, array):
        return table.tobytes()
    raise TypeError(f"{type(table).__name__} in a message")


_encode = msgspec.msgpack.Encoder(enc_hook=_pack).encode
_decode_note = msgspec.msgpack.Decoder(Join | Done | Report).decode
_decode_plan = msgspec.msgpack.Decoder(StepPlan, dec_hook=lambda _, table: make_table(table)).decode


def exit_process(reason: str) -> None:
    """Ends this process at once, without clean-up that could block: a group without one of its ranks is no group."""
    _log.error("process_exits", reason=reason)
    os._exit(1)


class FrameSocket:
    """Length-prefixed frames over one TCP connection. `send` is thread-safe; one thread receives.

    `send` raises `OSError` when nothing could be written for `SEND_TIMEOUT_S`; `receive` blocks until the other side
    speaks or goes: keepalive finds a dead host within about 12 s.
    """

    def __init__(self, sock: socket.socket, send_timeout_s: float = SEND_TIMEOUT_S) -> None:
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", 6), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        whole = int(send_timeout_s)
        timeval = struct.pack("ll", whole, int((send_timeout_s - whole) * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)
        self._sock = sock
        self._lock = threading.Lock()

    def send(self, payload: bytes) -> None:
        with self._lock:
            self._sock.sendall(_LENGTH.pack(len(payload)) + payload)

    def receive(self, timeout_s: float | None = None) -> bytes | None:
        """The next frame; `None` at the end of the stream. Raises `OSError`."""
        self._sock.settimeout(timeout_s)
        try:
            head = self._exactly(_LENGTH.size)
            if head is None:
                return None
            (size,) = _LENGTH.unpack(head)
            if size > MAX_FRAME_BYTES:
                raise ConnectionError(f"a frame of {size} bytes, at most {MAX_FRAME_BYTES}")
            return self._exactly(size)
        finally:
            if timeout_s is not None:
                self._sock.settimeout(None)

    def _exactly(self, size: int) -> bytes | None:
        buffer = bytearray(size)
        view, got = memoryview(buffer), 0
        while got < size:
            num = self._sock.recv_into(view[got:])
            if num == 0:
                return None
            got += num
        return bytes(buffer)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # the other side was faster
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes a blocked `receive`; `close` alone does not
        self._sock.close()


class LeaderChannel:
    """Rank 0's end. `send` is called by one thread; `on_report` is called from one thread per follower."""

    def __init__(self, host: str, secret: str, num_followers: int, on_lost: OnLost = exit_process) -> None:
        self._secret = secret
        self._num_followers = num_followers
        self._on_lost = on_lost
        self._closing = False
        self._followers: dict[int, FrameSocket] = {}
        self._done: dict[int, int] = {}
        self._progress = threading.Condition()
        self._listener = socket.create_server((host, 0), backlog=max(1, num_followers))
        self.port: int = self._listener.getsockname()[1]

    def start(self, on_report: Callable[[LinkReport], None], timeout_s: float) -> None:
        """Waits for all followers. Raises `GroupUnavailable` when one is missing after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while len(self._followers) < self._num_followers:
            left = deadline - time.monotonic()
            if left <= 0:
                missing = sorted(set(range(1, self._num_followers + 1)) - set(self._followers))
                raise GroupUnavailable(f"ranks {missing} did not join their group within {timeout_s} s")
            self._listener.settimeout(left)
            try:
                sock, _ = self._listener.accept()
            except TimeoutError:
                continue
            self._admit(FrameSocket(sock), left)
        self._listener.close()
        for rank, connection in self._followers.items():
            threading.Thread(
                target=self._listen, args=(rank, connection, on_report), name=f"group-rank-{rank}", daemon=True
            ).start()

    def _admit(self, connection: FrameSocket, timeout_s: float) -> None:
        """A stranger is sent away and does not disturb the group."""
        try:
            frame = connection.receive(min(timeout_s, 5.0))
            note = _decode_note(frame) if frame is not None else None
        except (OSError, msgspec.MsgspecError):
            note = None
        known = (
            isinstance(note, Join)
            and hmac.compare_digest(note.secret.encode(), self._secret.encode())
            and 1 <= note.rank <= self._num_followers
            and note.rank not in self._followers
        )
        if not known or not isinstance(note, Join):
            _log.warning("group_stranger_refused", note=type(note).__name__)
            connection.close()
            return
        connection.send(_encode(Done(step=0)))
        self._followers[note.rank] = connection
        self._done[note.rank] = 0

    def _listen(self, rank: int, connection: FrameSocket, on_report: Callable[[LinkReport], None]) -> None:
        try:
            while (frame := connection.receive()) is not None:
                note = _decode_note(frame)
                if isinstance(note, Done):
                    with self._progress:
                        self._done[rank] = note.step
                        self._progress.notify_all()
                elif isinstance(note, Report):
                    report = note.received or note.sent or note.down
                    if report is not None:
                        on_report(report)
            reason = "it closed the connection"
        except (OSError, msgspec.MsgspecError) as error:
            reason = f"{type(error).__name__}: {error}"
        self._lost(f"rank {rank} is lost: {reason}")

    def _lost(self, reason: str) -> None:
        if not self._closing:
            self._on_lost(reason)

    def send(self, plan: StepPlan) -> None:
        """Hands a plan to every follower; waits, bounded, for one that lags by `MAX_STEPS_AHEAD`."""
        payload = _encode(plan)
        for rank, connection in self._followers.items():
            try:
                connection.send(payload)
            except OSError as error:
                self._lost(f"rank {rank} takes no plans: {error}")
        with self._progress:
            if not self._progress.wait_for(lambda: self._lag(plan.step) <= MAX_STEPS_AHEAD, timeout=SEND_TIMEOUT_S):
                self._lost(f"a rank is {self._lag(plan.step)} steps behind for {SEND_TIMEOUT_S} s")

    def _lag(self, step: int) -> int:
        return max((step - done for done in self._done.values()), default=0)

    def close(self) -> None:
        self._closing = True
        self._listener.close()
        for connection in self._followers.values():
            connection.close()


class FollowerChannel:
    """The end of a rank other than 0. `report` is thread-safe; `plans` is read by one thread."""

    def __init__(self, host: str, port: int, secret: str, rank: int, timeout_s: float) -> None:
        if rank < 1:
            raise InvalidArgument("rank", rank, "a follower's rank is at least 1")
        try:
            self._connection = FrameSocket(socket.create_connection((host, port), timeout=timeout_s))
            self._connection.send(_encode(Join(rank=rank, secret=secret)))
            answer = self._connection.receive(timeout_s)
        except OSError as error:
            raise GroupUnavailable(f"rank {rank} cannot reach its leader at {host}:{port}: {error}") from error
        if answer is None:
            self._connection.close()
            raise Unauthenticated(f"the leader at {host}:{port} refused rank {rank}")

    def report(self, report: LinkReport) -> None:
        """Raises `DeviceError` when the leader is gone."""
        if isinstance(report, Received):
            note = Report(received=report)
        elif isinstance(report, Sent):
            note = Report(sent=report)
        else:
            note = Report(down=report)
        self._send(note)

    def done(self, step: int) -> None:
        self._send(Done(step=step))

    def _send(self, note: Done | Report) -> None:
        try:
            self._connection.send(_encode(note))
        except OSError as error:
            raise DeviceError(f"the leader is lost: {error}") from error

    def plans(self) -> Iterator[StepPlan]:
        """Ends when the leader closes the channel. Raises `DeviceError` when it is lost."""
        while True:
            try:
                frame = self._connection.receive()
            except OSError as error:
                raise DeviceError(f"the leader is lost: {error}") from error
            if frame is None:
                return
            yield _decode_plan(frame)

    def close(self) -> None:
        self._connection.close()
