"""A leader's side of the gateways' streams: who is connected, which frame goes to whom, heartbeats.

Lives on one event loop; `output` and `reply` are called from the engine's thread and only hand over. Only the hub
numbers frames, in the order in which the engine spoke, so a snapshot's number says exactly which steps it includes.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

import grpc
import msgspec
import structlog

from kvferry.cluster import messages as m
from kvferry.cluster.engine_driver import GatewayClosed, Output
from kvferry.cluster.engine_loop import POST_TIMEOUT_S
from kvferry.cluster.peer_stream import CHANNEL_OPTIONS, METHOD, SERVICE

HELLO_TIMEOUT_S = 10.0
HEARTBEAT_S = 0.5
STALL_S = 4.0
"""No heartbeat from an engine whose thread has not come around for so long: it counts as silent."""
GATEWAY_SILENT_S = 30.0
"""A gateway whose machine vanishes closes no connection: after so long without a message its stream ends."""
MAX_QUEUED_FRAMES = 2048
"""A gateway that is further behind is disconnected; the engine never waits for one."""

_log = structlog.get_logger(__name__)


class Inbox(Protocol):
    """The engine loop as the hub sees it."""

    def post(self, gateway: str, message: m.ToGroup | GatewayClosed, timeout_s: float = 0.0) -> bool: ...
    def silent_s(self) -> float: ...


class _Connection:
    """One gateway's stream."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.frames: asyncio.Queue[bytes] = asyncio.Queue(maxsize=MAX_QUEUED_FRAMES)
        self.overrun = asyncio.Event()

    def put(self, frame: bytes) -> None:
        try:
            self.frames.put_nowait(frame)
        except asyncio.QueueFull:
            self.overrun.set()


