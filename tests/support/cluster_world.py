"""A whole cluster in virtual time. Messages to and from a group arrive later, in order; a killed group's are lost."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any

from kvferry.cluster.budgets import CoordinatorConfig
from kvferry.cluster.coordinator import Coordinator
from kvferry.cluster.messages import Load, StepFrame
from kvferry.cluster.prefix_index import PrefixIndex
from kvferry.cluster.registry import Registry, RegistryConfig
from kvferry.cluster.router import Router, RouterConfig
from kvferry.runtime.errors import GroupDied
from kvferry.runtime.ids import Peer, SequenceKey
from kvferry.runtime.request import FinishReason, TokenEvent
from kvferry.runtime.transfer.ticket import Ticket, TransferEvent
from tests.support.cluster_groups import ManualPort, ToyGroup

START_NS = 1_000_000_000_000


# ---------------------------------------------------------------- virtual time
class _Selector(selectors.SelectSelector):
    """Instead of waiting, lets the time pass."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("everybody waits for something that cannot happen any more")
        self.loop.now += timeout
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.now = 0.0
        selector = _Selector()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self.now


def run(main: Coroutine[Any, Any, Any]) -> Any:
    """Runs to the end; no real time passes. Whatever is left behind fails the test."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        result = runner.run(main)
        assert not asyncio.all_tasks(runner.get_loop())
        return result


class VirtualClock:
    def now_ns(self) -> int:
        return START_NS + int(asyncio.get_running_loop().time() * 1e9)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


# ---------------------------------------------------------------- the world
class World:
    """Registry, index, router, coordinator and some groups; plays the gateway between them."""

    def __init__(
        self,
        config: CoordinatorConfig | None = None,
        registry: RegistryConfig | None = None,
        router: RouterConfig | None = None,
    ) -> None:
        self.clock = VirtualClock()
        self.registry = Registry(registry or RegistryConfig())
        self.index = PrefixIndex()
        self.router = Router(router or RouterConfig(disaggregate="always"))
        self.coordinator = Coordinator(
            self.registry, self.router, self.index, self.clock, config or CoordinatorConfig()
        )
        self.groups: list[ToyGroup] = []
        self.disturb: Callable[[ToyGroup, StepFrame], list[StepFrame]] = lambda _, frame: [frame]
        self.num_epochs = 0
        self._tasks: asyncio.TaskGroup

    async def __aenter__(self) -> World:
        self._tasks = asyncio.TaskGroup()
        await self._tasks.__aenter__()
        await self.coordinator.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self.coordinator.__aexit__(*error)
        for group in self.groups:
            group.die()
        await self._tasks.__aexit__(*error)

    def up(self, port: Any) -> Any:
        """A `ManualPort` comes up."""
        self.registry.up(port, self.clock.now_ns())
        return port

    def add(self, group: str, role: str, step_s: float = 0.02, latency_s: float = 0.001) -> ToyGroup:
        self.num_epochs += 1
        made = ToyGroup(self, group, self.num_epochs, role, step_s, latency_s)
        self.groups.append(made)
        self.registry.up(made, self.clock.now_ns())
        self._tasks.create_task(made.live())
        return made

    def kill(self, group: ToyGroup, noticed_after_s: float = 0.015, back_after_s: float | None = None) -> None:
        """Dies now; the gateway hears of it later, and a successor may come up."""
        if not group.alive:
            return
        group.die()
        loop = asyncio.get_running_loop()

        def noticed() -> None:
            for call in list(group._calls):
                if not call.done():
                    call.set_exception(GroupDied(f"{group.peer} died"))
            self.coordinator.on_group_down(group.peer, "killed by the test")

        loop.call_later(noticed_after_s, noticed)
        if back_after_s is not None:
            loop.call_later(
                noticed_after_s + back_after_s,
                lambda: self.add(group.peer.group, group.info.role, group.step_s, group.latency_s),
            )

    def carry(self, ticket: Ticket) -> None:
        """Blocks on their way."""
        for group in self.groups:
            if group.peer == ticket.destination.peer:
                asyncio.get_running_loop().call_later(0.002, group.receive, ticket)

    def deliver(self, group: ToyGroup, frame: StepFrame) -> None:
        for disturbed in self.disturb(group, frame):
            asyncio.get_running_loop().call_later(group.latency_s, self.arrive, group.peer, disturbed)

    def arrive(self, peer: Peer, frame: StepFrame) -> None:
        if self.registry.on_frame(peer, frame, self.clock.now_ns()):
            self.index.apply(peer, frame.seq, frame.kv)
            self.coordinator.on_frame(peer, frame)

    def frame(self, port: ManualPort, *tokens: TokenEvent, transfers: list[TransferEvent] | None = None) -> None:
        """A frame of a `ManualPort`."""
        self.arrive(port.peer, StepFrame(port.peer.epoch, 0, list(tokens), transfers or [], None, Load()))

    async def settled(self, seconds: float = 1.0) -> None:
        """Lets everything come to rest, then asserts that nothing is held anywhere."""
        await self.clock.sleep(seconds)
        self.coordinator.check_invariants()
        assert self.coordinator.in_flight == 0
        assert self.router.num_bookings == 0
        assert self.coordinator.num_waiting == 0
        audits = {group.peer: await group.audit(1.0) for group in self.groups if group.alive}
        assert self.coordinator.audit(audits) == []


async def collect(stream: Any, n: int) -> list[list[int]]:
    """All tokens per index; asserts that each position comes once and in order, and each sequence ends once."""
    outputs: list[list[int]] = [[] for _ in range(n)]
    ended = [0] * n
    async for event in stream:
        assert not ended[event.key.index]
        if event.token_id is not None:
            assert event.position == len(outputs[event.key.index])
            outputs[event.key.index].append(event.token_id)
        assert event.finish_reason is not FinishReason.HANDOFF
        ended[event.key.index] += event.finish_reason is not None
    assert ended == [1] * n
    return outputs


def event(key: SequenceKey, position: int, token: int | None, reason: FinishReason | None = None, **more: Any) -> Any:
    return TokenEvent(key=key, position=position, token_id=token, finish_reason=reason, **more)


async def turns(n: int = 5) -> None:
    for _ in range(n):
        await asyncio.sleep(0)
