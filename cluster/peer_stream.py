"""The stream between a gateway and a group's leader: one connection, messages both ways.

    gateway (`RemoteGroup`)                        leader (`hub.Hub`)
        │ Hello(version, secret) ───────────────────────▶ │ compared in constant time
        │ ◀───────────────────────────────────── Welcome │ what the group is
        │ Submit · Cancel · Expect · … ─────────────────▶ │
        │ ◀──────── StepFrame · Reply · Audit · KvSnapshot│

Frames are msgpack, over TCP (`wire.py`). A stream that ends is not reopened: the gateway tells the supervisor, which
replaces the group under a new epoch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
import structlog

from kvferry.cluster import messages as m
from kvferry.cluster.wire import Dial, Wire, dial_tcp
from kvferry.runtime.errors import GroupUnavailable, error_of
from kvferry.runtime.ids import BlockHash, Peer, SequenceKey, TransferId
from kvferry.runtime.request import SequenceRequest
from kvferry.runtime.transfer.ticket import ExpectRequest, Ticket

ALIVE_S = 2.0
"""How often a gateway says that it is there: one whose machine vanishes closes no connection."""

_log = structlog.get_logger(__name__)
_Answer = TypeVar("_Answer", m.Reply, m.Audit, m.KvSnapshot)

OnFrame = Callable[["RemoteGroup", m.StepFrame], None]
OnDown = Callable[["RemoteGroup", str], None]


class RemoteGroup:
    """A live incarnation of a group as a gateway sees it: implements `ports.GroupPort`.

    Messages never block: what the group does not take waits, bounded; one that falls too far behind counts as lost.
    `on_frame` and `on_down` are called on the event loop; `on_down` once, and not after `close`.
    """

    def __init__(self, wire: Wire, info: m.GroupInfo, on_frame: OnFrame, on_down: OnDown) -> None:
        self.info = info
        self._wire = wire
        self._on_frame = on_frame
        self._on_down = on_down
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._next_call = 1
        self._closed = False
        self._alive_s = ALIVE_S
        self._loop = asyncio.get_running_loop()
        self._last_frame = self._loop.time()
        self._heartbeat = self._loop.call_later(self._alive_s, self._say_alive)
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
        dial: Dial = dial_tcp,
    ) -> RemoteGroup:
        """Raises the group's own refusal, or `GroupUnavailable` without a valid `Welcome` within `timeout_s`."""
        wire: Wire | None = None
        try:
            async with asyncio.timeout(timeout_s):
                wire = await dial(target)
                wire.send(m.encode(m.Hello(version=m.PROTOCOL_VERSION, secret=secret, gateway=gateway)))
                first = await wire.receive()
            welcome = None if first is None else m.decode_from_group(first)
            if isinstance(welcome, m.Welcome) and welcome.version == m.PROTOCOL_VERSION:
                taken, wire = wire, None
                return cls(taken, welcome.info, on_frame, on_down)
        except (OSError, msgspec.MsgspecError) as error:  # TimeoutError is an OSError
            why = f"the group at {target} gave no welcome within {timeout_s} s: {type(error).__name__} {error}"
            raise GroupUnavailable(why) from error
        finally:
            if wire is not None:
                wire.close()
        if isinstance(welcome, m.Refused):
            raise error_of(welcome.error_label, f"the group at {target} refused: {welcome.error_message}")
        raise GroupUnavailable(f"the group at {target} speaks another protocol: {welcome!r:.80}")

    @property
    def peer(self) -> Peer:
        return self.info.address.peer

    def silent_s(self) -> float:
        """Seconds since the last frame."""
        return self._loop.time() - self._last_frame

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
        if not self._closed:
            self._wire.send(m.encode(message))

    def _say_alive(self) -> None:
        self._put(m.Alive())
        self._heartbeat = self._loop.call_later(self._alive_s, self._say_alive)

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
        reason = "it closed the stream"
        try:
            await self._read()
        except (OSError, msgspec.MsgspecError) as error:
            reason = f"{type(error).__name__}: {error}"
        except Exception as error:  # noqa: BLE001  a fault of this gateway: loud, and the group is given up
            _log.exception("frame_not_understood", peer=str(self.peer))
            reason = f"a frame could not be handled: {error}"
        self._end(reason)

    async def _read(self) -> None:
        while (data := await self._wire.receive()) is not None:
            frame = m.decode_from_group(data)
            if isinstance(frame, m.StepFrame):
                self._last_frame = self._loop.time()
                self._on_frame(self, frame)
            elif isinstance(frame, m.Reply | m.Audit | m.KvSnapshot):
                waiting = self._calls.pop(frame.call_id, None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(frame)

    def _end(self, reason: str) -> None:
        if self._closed:
            return
        self._closed = True
        self._heartbeat.cancel()
        self._wire.close()
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


def _nobody(_group: RemoteGroup, _reason: str) -> None:
    """`on_down` of a stream that was closed on purpose."""
