"""One run: a deployment comes up, is loaded and disturbed, comes to rest, is checked and goes down."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Sequence

import msgspec

from kvferry.cluster.budgets import CoordinatorConfig
from kvferry.cluster.config import GroupSpec, ServeConfig
from kvferry.cluster.operations import Operations
from kvferry.cluster.registry import RegistryConfig
from kvferry.cluster.router import RouterConfig
from kvferry.cluster.sim import checks
from kvferry.cluster.sim.clients import Client
from kvferry.cluster.sim.disturbance import Disturbance
from kvferry.cluster.sim.faults import PlannedRequest, Scenario
from kvferry.cluster.sim.gateway import FrameNoise, GatewayConfig, SimGateway
from kvferry.cluster.sim.group import SECRET, GroupShape, SimGroup
from kvferry.cluster.sim.links import LinkNoise
from kvferry.cluster.sim.network import Network
from kvferry.cluster.sim.trace import Trace
from kvferry.cluster.supervisor import Incarnation, OnProgress, Supervisor, SupervisorPolicy
from kvferry.cluster.topology import Allotment
from kvferry.runtime.errors import GroupUnavailable, ResourceMissing
from kvferry.runtime.ids import Epoch, GroupId, Peer, RequestId

HEARD_S = 0.015
"""From a process's death to its parent's knowledge of it."""
REST_S = 1.6
"""Two heartbeats and what they bring about."""
HANG_S = 300.0
START_FAILURE = 0.15
"""Of those of a group's successors that do not come up at the first try."""


class _Started:
    """Implements `supervisor.Incarnation`."""

    def __init__(self, group: SimGroup) -> None:
        self.target = group.target
        self._group = group
        self._dead = asyncio.Event()
        loop = asyncio.get_running_loop()
        group.process.on_end(lambda: loop.call_later(HEARD_S, self._dead.set))

    async def wait_dead(self) -> str:
        await self._dead.wait()
        return "killed"

    async def kill(self) -> None:
        self._group.process.end()


