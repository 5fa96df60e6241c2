"""A simulated gateway: registry, index, router, coordinator and intake of the production, streams to all groups.

Implements `supervisor.Observer`. The first gateway of a run owns the supervisor; the others connect by themselves.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from types import TracebackType

import msgspec

from kvferry.cluster import messages as m
from kvferry.cluster.budgets import CoordinatorConfig
from kvferry.cluster.config import GroupSpec, Role
from kvferry.cluster.coordinator import Coordinator
from kvferry.cluster.intake import Intake
from kvferry.cluster.peer_stream import RemoteGroup
from kvferry.cluster.prefix_index import PrefixIndex
from kvferry.cluster.registry import Change, Registry, RegistryConfig
from kvferry.cluster.router import Router, RouterConfig
from kvferry.cluster.sim.group import SECRET, SimGroup
from kvferry.cluster.sim.loop import SkewedClock
from kvferry.cluster.sim.network import Network, Process
from kvferry.cluster.sim.trace import Trace
from kvferry.cluster.wire import Wire
from kvferry.runtime.errors import KvferryError, StaleAttempt
from kvferry.runtime.ids import Epoch, GroupId, Peer

CONNECT_TIMEOUT_S = 2.0


class FrameNoise(msgspec.Struct, frozen=True, kw_only=True):
    """How often a frame meets what between its stream and the handlers, which promise to bear it."""

    repeated: float = 0.0
    overtaken: float = 0.0
    lost: float = 0.0
    """Only frames without tokens and ends of transfers: what else a stream loses, it loses with its own end."""


class GatewayConfig(msgspec.Struct, frozen=True, kw_only=True):
    coordinator: CoordinatorConfig
    registry: RegistryConfig
    router: RouterConfig
    noise: FrameNoise = FrameNoise()


class SimGateway:
    """Use as an async context manager; `die` ends it as SIGKILL does."""

    def __init__(
        self, name: str, config: GatewayConfig, skew_ns: int, *, network: Network, trace: Trace, seed: str
    ) -> None:
        self.name = name
        self.process = Process(name, skew_ns)
        self.clock = SkewedClock(skew_ns)
        self.registry = Registry(config.registry)
        self.index = PrefixIndex()
        self.router = Router(config.router)
        self.coordinator = Coordinator(self.registry, self.router, self.index, self.clock, config.coordinator)
        self.clients: dict[asyncio.Task[None], None] = {}
        self.on_group_lost: Callable[[Peer, str], None] = lambda _peer, _reason: None
        """For streams that the supervisor does not watch."""
        self._noise = config.noise
        self._network = network
        self._trace = trace
        self._rng = random.Random(f"{seed}/frames {name}")
        self._loop = asyncio.get_running_loop()
        self._tasks = asyncio.TaskGroup()
        self._intake = Intake(self.registry, self.index, self.coordinator, self.clock, self._tasks, 1.0)
        self._ports: dict[Peer, RemoteGroup] = {}
        self.registry.listen(self._on_change)

    async def __aenter__(self) -> SimGateway:
        await self._tasks.__aenter__()
        await self.coordinator.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.coordinator.__aexit__(kind, error, trace)
        for port in list(self._ports.values()):
            await port.close()
        await self._tasks.__aexit__(None, None, None)

    async def dial(self, target: str) -> Wire:
        return await self._network.dial(self.process, target)

    # ------------------------------------------------------------ streams without a supervisor
    def attach(self, group: SimGroup) -> None:
        """Connects by itself."""
        if self.process.alive:
            self._tasks.create_task(self._attach(group), name=f"attach {group.peer} to {self.name}")

    async def _attach(self, group: SimGroup) -> None:
        try:
            port = await RemoteGroup.connect(
                group.target, SECRET, self.name, self.on_frame, self._lost, CONNECT_TIMEOUT_S, self.dial
            )
        except KvferryError as error:
            self.on_group_lost(group.peer, str(error))
            return
        if not self.process.alive:
            await port.close()
            return
        self._ports[port.peer] = port
        try:
            self.group_up(port)
        except StaleAttempt:  # it is dead already
            await port.close()

    def _lost(self, port: RemoteGroup, reason: str) -> None:
        self._ports.pop(port.peer, None)
        self.group_down(port.peer, reason)
        self.on_group_lost(port.peer, reason)

    # ------------------------------------------------------------ Observer
    def group_starting(self, spec: GroupSpec, epoch: Epoch) -> None:
        """Only for views."""

    def group_progress(self, group: GroupId, share: float) -> None:
        """Only for views."""

    def group_up(self, port: RemoteGroup) -> None:
        self.registry.up(port, self.clock.now_ns())

    def group_down(self, peer: Peer, reason: str) -> None:
        self.coordinator.on_group_down(peer, reason)

    def group_ended(self, peer: Peer, out_of_service: bool) -> None:
        self.coordinator.on_group_down(peer, "taken out of service" if out_of_service else "it left")

    # ------------------------------------------------------------ operations.Gateway
    def set_role(self, peer: Peer, role: Role) -> None:
        self.registry.set_role(peer, role)

    def on_frame(self, port: RemoteGroup, frame: m.StepFrame) -> None:
        noise, luck = self._noise, self._rng.random()
        if luck < noise.repeated:
            self._trace.fault("frame repeated", port.peer, frame.seq)
            self._loop.call_later(self._rng.random() * 0.1, self._take, port, frame)
        elif luck < noise.repeated + noise.overtaken:
            self._trace.fault("frame overtaken", port.peer, frame.seq)
            self._loop.call_later(self._rng.random() * 0.05, self._take, port, frame)
            return
        elif luck < noise.repeated + noise.overtaken + noise.lost and not frame.tokens and not frame.transfers:
            self._trace.fault("frame lost", port.peer, frame.seq)
            return
        self._take(port, frame)

    def _take(self, port: RemoteGroup, frame: m.StepFrame) -> None:
        if not self.process.alive:
            return
        try:
            self._intake.on_frame(port, frame)
        except Exception as error:
            self._trace.failed(f"{self.name} failed on a frame of {port.peer}: {type(error).__name__}: {error}")
            raise

    def _on_change(self, change: Change, peer: Peer, _reason: str) -> None:
        self._trace.note("membership", self.name, change.value, peer)
        if change in (Change.UNREACHABLE, Change.ABANDONED):
            self._trace.fault(f"group {change.value}", self.name, peer)

    # ------------------------------------------------------------ its end
    def be_quiet(self) -> None:
        """No more noise."""
        self._noise = FrameNoise()

    def die(self) -> None:
        """As by SIGKILL: nothing that it has to say gets out."""
        self.process.end()
        for client in list(self.clients):
            client.cancel()
