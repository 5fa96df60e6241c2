"""The stream between a gateway and a group's leader: one bidirectional gRPC call that carries raw msgpack frames.

    gateway (`RemoteGroup`)                        leader (`hub.Hub`)
        │ Hello(version, secret) ───────────────────────▶ │ compared in constant time
        │ ◀───────────────────────────────────── Welcome │ what the group is
        │ Submit · Cancel · Expect · … ─────────────────▶ │
        │ ◀──────── StepFrame · Reply · Audit · KvSnapshot│

No protobuf: method `/kvferry.Peer/Open` with the identity as serialiser. A stream that ends is not reopened: the
gateway tells the supervisor, which replaces the group under a new epoch.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

import grpc
import msgspec
import structlog

from kvferry.cluster import messages as m
from kvferry.runtime.errors import GroupUnavailable, Unauthenticated, error_of
from kvferry.runtime.ids import BlockHash, Peer, SequenceKey, TransferId
from kvferry.runtime.request import SequenceRequest
from kvferry.runtime.transfer.ticket import ExpectRequest, Ticket

SERVICE = "kvferry.Peer"
METHOD = "Open"
MAX_MESSAGE_BYTES = 64 << 20
"""A snapshot of a million hashes is 18 MB."""
MAX_QUEUED_FRAMES = 4096
ALIVE_S = 2.0
"""A gateway that has said nothing for so long sends `Alive`."""

CHANNEL_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
]

_log = structlog.get_logger(__name__)
_Answer = TypeVar("_Answer", m.Reply, m.Audit, m.KvSnapshot)

OnFrame = Callable[["RemoteGroup", m.StepFrame], None]
OnDown = Callable[["RemoteGroup", str], None]


class Call(Protocol):
    """The part of a `grpc.aio` stream-stream call that is used here."""

    def write(self, data: bytes, /) -> Awaitable[None]: ...
    def read(self) -> Awaitable[Any]:
        """The next frame; something else than `bytes` at the end."""

    def cancel(self) -> Any: ...


CloseChannel = Callable[[], Awaitable[None]]
Dial = Callable[[str], tuple[Call, CloseChannel]]


def dial_grpc(target: str) -> tuple[Call, CloseChannel]:
    """Opens the stream to a group's leader; nothing waits yet."""
    channel = grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS)
    return channel.stream_stream(f"/{SERVICE}/{METHOD}")(wait_for_ready=True), channel.close


