"""The scheduler and pool under a toy model that reads its context back from the blocks.

Guards against: a row that reads an unfilled, evicted or foreign block; a prefix computed twice; blocks lost by
preemption or cancel; a batch over its budget; output that depends on who else is running.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvferry.runtime.ids import SequenceKey
from kvferry.runtime.request import SequenceRequest
from tests.support.toy_engine import ToyEngine, ToyProposer, toy_output, toy_request

pytestmark = pytest.mark.core
SYSTEM = list(range(10))
BUDGET, MAX_SEQUENCES = 11, 3


class SchedulerMachine(RuleBasedStateMachine):
    """The naive twin is `toy_output`: each sequence alone, without blocks."""

    KV: dict[str, int] = {"num_blocks": 12}
    speculation = 0

    def __init__(self) -> None:
        super().__init__()
        self.proposer = ToyProposer(5, self.KV.get("window") if "num_window_blocks" not in self.KV else None)
        self.toy = ToyEngine(
            **self.KV,
            speculation=self.speculation,
            proposer=self.proposer,
            max_batch_tokens=BUDGET,
            max_sequences=MAX_SEQUENCES,
            max_waiting=6,
        )
        self.window = self.toy.kv.main.window
        self.requests: dict[SequenceKey, SequenceRequest] = {}
        self.cancelled: set[SequenceKey] = set()
        self.serial = 0

    @rule(
        shared=st.integers(0, 10),
        own=st.lists(st.integers(0, 3), min_size=1, max_size=12),
        max_tokens=st.integers(1, 14),
        delivered=st.integers(0, 3),
        priority=st.integers(0, 2),
        n=st.integers(1, 2),
    )
    def submit(self, shared: int, own: list[int], max_tokens: int, delivered: int, priority: int, n: int) -> None:
        prompt = SYSTEM[:shared] + own
        self.serial += 1
        for index in range(n):
            done = toy_output(prompt, min(delivered, max_tokens - 1), self.serial, index, self.window)
            request = toy_request(
                f"r{self.serial}",
                prompt,
                max_tokens,
                index=index,
                seed=self.serial,
                priority=priority,
                output_token_ids=done,
                arrival_ns=self.serial,
            )
            self.requests[request.key] = request
            self.toy.submit(request)

    @precondition(lambda self: self.toy.engine.has_work())
    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.toy.step()
            rows = self.toy.runner.plans[-1].rows
            assert sum(len(r.token_ids) for r in rows) <= BUDGET
            assert len(rows) <= MAX_SEQUENCES

    @precondition(lambda self: self.toy.engine.scheduler.sequences())
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        live = [s.key for s in self.toy.engine.scheduler.sequences()]
        key = live[data.draw(st.integers(0, len(live) - 1))]
        self.toy.engine.cancel(key)
        self.cancelled.add(key)

    @rule()
    def reuse_of_free_blocks_is_visible(self) -> None:
        self.toy.runner.poison(self.toy.engine.pools.free_blocks())

    @invariant()
    def holds(self) -> None:
        assert self.toy.engine.audit().broken == []

    def teardown(self) -> None:
        self.toy.run()
        for key, request in self.requests.items():
            if key in self.cancelled or self.toy.ends.get(key) == "queue_full":
                continue
            done = request.output_token_ids
            params = request.sampling
            truth = toy_output(request.prompt_token_ids, params.max_tokens, params.seed or 0, key.index, self.window)
            assert self.toy.ends[key] == "length"
            assert done + self.toy.tokens[key] == truth
        audit = self.toy.engine.audit()
        assert audit.sequences == []
        assert audit.num_leased_blocks == 0


class WindowMachine(SchedulerMachine):
    """Pools hold less than one sequence can have."""

    KV = {"num_blocks": 6, "window": 7}


class MixedMachine(SchedulerMachine):
    KV = {"num_blocks": 12, "window": 7, "num_window_blocks": 6}


class SpeculatingMachine(SchedulerMachine):
    """Rows with drafts, right and wrong: a token accepted in vain, its KV sealed, a block kept that it needed."""

    speculation = 5

    def teardown(self) -> None:
        super().teardown()
        assert not self.proposer.known, "a proposer is told of every end"


class SpeculatingMixedMachine(SpeculatingMachine):
    KV = MixedMachine.KV


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)
TestWindow = WindowMachine.TestCase
TestWindow.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
TestMixed = MixedMachine.TestCase
TestMixed.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
TestSpeculation = SpeculatingMachine.TestCase
TestSpeculation.settings = TestWindow.settings
TestSpeculationMixed = SpeculatingMixedMachine.TestCase
TestSpeculationMixed.settings = TestWindow.settings


def test_prefix_of_simultaneous_arrivals_is_computed_once() -> None:
    """vLLM's CPU backend and llama-server compute a shared system prompt once per simultaneous arrival."""
    toy = ToyEngine(num_blocks=200, max_batch_tokens=64, max_sequences=16)
    system = list(range(48))
    for i in range(16):
        toy.submit(toy_request(f"r{i}", [*system, i, i], 1, arrival_ns=i))
    toy.run()
    computed = sum(plan.num_tokens for plan in toy.runner.plans)
    assert computed == 48 + 2 + 15 * 2
    assert toy.engine.load().cached_tokens_total == 15 * 48


def test_waiting_for_a_prefix_ends_when_its_maker_is_cancelled() -> None:
    """A sequence that waits for a block of a cancelled one must compute it itself, at once."""
    toy = ToyEngine(num_blocks=64, max_batch_tokens=8)
    prompt = list(range(40))
    toy.submit(toy_request("a", prompt, 4))
    toy.submit(toy_request("b", prompt, 4, arrival_ns=1))
    toy.step()
    toy.engine.cancel(toy_request("a", prompt).key)
    toy.run()
    assert toy.tokens[toy_request("b", prompt).key] == toy_output(prompt, 4)


def test_decodes_go_before_prefill() -> None:
    """A long prompt must not stop running decodes: it gets what they leave of the budget."""
    toy = ToyEngine(num_blocks=64, max_batch_tokens=8)
    toy.submit(toy_request("short", [1, 2], 20))
    toy.step()
    toy.submit(toy_request("long", list(range(40)), 2, arrival_ns=1))
    toy.step()
    rows = toy.runner.plans[-1].rows
    assert [len(r.token_ids) for r in rows] == [1, 7]


@given(sizes=st.lists(st.integers(1, 12), min_size=2, max_size=6))
@settings(max_examples=40, deadline=None)
def test_priority_then_arrival(sizes: list[int]) -> None:
    """With room for one at a time, sequences finish in the order of priority, then arrival."""
    toy = ToyEngine(num_blocks=64, max_sequences=1)
    for i, size in enumerate(sizes):
        toy.submit(toy_request(f"r{i}", [i] * size, 2, priority=i % 2, arrival_ns=i))
    toy.run()
    order = [int(key.request_id[1:]) for key in toy.ends]
    assert order == sorted(range(len(sizes)), key=lambda i: (i % 2, i))


def test_newer_attempt_replaces_older() -> None:
    """A resubmission must not run beside its earlier attempt, and a late copy of the old one must not come back."""
    toy = ToyEngine()
    old, new = toy_request("r", [1, 2, 3], 4), toy_request("r", [1, 2, 3], 4, attempt=2)
    toy.submit(old)
    toy.step()
    toy.submit(new)
    toy.submit(old)
    toy.run()
    assert toy.ends[old.key] == "cancelled"
    assert toy.tokens[new.key] == toy_output([1, 2, 3], 4)