class World:
    """The cluster of one scenario. Implements `supervisor.Launcher`."""

    def __init__(self, scenario: Scenario, trace: Trace) -> None:
        self.scenario = scenario
        self.trace = trace
        self.seed = f"run {scenario.seed}"
        self.network = Network(trace, self.seed)
        self.groups: dict[Peer, SimGroup] = {}
        """All that ever lived."""
        self.gateways: list[SimGateway] = []
        self.lost_capacity = False
        self._rng = random.Random(f"{self.seed}/world")
        self._last_change = 0.0
        """Of membership."""
        self._skews = random.Random(f"{self.seed}/skews")
        self._gateways_over: dict[str, asyncio.Event] = {}
        self.operations: Operations
        self.supervisor: Supervisor
        self._tasks = asyncio.TaskGroup()
        self._loop = asyncio.get_running_loop()
        if delay_s := scenario.amount("slow network"):
            self.network.delays_s = (0.0002, delay_s)

    # ------------------------------------------------------------ parts
    @property
    def max_skew_ns(self) -> int:
        return int(self.scenario.amount("clock skew") * 1e9)

    def skew_ns(self) -> int:
        return self._skews.randint(-self.max_skew_ns, self.max_skew_ns)

    def live_groups(self) -> list[SimGroup]:
        return [group for group in self.groups.values() if group.process.alive]

    def live_gateways(self) -> list[SimGateway]:
        return [gateway for gateway in self.gateways if gateway.process.alive]

    def find(self, peer: Peer) -> SimGroup | None:
        group = self.groups.get(peer)
        return group if group is not None and group.process.alive else None

    def create_task(self, work: object, name: str) -> None:
        self._tasks.create_task(work, name=name)  # type: ignore[arg-type]

    def make_group(self, peer: Peer, role: str, shape: GroupShape) -> SimGroup:
        scenario = self.scenario
        group = SimGroup(
            peer,
            role,
            shape,
            network=self.network,
            find=self.find,
            noise=LinkNoise(
                lost=scenario.amount("lossy links"),
                repeated=scenario.amount("repeating links"),
                overtaken=scenario.amount("overtaking links"),
                max_delay_s=max(0.004, scenario.amount("slow links")),
            ),
            transfer_timeout_s=scenario.transfer_timeout_s,
            skew_ns=self.skew_ns(),
            trace=self.trace,
            seed=self.seed,
        )
        self.groups[peer] = group
        self.trace.note("group", peer, role)
        self._last_change = self._loop.time()
        group.process.on_end(lambda: self._tell_peers(group))
        return group

    def _tell_peers(self, group: SimGroup) -> None:
        self.trace.note("group ends", group.peer)
        self._last_change = self._loop.time()
        for other in self.live_groups():
            later_s = 0.02 + self._rng.random() * 0.12
            self._loop.call_later(later_s, other.process.do, lambda other=other: other.links.peer_died(group.peer))

    # ------------------------------------------------------------ supervisor.Launcher
    async def allot(self, specs: Sequence[GroupSpec]) -> list[Allotment]:
        if self.scenario.crowded and self.live_groups():
            self.trace.fault("no room for a group", *(spec.group for spec in specs))
            raise ResourceMissing("no room")
        return [_allotment(spec) for spec in specs]

    async def start(self, allotment: Allotment, epoch: Epoch, on_progress: OnProgress) -> Incarnation:
        spec = allotment.spec
        await asyncio.sleep(0.01 + self._rng.random() * 0.2)
        if any(peer.group == spec.group for peer in self.groups) and self._rng.random() < START_FAILURE:
            self.trace.fault("start failed", spec.group)
            raise GroupUnavailable(f"{spec.group} did not start")
        on_progress(1.0)
        group = self.make_group(Peer(spec.group, epoch), spec.role, self._shape(spec))
        for gateway in self.live_gateways()[1:]:
            gateway.attach(group)
        return _Started(group)

    def _shape(self, spec: GroupSpec) -> GroupShape:
        shapes = self.scenario.groups
        shape = next((shape for name, _, shape in shapes if name == spec.group), None)
        shape = shape or next((shape for _, role, shape in shapes if role == spec.role), shapes[0][2])
        return msgspec.structs.replace(shape, tp_size=spec.tp_size)

    def _on_group_lost(self, peer: Peer, _reason: str) -> None:
        """A gateway has lost its stream: the group is replaced, as the gateway's supervisor would do."""
        if group := self.find(peer):
            group.process.end()

    # ------------------------------------------------------------ gateways
    def add_gateway(self) -> SimGateway:
        scenario = self.scenario
        name = f"gateway-{len(self.gateways)}"
        config = GatewayConfig(
            coordinator=CoordinatorConfig(
                gateway=name,
                max_unread_bytes=scenario.max_unread_bytes,
                max_in_flight=scenario.max_in_flight,
                retry_budget=scenario.retry_budget,
                retry_pause_s=0.01,
                transfer_timeout_s=scenario.transfer_timeout_s,
                expect_timeout_s=scenario.expect_timeout_s,
                unavailable_timeout_s=scenario.unavailable_timeout_s,
            ),
            registry=RegistryConfig(unreachable_after_s=1.0, abandon_after_s=2.0),
            router=RouterConfig(disaggregate=scenario.disaggregate, fetch_prefix=scenario.fetch_prefix),
            noise=FrameNoise(
                repeated=scenario.amount("repeated frames"),
                overtaken=scenario.amount("overtaken frames"),
                lost=scenario.amount("lost frames"),
            ),
        )
        gateway = SimGateway(name, config, self.skew_ns(), network=self.network, trace=self.trace, seed=self.seed)
        gateway.on_group_lost = self._on_group_lost
        self.gateways.append(gateway)
        over = self._gateways_over[name] = asyncio.Event()
        gateway.process.on_end(over.set)
        self.create_task(self._live(gateway, over), name)
        return gateway

    async def _live(self, gateway: SimGateway, over: asyncio.Event) -> None:
        async with gateway:
            if gateway is not self.gateways[0]:
                for group in self.live_groups():
                    gateway.attach(group)
            await over.wait()

    # ------------------------------------------------------------ the run
    async def run(self) -> None:
        self._loop.set_exception_handler(lambda _, context: self.trace.failed(f"unhandled: {_shown(context)}"))
        async with self._tasks, self._deployment():
            disturbance = Disturbance(self, self.scenario.faults)
            clients = [self._new_client(plan) for plan in self.scenario.requests]
            begin = self._loop.time()
            try:
                async with asyncio.timeout(HANG_S), asyncio.TaskGroup() as tasks:
                    for client in clients:
                        tasks.create_task(self._client(client, begin), name=f"client {client.plan.name}")
                    tasks.create_task(disturbance.run(begin), name="disturbance")
            except TimeoutError:
                waiting = [client.plan.name for client in clients if client.outcome == "running"]
                self.trace.failed(f"requests hang: {waiting}")
            disturbance.end()
            await asyncio.sleep(REST_S + self.scenario.transfer_timeout_s)
            await self._settled()
            self._sum_up()
            for finding in checks.at_rest(self):
                self.trace.failed(finding)
            self.trace.over()

    def _sum_up(self) -> None:
        for gateway in self.gateways:
            coordinator, observed = gateway.coordinator, self.trace.observed
            observed["fetched block"] += coordinator.num_fetched_blocks
            observed["hit token"] += coordinator.num_hit_tokens
            observed["hit token, expected"] += coordinator.num_expected_hit_tokens

    async def _settled(self) -> None:
        """A group that has just come or gone is not yet known to all. An operation may end that late."""
        for _ in range(20):
            if (left_s := self._last_change + REST_S - self._loop.time()) <= 0:
                return
            await asyncio.sleep(left_s)

    def _new_client(self, plan: PlannedRequest) -> Client:
        return Client(plan, self.scenario, self.trace, self._num_cached)

    def _num_cached(self, request_id: RequestId) -> int | None:
        """The leading tokens of a prompt that no group has computed; `None` when some of that is lost or disputed."""
        if self.scenario.faults or "again" in request_id:  # an id used twice, a group that died
            return None
        return min(group.computed_from.get(request_id, 1 << 30) for group in self.groups.values())

    async def _client(self, client: Client, begin: float) -> None:
        """A conversation."""
        await self._turn(client, begin)
        while (plan := client.next_turn()) is not None:
            client = self._new_client(plan)
            await self._turn(client, self._loop.time())

    async def _turn(self, client: Client, begin: float) -> None:
        plan: PlannedRequest = client.plan
        await asyncio.sleep(max(0.0, begin + plan.at_s - self._loop.time()))
        live = self.live_gateways()
        gateway = live[plan.gateway % len(live)]
        task = asyncio.current_task()
        assert task is not None
        gateway.clients[task] = None
        try:
            await client.run(gateway)
        finally:
            del gateway.clients[task]

    @contextlib.asynccontextmanager
    async def _deployment(self) -> AsyncIterator[None]:
        for _ in range(self.scenario.num_gateways):
            self.add_gateway()
        self.supervisor = supervisor = Supervisor(
            [_allotment(GroupSpec(GroupId(name), role, shape.tp_size)) for name, role, shape in self.scenario.groups],
            self,
            self.gateways[0],
            secret=SECRET,
            gateway=self.gateways[0].name,
            policy=SupervisorPolicy(dead_after_s=4.0, connect_timeout_s=2.0, first_pause_s=0.05, max_pause_s=0.4),
            dial=self.gateways[0].dial,
        )
        self.operations = Operations(ServeConfig(model="toy"), self.gateways[0], supervisor, lambda _: None)
        running = asyncio.get_running_loop().create_task(supervisor.run(), name="supervisor")
        try:
            await supervisor.usable()
            yield
        finally:
            await self.operations.close()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            for over in self._gateways_over.values():
                over.set()
            for group in self.live_groups():
                group.process.end()


def _allotment(spec: GroupSpec) -> Allotment:
    return Allotment(spec=spec, threads=None, cpus=1.0)


def _shown(context: dict[str, object]) -> str:
    return f"{context.get('message')}: {context.get('exception')!r}"