class Hub:
    """Create on the event loop; then `bind` the engine loop and `serve`."""

    def __init__(self, info: m.GroupInfo, secret: str) -> None:
        self._info = info
        self._secret = secret
        self._loop = asyncio.get_running_loop()
        self._inbox: Inbox | None = None
        self._connections: dict[str, _Connection] = {}
        self._num_opened = 0
        self._seq = 0
        self._load = m.Load(num_free_blocks=info.num_blocks)
        self._last_frame = self._loop.time()

    def bind(self, inbox: Inbox) -> None:
        self._inbox = inbox

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    # ------------------------------------------------------------ from the engine's thread
    def output(self, output: Output) -> None:
        self._hand_over(self._on_output, output)

    def reply(self, gateway: str, reply: m.Reply | m.Audit | m.KvSnapshot) -> None:
        self._hand_over(self._on_reply, gateway, reply)

    def _hand_over(self, function: Callable[..., None], *args: Any) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *args)

    # ------------------------------------------------------------ on the event loop
    def _on_output(self, output: Output) -> None:
        self._seq += 1
        self._load = output.load
        self._last_frame = self._loop.time()
        common: bytes | None = None
        for name, connection in self._connections.items():
            tokens = output.tokens.get(name, [])
            if tokens or common is None:
                frame = m.encode(self._frame(tokens, output))
                common = frame if not tokens else common
            else:
                frame = common
            connection.put(frame)

    def _frame(self, tokens: list[Any], output: Output | None) -> m.StepFrame:
        return m.StepFrame(
            epoch=self._info.address.peer.epoch,
            seq=self._seq,
            tokens=tokens,
            transfers=output.transfers if output else [],
            kv=output.kv if output else None,
            load=self._load,
        )

    def _on_reply(self, gateway: str, reply: m.Reply | m.Audit | m.KvSnapshot) -> None:
        connection = self._connections.get(gateway)
        if connection is None:
            return
        if isinstance(reply, m.KvSnapshot):
            reply = msgspec.structs.replace(reply, seq=self._seq)
        connection.put(m.encode(reply))

    async def heartbeat(self) -> None:
        """Runs for ever: an empty frame whenever there was none for `HEARTBEAT_S` and the engine's thread is alive."""
        while True:
            await asyncio.sleep(HEARTBEAT_S / 2)
            idle_s = self._loop.time() - self._last_frame
            if self._inbox is None or idle_s < HEARTBEAT_S or self._inbox.silent_s() > STALL_S:
                continue
            self._seq += 1
            self._last_frame = self._loop.time()
            frame = m.encode(self._frame([], None))
            for connection in self._connections.values():
                connection.put(frame)

    # ------------------------------------------------------------ gRPC
    def add_to(self, server: grpc.aio.Server) -> None:
        handler = grpc.stream_stream_rpc_method_handler(self.open_stream)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))

    async def open_stream(self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[Any, Any]) -> None:
        hello = await self._hello(requests, context)
        self._num_opened += 1
        connection = _Connection(f"{hello.gateway}#{self._num_opened}")
        connection.put(m.encode(m.Welcome(version=m.PROTOCOL_VERSION, info=self._info)))
        self._connections[connection.name] = connection
        _log.info("gateway_connected", gateway=connection.name)
        try:
            jobs = [
                asyncio.ensure_future(self._read(connection, requests)),
                asyncio.ensure_future(self._write(connection, context)),
                asyncio.ensure_future(connection.overrun.wait()),
            ]
            try:
                done, _ = await asyncio.wait(jobs, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for job in jobs:
                    job.cancel()
                results = await asyncio.gather(*jobs, return_exceptions=True)
        finally:
            del self._connections[connection.name]
            _log.info("gateway_disconnected", gateway=connection.name)
            await self._post(connection.name, GatewayClosed())
        for job, result in zip(jobs, results, strict=True):
            if job in done and isinstance(result, BaseException):
                raise result
        if connection.overrun.is_set():
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"more than {MAX_QUEUED_FRAMES} frames behind")

    async def _hello(self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[Any, Any]) -> m.Hello:
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                first = await anext(requests)
            hello = m.decode_to_group(first)
        except (TimeoutError, StopAsyncIteration, msgspec.MsgspecError):
            hello = None
        secret = hello.secret if isinstance(hello, m.Hello) else ""
        if not isinstance(hello, m.Hello) or not hmac.compare_digest(secret.encode(), self._secret.encode()):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the stream must open with the cluster's secret")
            raise AssertionError  # abort has raised
        if hello.version != m.PROTOCOL_VERSION:
            text = f"protocol {hello.version} met a group that speaks {m.PROTOCOL_VERSION}"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, text)
        return hello

    async def _read(self, connection: _Connection, requests: AsyncIterator[bytes]) -> None:
        while True:
            try:
                async with asyncio.timeout(GATEWAY_SILENT_S):
                    data = await anext(requests, None)
            except TimeoutError:
                _log.warning("gateway_silent", gateway=connection.name, seconds=GATEWAY_SILENT_S)
                return
            if data is None:
                return
            message = m.decode_to_group(data)
            if not isinstance(message, m.Alive):
                await self._post(connection.name, message)

    async def _post(self, gateway: str, message: m.ToGroup | GatewayClosed) -> None:
        """Waits, bounded, for room in the inbox: what the engine cannot take holds up its sender."""
        if self._inbox is None or self._inbox.post(gateway, message):
            return
        if not await asyncio.to_thread(self._inbox.post, gateway, message, POST_TIMEOUT_S):
            _log.error("inbox_full", gateway=gateway, message=type(message).__name__)
            raise ConnectionError("the engine takes no messages")

    async def _write(self, connection: _Connection, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        while True:
            await context.write(await connection.frames.get())


class PeerServer:
    """A hub behind a listening port."""

    def __init__(self, hub: Hub, host: str) -> None:
        self._server = grpc.aio.server(options=CHANNEL_OPTIONS)
        hub.add_to(self._server)
        self.port: int = self._server.add_insecure_port(f"{host}:0")

    async def start(self) -> None:
        await self._server.start()

    async def stop(self, grace_s: float) -> None:
        await self._server.stop(grace_s)
