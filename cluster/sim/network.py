"""Simulated processes and the streams between gateways and groups' leaders: bytes in order, late, until they break.

A stream stands in for the TCP connection: each side has a `wire.Wire` of it. TCP's promises hold: no frame is lost,
repeated or overtaken unless the stream breaks; what a reader does not read waits at its writer.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

from kvferry.cluster.sim.trace import Trace
from kvferry.cluster.wire import MAX_UNSENT_FRAMES, Wire

WINDOW = 64
"""Frames on their way or unread, per direction; more wait at their writer."""


class StreamBroken(ConnectionError):
    """The other end is gone, or the way to it."""


class Process:
    """Something that runs, is stopped (as by SIGSTOP) and goes on, or is gone."""

    def __init__(self, name: str, skew_ns: int = 0) -> None:
        self.name = name
        self.skew_ns = skew_ns
        self.alive = True
        self.stopped = False
        self._later: list[Callable[[], None]] = []
        self._ends: list[Callable[[], object]] = []

    def do(self, what: Callable[[], None]) -> None:
        """Now, or when it goes on. Never, when it is gone."""
        if self.alive and self.stopped:
            self._later.append(what)
        elif self.alive:
            what()

    def stop(self) -> None:
        self.stopped = True

    def go_on(self) -> None:
        self.stopped = False
        later, self._later = self._later, []
        for what in later:
            self.do(what)

    def on_end(self, what: Callable[[], object]) -> None:
        self._ends.append(what)

    def end(self) -> None:
        if self.alive:
            self.alive = False
            self._later.clear()
            ends, self._ends = self._ends, []
            for what in ends:
                what()


class _Pipe:
    """One direction of a stream."""

    def __init__(self, stream: Stream, sender: Process, receiver: Process) -> None:
        self._stream = stream
        self._sender = sender
        self._receiver = receiver
        self._unread: deque[bytes] = deque()
        self._num_flying = 0
        self._reader: asyncio.Future[None] | None = None
        self._unsent: deque[bytes] = deque()
        self._last_arrival = 0.0
        self._failed = False
        self.stalled_until = 0.0
        """Nothing is read before: a reader that does not come to it."""

    def send(self, data: bytes) -> None:
        if self._failed:
            return
        self._unsent.append(data)
        self._fill_window()
        if len(self._unsent) > MAX_UNSENT_FRAMES:
            self._stream.break_off("the other side does not read")

    def _fill_window(self) -> None:
        while self._unsent and self._num_flying + len(self._unread) < WINDOW:
            self._num_flying += 1
            self._sender.do(partial(self._push, self._unsent.popleft()))

    def _push(self, data: bytes) -> None:
        loop = self._stream.loop
        at = max(loop.time() + self._stream.delay_s(), self._last_arrival + 1e-6, self.stalled_until)
        self._last_arrival = at
        loop.call_at(at, self._receiver.do, lambda: self._arrive(data))

    def _arrive(self, data: bytes) -> None:
        self._num_flying -= 1
        if self._failed or self._stream.broken:
            return
        self._stream.trace.frame(self._sender.name, self._receiver.name, data)
        self._unread.append(data)
        self._wake_reader()

    async def receive(self) -> bytes:
        """Raises `StreamBroken`."""
        while not self._unread:
            if self._failed:
                raise StreamBroken("broken")
            self._reader = self._stream.loop.create_future()
            await self._reader
        data = self._unread.popleft()
        self._fill_window()
        return data

    def _wake_reader(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def fail(self) -> None:
        """What was not read by now is lost."""
        self._failed = True
        self._unread.clear()
        self._unsent.clear()
        self._wake_reader()


class Server(Protocol):
    """A leader's hub."""

    async def open_stream(self, wire: Wire) -> None: ...


class Stream:
    """A dialled stream."""

    def __init__(
        self, network: Network, gateway: Process, group: Process, server: Server, trace: Trace, rng: random.Random
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.gateway = gateway
        self.group = group
        self.trace = trace
        self.broken = False
        self._network = network
        self._rng = rng
        self._server = server
        self._task: asyncio.Task[None] | None = None
        self.up = _Pipe(self, gateway, group)
        self.down = _Pipe(self, group, gateway)
        gateway.on_end(lambda: self.break_off("the gateway is gone"))
        group.on_end(lambda: self.break_off("the group is gone"))
        self.loop.call_later(self.delay_s(), group.do, self._serve)

    def delay_s(self) -> float:
        return self._network.delay_s(self._rng)

    def _serve(self) -> None:
        if not self.broken:
            self._task = self.loop.create_task(
                self._server.open_stream(End(self, "group", self.down, self.up)), name="served stream"
            )
            self._task.add_done_callback(self._served)

    def _served(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, StreamBroken):
            self.trace.failed(f"the hub of {self.group.name} failed: {error!r}")
        self.break_off("the group closed it")

    # ------------------------------------------------------------ its end
    def break_off(self, reason: str) -> None:
        """Both sides learn of it, each in its own time. Idempotent."""
        if self.broken:
            return
        self.broken = True
        self.trace.note("stream broken", self.gateway.name, self.group.name, reason)
        self._network.streams.pop(self, None)
        self.loop.call_later(self.delay_s() * 4, self.gateway.do, self.down.fail)
        if self.group.alive:
            self.loop.call_later(self.delay_s() * 4, self.group.do, self._end_service)
        else:
            self._end_service()

    def _end_service(self) -> None:
        self.up.fail()
        if self._task is not None:
            self._task.cancel()


class End:
    """One side of a stream: implements `wire.Wire`."""

    def __init__(self, stream: Stream, side: str, out: _Pipe, into: _Pipe) -> None:
        self._stream = stream
        self._side = side
        self._out = out
        self._into = into

    def send(self, frame: bytes, /) -> None:
        self._out.send(frame)

    async def receive(self) -> bytes | None:
        return await self._into.receive()

    def trust(self) -> None:
        """Nobody lies here."""

    def close(self) -> None:
        self._stream.break_off(f"the {self._side} closed it")


class Network:
    """All streams. `delay_s(rng)`: how long a frame travels."""

    def __init__(self, trace: Trace, seed: str) -> None:
        self._trace = trace
        self._seed = seed
        self._listening: dict[str, tuple[Process, Server]] = {}
        self._num_dialled = 0
        self.delays_s = (0.0002, 0.002)
        self.streams: dict[Stream, None] = {}

    def delay_s(self, rng: random.Random) -> float:
        low, high = self.delays_s
        return low + rng.random() ** 3 * (high - low)

    def listen(self, target: str, process: Process, server: Server) -> None:
        self._listening[target] = (process, server)
        process.on_end(lambda: self._listening.pop(target, None))

    async def dial(self, gateway: Process, target: str) -> Wire:
        if target not in self._listening or not gateway.alive:
            raise StreamBroken("nobody listens there")
        self._num_dialled += 1
        rng = random.Random(f"{self._seed}/stream {self._num_dialled}")
        stream = Stream(self, gateway, *self._listening[target], self._trace, rng)
        self.streams[stream] = None
        return End(stream, "gateway", stream.up, stream.down)

    def between(self, gateway: Process, group: Process) -> list[Stream]:
        return [s for s in self.streams if s.gateway is gateway and s.group is group]