class RemoteGroup:
    """A live incarnation of a group as a gateway sees it: implements `ports.GroupPort`.

    Messages never block: they wait in a bounded queue, and a group that does not empty it counts as lost. `on_frame`
    and `on_down` are called on the event loop; `on_down` once, and not after `close`.
    """

    def __init__(
        self, call: Call, close_channel: CloseChannel, info: m.GroupInfo, on_frame: OnFrame, on_down: OnDown
    ) -> None:
        self.info = info
        self._close_channel = close_channel
        self._call = call
        self._on_frame = on_frame
        self._on_down = on_down
        self._outgoing: asyncio.Queue[m.ToGroup] = asyncio.Queue(maxsize=MAX_QUEUED_FRAMES)
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._next_call = 1
        self._closed = False
        self._alive_s = ALIVE_S
        self._clock = asyncio.get_running_loop().time
        self._last_frame = self._clock()
        self._pump = asyncio.create_task(self._run(), name=f"peer-stream-{info.address.peer}")

    @classmethod
    async def connect(
        cls,
        target: str,
        secret: str,
        gateway: str,
        on_frame: OnFrame,
        on_down: OnDown,
        timeout_s: float,
        dial: Dial = dial_grpc,
    ) -> RemoteGroup:
        """Raises `Unauthenticated`, or `GroupUnavailable` when there is no valid `Welcome` within `timeout_s`."""
        call, close_channel = dial(target)
        try:
            async with asyncio.timeout(timeout_s):
                await call.write(m.encode(m.Hello(version=m.PROTOCOL_VERSION, secret=secret, gateway=gateway)))
                first = await call.read()
            welcome = m.decode_from_group(first) if isinstance(first, bytes) else None
        except (TimeoutError, grpc.RpcError, msgspec.MsgspecError, asyncio.InvalidStateError) as error:
            await close_channel()
            if isinstance(error, grpc.aio.AioRpcError) and error.code() == grpc.StatusCode.UNAUTHENTICATED:
                raise Unauthenticated(f"the group at {target} refused: {error.details()}") from error
            why = error.details() if isinstance(error, grpc.aio.AioRpcError) else f"{type(error).__name__} {error}"
            raise GroupUnavailable(f"the group at {target} gave no welcome within {timeout_s} s: {why}") from error
        if not isinstance(welcome, m.Welcome) or welcome.version != m.PROTOCOL_VERSION:
            await close_channel()
            raise GroupUnavailable(f"the group at {target} speaks another protocol: {welcome!r:.80}")
        return cls(call, close_channel, welcome.info, on_frame, on_down)

    @property
    def peer(self) -> Peer:
        return self.info.address.peer

    def silent_s(self) -> float:
        """Seconds since the last frame."""
        return self._clock() - self._last_frame

    # ------------------------------------------------------------ messages
    def submit(self, sequences: list[SequenceRequest]) -> None:
        self._put(m.Submit(sequences=sequences))

    def cancel(self, keys: list[SequenceKey]) -> None:
        self._put(m.Cancel(keys=keys))

    def send_ticket(self, ticket: Ticket) -> None:
        self._put(m.SendTicket(ticket=ticket))

    def end_transfer(self, transfer_id: TransferId, attempt: int, reason: str) -> None:
        self._put(m.EndTransfer(transfer_id=transfer_id, attempt=attempt, reason=reason))

    def shorten_transfer(self, transfer_id: TransferId, attempt: int, lacking: list[BlockHash]) -> None:
        self._put(m.ShortenTransfer(transfer_id=transfer_id, attempt=attempt, lacking=lacking))

    def renew(self, transfer_ids: list[TransferId], timeout_s: float) -> None:
        self._put(m.Renew(transfer_ids=transfer_ids, timeout_s=timeout_s))

    def peer_gone(self, peer: Peer) -> None:
        self._put(m.PeerGone(group=peer.group, epoch=peer.epoch))

    def _put(self, message: m.ToGroup) -> None:
        """To a group that is gone: nothing; its end is reported through `on_down`."""
        if self._closed:
            return
        try:
            self._outgoing.put_nowait(message)
        except asyncio.QueueFull:
            self._end(f"it has taken no message while {MAX_QUEUED_FRAMES} waited")

    # ------------------------------------------------------------ calls
    def expect(self, request: ExpectRequest, timeout_s: float) -> Awaitable[Ticket]:
        return self._ticket(self._ask(lambda call_id: m.Expect(call_id=call_id, request=request), m.Reply, timeout_s))

    async def _ticket(self, answer: Awaitable[m.Reply]) -> Ticket:
        reply = await answer
        if reply.ticket is None:
            raise error_of(reply.error_label or "", reply.error_message)
        return reply.ticket

    async def audit(self, timeout_s: float) -> m.Audit:
        return await self._ask(lambda call_id: m.Query(call_id=call_id, what="audit"), m.Audit, timeout_s)

    async def snapshot(self, timeout_s: float) -> m.KvSnapshot:
        return await self._ask(lambda call_id: m.Query(call_id=call_id, what="snapshot"), m.KvSnapshot, timeout_s)

    def _ask(self, make: Callable[[int], m.ToGroup], kind: type[_Answer], timeout_s: float) -> Awaitable[_Answer]:
        """Sends the question now; await the answer."""
        call_id, self._next_call = self._next_call, self._next_call + 1
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self._closed:
            answer.set_exception(GroupUnavailable(f"{self.peer} is gone"))
        else:
            self._calls[call_id] = answer
            self._put(make(call_id))
        return self._answer(call_id, answer, kind, timeout_s)

    async def _answer(
        self, call_id: int, answer: asyncio.Future[Any], kind: type[_Answer], timeout_s: float
    ) -> _Answer:
        try:
            async with asyncio.timeout(timeout_s):
                frame = await answer
        except TimeoutError:
            raise GroupUnavailable(f"{self.peer} has not answered for {timeout_s} s") from None
        finally:
            self._calls.pop(call_id, None)
        if isinstance(frame, kind):
            return frame
        if isinstance(frame, m.Reply) and frame.error_label is not None:
            raise error_of(frame.error_label, frame.error_message)
        raise GroupUnavailable(f"{self.peer} answered with {type(frame).__name__}")

    # ------------------------------------------------------------ the stream's own life
    async def _run(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                writer = tasks.create_task(self._write())
                await self._read()
                writer.cancel()
            reason = "it closed the stream"
        except* (grpc.RpcError, asyncio.InvalidStateError, msgspec.MsgspecError) as failures:
            first = failures.exceptions[0]
            reason = first.details() if isinstance(first, grpc.aio.AioRpcError) else f"{type(first).__name__}: {first}"
        except* Exception as failures:  # noqa: BLE001  a fault of this gateway: loud, and the group is given up
            _log.exception("frame_not_understood", peer=str(self.peer))
            reason = f"a frame could not be handled: {failures.exceptions[0]}"
        self._end(reason)

    async def _write(self) -> None:
        while True:
            message: m.ToGroup = m.Alive()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._alive_s):
                    message = await self._outgoing.get()
            await self._call.write(m.encode(message))

    async def _read(self) -> None:
        while isinstance(data := await self._call.read(), bytes):
            frame = m.decode_from_group(data)
            if isinstance(frame, m.StepFrame):
                self._last_frame = self._clock()
                self._on_frame(self, frame)
            elif isinstance(frame, m.Reply | m.Audit | m.KvSnapshot):
                waiting = self._calls.pop(frame.call_id, None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(frame)

    def _end(self, reason: str) -> None:
        if self._closed:
            return
        self._closed = True
        self._call.cancel()
        for waiting in self._calls.values():
            if not waiting.done():
                waiting.set_exception(GroupUnavailable(f"{self.peer} is gone: {reason}"))
        _log.info("peer_stream_ended", peer=str(self.peer), reason=reason)
        self._on_down(self, reason)

    async def close(self) -> None:
        """Ends the stream without telling `on_down`. The group cancels what this gateway asked of it."""
        self._on_down = _nobody
        self._end("closed here")
        self._pump.cancel()
        await asyncio.gather(self._pump, return_exceptions=True)
        await self._close_channel()


def _nobody(_group: RemoteGroup, _reason: str) -> None:
    """`on_down` of a stream that was closed on purpose."""
