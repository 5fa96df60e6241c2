"""A leader's side of the gateways' streams: who is connected, which frame goes to whom, heartbeats.

`output` and `reply` are called from the engine's thread and write from there; the rest lives on one event loop. Only
the hub numbers frames, in the order in which the engine spoke, so a snapshot's number says exactly which steps it
includes.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import threading
from typing import Protocol

import msgspec
import structlog

from kvferry.cluster import messages as m
from kvferry.cluster.engine_driver import GatewayClosed, Output
from kvferry.cluster.engine_loop import POST_TIMEOUT_S
from kvferry.cluster.wire import Wire
from kvferry.runtime.errors import IncompatiblePeer, KvferryError, Unauthenticated
from kvferry.runtime.request import TokenEvent
from kvferry.runtime.transfer.ticket import TransferEvent

HELLO_TIMEOUT_S = 10.0
HEARTBEAT_S = 0.5
STALL_S = 4.0
"""No heartbeat from an engine whose thread has not come around for so long: it counts as silent."""
GATEWAY_SILENT_S = 30.0
"""A gateway whose machine vanishes closes no connection: after so long without a message its stream ends."""

_log = structlog.get_logger(__name__)


class Inbox(Protocol):
    """The engine loop as the hub sees it."""

    def post(self, gateway: str, message: m.ToGroup | GatewayClosed, timeout_s: float = 0.0) -> bool: ...
    def silent_s(self) -> float: ...


class Hub:
    """Create on the event loop; then `bind` the engine loop and serve `open_stream`."""

    def __init__(self, info: m.GroupInfo, secret: str) -> None:
        self._info = info
        self._secret = secret
        self._clock = asyncio.get_running_loop().time
        self._inbox: Inbox | None = None
        self._lock = threading.Lock()
        """Of what follows: the engine's thread speaks, the event loop lets gateways in and out."""
        self._connections: dict[str, Wire] = {}
        self._num_opened = 0
        self._seq = 0
        self._load = m.Load(num_free_blocks=info.num_blocks)
        self._last_frame = self._clock()

    def bind(self, inbox: Inbox) -> None:
        self._inbox = inbox

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    # ------------------------------------------------------------ from the engine's thread
    def output(self, output: Output) -> None:
        with self._lock:
            self._load = output.load
            self._send_step(output.tokens, output.transfers, output.kv)

    def reply(self, gateway: str, reply: m.Reply | m.Audit | m.KvSnapshot) -> None:
        with self._lock:
            wire = self._connections.get(gateway)
            if wire is None:
                return
            if isinstance(reply, m.KvSnapshot):
                reply = msgspec.structs.replace(reply, seq=self._seq)
            wire.send(m.encode(reply))

    def _send_step(
        self, tokens: dict[str, list[TokenEvent]], transfers: list[TransferEvent], kv: m.KvEvents | None
    ) -> None:
        self._seq += 1
        self._last_frame = self._clock()
        without_tokens: bytes | None = None
        for name, wire in self._connections.items():
            theirs = tokens.get(name, [])
            frame = None if theirs else without_tokens
            if frame is None:
                epoch = self._info.address.peer.epoch
                frame = m.encode(m.StepFrame(epoch, self._seq, theirs, transfers, kv, self._load))
                without_tokens = without_tokens if theirs else frame
            wire.send(frame)

    # ------------------------------------------------------------ on the event loop
    async def heartbeat(self) -> None:
        """Runs for ever: an empty frame whenever there was none for `HEARTBEAT_S` and the engine's thread is alive."""
        while True:
            await asyncio.sleep(HEARTBEAT_S / 2)
            if self._inbox is None or self._inbox.silent_s() > STALL_S:
                continue
            with self._lock:
                if self._clock() - self._last_frame >= HEARTBEAT_S:
                    self._send_step({}, [], None)

    async def open_stream(self, wire: Wire) -> None:
        """Serves one gateway until it goes."""
        try:
            hello = await self._hello(wire)
        except KvferryError as error:
            wire.send(m.encode(m.Refused(error.label, str(error))))
            return
        wire.trust()
        with self._lock:
            self._num_opened += 1
            name = f"{hello.gateway}#{self._num_opened}"
            wire.send(m.encode(m.Welcome(version=m.PROTOCOL_VERSION, info=self._info)))
            self._connections[name] = wire
        _log.info("gateway_connected", gateway=name)
        reason = "it closed the stream"
        try:
            await self._read(name, wire)
        except (OSError, msgspec.MsgspecError) as error:
            reason = f"{type(error).__name__}: {error}"
        finally:
            with self._lock:
                del self._connections[name]
            _log.info("gateway_disconnected", gateway=name, reason=reason)
            with contextlib.suppress(ConnectionError):  # it is logged
                await self._post(name, GatewayClosed())

    async def _hello(self, wire: Wire) -> m.Hello:
        """Raises `Unauthenticated`, `IncompatiblePeer`."""
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                first = await wire.receive()
            hello = m.decode_to_group(first or b"")
        except (TimeoutError, OSError, msgspec.MsgspecError):
            hello = None
        secret = hello.secret if isinstance(hello, m.Hello) else ""
        if not isinstance(hello, m.Hello) or not hmac.compare_digest(secret.encode(), self._secret.encode()):
            raise Unauthenticated("the stream must open with the cluster's secret")
        if hello.version != m.PROTOCOL_VERSION:
            raise IncompatiblePeer(f"protocol {hello.version} met a group that speaks {m.PROTOCOL_VERSION}")
        return hello

    async def _read(self, name: str, wire: Wire) -> None:
        while True:
            try:
                async with asyncio.timeout(GATEWAY_SILENT_S):
                    data = await wire.receive()
            except TimeoutError:
                _log.warning("gateway_silent", gateway=name, seconds=GATEWAY_SILENT_S)
                return
            if data is None:
                return
            message = m.decode_to_group(data)
            if not isinstance(message, m.Alive):
                await self._post(name, message)

    async def _post(self, gateway: str, message: m.ToGroup | GatewayClosed) -> None:
        """Waits, bounded, for room in the inbox: what the engine cannot take holds up its sender."""
        if self._inbox is None or self._inbox.post(gateway, message):
            return
        if not await asyncio.to_thread(self._inbox.post, gateway, message, POST_TIMEOUT_S):
            _log.error("inbox_full", gateway=gateway, message=type(message).__name__)
            raise ConnectionError("the engine takes no messages")
