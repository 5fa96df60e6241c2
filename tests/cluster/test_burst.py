"""Far more requests at once than pools hold: real engines over a toy runner, in virtual time.

Guards against leases that lapse in queues, deadlines that measure a queue, requests that fail or hang because others
came first (faults 3, 5 and 28), and against time that no timeline shows (fault 41).
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.cluster import admission
from kvferry.cluster.budgets import CoordinatorConfig
from kvferry.cluster.messages import StepFrame
from kvferry.cluster.registry import RegistryConfig
from kvferry.cluster.router import RouterConfig
from kvferry.runtime.config import SchedulerConfig
from kvferry.runtime.ids import Peer, RequestId
from kvferry.runtime.request import Request, SamplingParams
from kvferry.runtime.timeline import Phase, Timeline
from kvferry.runtime.transfer.ticket import TransferEvent, TransferState
from tests.cluster.test_real_engines import Case, RealGroup
from tests.support.toy_engine import VOCAB

pytestmark = pytest.mark.core
PROMPT, OUTPUT, BLOCK = 12, 8, 4
POOL_FOR_8 = 8 * (PROMPT + OUTPUT) // BLOCK
COMPUTING = (Phase.PREFILL, Phase.DECODE)


class WatchedGroup(RealGroup):
    """Notes, per sequence, how long it has been running, whatever anybody says of it."""

    def step(self) -> None:
        super().step()
        now_ns = self.now_ns
        running = {s.key.request_id for s in self.engine.scheduler.running}
        for name in running | self.before:
            self.case.ran_ns[name] = self.case.ran_ns.get(name, 0) + now_ns - self.stepped_ns
        self.before, self.stepped_ns = running, now_ns

    before: set[str] = set()
    stepped_ns = 0


class Burst(Case):
    """All requests at once; nothing is lost on the way."""

    def __init__(self, toy: SimpleNamespace, num_requests: int, transfer_timeout_s: float, disaggregate: str) -> None:
        super().__init__(toy, 7)
        self.faulty, self.loss, self.num_requests = False, 0.0, num_requests
        self.ran_ns: dict[str, int] = {}
        self.transfers: list[TransferEvent] = []
        self.timelines: list[Timeline] = []
        self.world = toy.World(
            CoordinatorConfig(transfer_timeout_s=transfer_timeout_s, expect_timeout_s=0.5, max_queue_s=86400.0),
            RegistryConfig(unreachable_after_s=0.8, abandon_after_s=2.0),
            RouterConfig(disaggregate=disaggregate),
        )
        self._arrive = self.world.arrive
        self.world.arrive = self.arrive

    def arrive(self, peer: Peer, frame: StepFrame) -> None:
        self.transfers += frame.transfers
        self._arrive(peer, frame)

    async def run(self) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: self.failures.append(context))
        async with self.world as world, asyncio.TaskGroup() as self.lives:
            for name, role in (("p0", "prefill"), ("d0", "decode")):
                self.add(WatchedGroup(self, name, role, POOL_FOR_8, SchedulerConfig(max_batch_tokens=32)))
            async with asyncio.TaskGroup() as clients:
                for number in range(self.num_requests):
                    clients.create_task(self.client(number))
            self.over = True
            await world.clock.sleep(5)
            await self.check_rest()
            for group in self.groups:
                group.die()

    async def client(self, number: int) -> None:
        prompt = [number % VOCAB, number // VOCAB, *(self.rng.randrange(VOCAB) for _ in range(PROMPT - 2))]
        request = Request(
            request_id=RequestId(f"r{number}"),
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=OUTPUT, seed=number),
            eos_token_ids=[],
            arrival_ns=self.world.clock.now_ns(),
        )
        stream = self.world.coordinator.start(request)
        assert await self.toy.collect(stream, 1) == [self.truth(request, 0)]
        assert stream.usage.num_output_tokens == OUTPUT
        assert stream.timeline.attempts == 1
        assert_accounted(stream.timeline)
        ran_s = self.ran_ns[request.request_id] / 1e9
        said_s = sum(stream.timeline.seconds().get(phase, 0.0) for phase in COMPUTING)
        wall_s = (stream.timeline.finished_ns - request.arrival_ns) / 1e9
        assert abs(said_s - ran_s) < 0.02 * wall_s + 0.1, "engines were seen to work on it for another time"
        self.timelines.append(stream.timeline)


def assert_accounted(timeline: Timeline) -> None:
    """Fault 41. Spans do not overlap, and leave out less than a fiftieth."""
    assert timeline.finished_ns is not None
    ends = [timeline.received_ns, *(span.end_ns for span in timeline.spans)]
    assert all(span.begin_ns >= end for span, end in zip(timeline.spans, ends, strict=False))
    total_s = (timeline.finished_ns - timeline.received_ns) / 1e9
    told_s = sum(seconds for phase, seconds in timeline.seconds().items() if phase is not Phase.LOST)
    assert told_s >= 0.98 * total_s


@pytest.mark.parametrize("line", ["at the gateway", "in the engines"])
def test_512_requests_against_pools_for_8(toy: Any, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    """Fault 3. The lease of a transfer is a small part of the time that the last request waits."""
    if line == "in the engines":
        monkeypatch.setattr(admission, "AHEAD", 1e9)
    burst = Burst(toy, 512, transfer_timeout_s=0.5, disaggregate="always")
    toy.run(burst.run())
    waits = [t.seconds() for t in burst.timelines]
    longest = max(
        w.get(Phase.ADMISSION, 0) + w.get(Phase.PREFILL_QUEUE, 0) + w.get(Phase.DECODE_QUEUE, 0) for w in waits
    )
    assert longest > 4 * 0.5
    if line == "at the gateway":  # else there is no room at the destination when it is asked for
        assert len(burst.transfers) > 256, "the burst was not ferried"
    assert burst.transfers
    assert [t for t in burst.transfers if t.state is TransferState.EXPIRED] == []


@pytest.mark.parametrize("disaggregate", ["auto", "always"])
def test_a_burst_of_twenty_times_the_capacity(toy: Any, disaggregate: str) -> None:
    """Fault 28: deadlines that measure the receiver's own queue fail healthy requests."""
    burst = Burst(toy, 160, transfer_timeout_s=0.2, disaggregate=disaggregate)
    toy.run(burst.run())
    assert [t for t in burst.transfers if t.state is TransferState.EXPIRED] == []


def test_waiting_after_a_preemption_is_no_decoding(toy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault 41: answers that stood still for want of blocks looked like slow decodes."""
    monkeypatch.setattr(admission, "AHEAD", 3.0)
    burst = Burst(toy, 200, transfer_timeout_s=0.5, disaggregate="always")
    toy.run(burst.run())
    assert sum(group.engine.scheduler.num_preemptions for group in burst.groups) > 0
    assert any(Phase.PREEMPTED in timeline.seconds() for timeline in burst.timelines)
