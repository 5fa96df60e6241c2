"""Who goes first in an engine, and how long anybody can be passed by others."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.runtime.errors import NoFreeBlocks
from kvferry.runtime.ids import TransferId
from kvferry.runtime.transfer.ticket import ExpectRequest
from tests.support.toy_engine import ToyEngine, toy_address, toy_output, toy_request

pytestmark = pytest.mark.core
SECOND = 1_000_000_000
BIG = list(range(40))
"""Ten blocks and one to grow, of the twelve that the pool has."""


def small(name: str, arrival_ns: int, max_tokens: int = 6) -> object:
    number = int(name[1:])
    return toy_request(name, [41, number % 50, number // 50], max_tokens, arrival_ns=arrival_ns)


def test_small_sequences_are_not_stuck_behind_one_that_waits_for_blocks() -> None:
    """Head-of-line blocking: half of the pool idles while everybody waits for the first in line to fit."""
    toy = ToyEngine(num_blocks=12)
    toy.submit(toy_request("holder", [42] * 16, 12))
    toy.step()
    toy.submit(toy_request("big", BIG, 2, arrival_ns=1))
    toy.submit(small("s1", 2))
    for _ in range(7):
        toy.step()
    assert [key.request_id for key in toy.ends] == ["s1"]
    toy.run()
    assert toy.tokens[toy_request("big", BIG).key] == toy_output(BIG, 2)


@given(max_bypass=st.integers(0, 5), lengths=st.lists(st.integers(1, 9), min_size=4, max_size=40))
@settings(max_examples=60, deadline=None)
def test_a_big_sequence_is_passed_a_bounded_number_of_times(max_bypass: int, lengths: list[int]) -> None:
    """Starvation: small sequences that keep coming take each block that becomes free, for ever."""
    toy = ToyEngine(num_blocks=12, max_bypass=max_bypass)
    scheduler = toy.engine.scheduler
    for i in range(3):
        toy.submit(small(f"s{i}", i, 6))
    toy.step()
    big = toy_request("big", BIG, 2, arrival_ns=10)
    toy.submit(big)
    passed: set[str] = set()
    for i, length in enumerate(lengths):
        toy.submit(small(f"s{100 + i}", 100 + i, length))
        toy.step()
        waiting = scheduler.get(big.key)
        if waiting is None or waiting in scheduler.running:
            break
        passed |= {s.key.request_id for s in scheduler.running if s.order > waiting.order}
        assert len(passed) <= max_bypass
    toy.run()
    assert toy.ends[big.key] == "length"


def test_a_full_queue_takes_what_has_begun_elsewhere() -> None:
    """A handed-over answer is refused again and again by a short queue, until its retries are used up."""
    toy = ToyEngine(num_blocks=12, max_waiting=1)
    holder, waiting = toy_request("holder", [42] * 16, 12), toy_request("waiting", BIG, 2, arrival_ns=1)
    toy.submit(holder)
    toy.step()
    toy.submit(waiting)
    begun = msgspec.structs.replace(toy_request("begun", [7, 8], 4), output_token_ids=toy_output([7, 8], 4)[:2])
    toy.submit(begun)
    toy.submit(toy_request("new", [9], 2))
    toy.run()
    assert {key.request_id: end for key, end in toy.ends.items()} == {
        **dict.fromkeys(("holder", "waiting", "begun"), "length"),
        "new": "queue_full",
    }


def test_transfers_leave_blocks_to_a_sequence_that_was_passed_often() -> None:
    """Starvation: each arriving ticket reserves what became free, and a long prompt never gets its blocks."""
    toy = ToyEngine(num_blocks=12, max_bypass=3)
    toy.submit(toy_request("holder", [42] * 16, 12))
    toy.step()
    toy.submit(toy_request("big", BIG, 2, arrival_ns=1))
    toy.step()
    granted = 0
    for i in range(8):
        wanted = ExpectRequest(
            transfer_id=TransferId(f"t{i}"),
            attempt=1,
            source=toy_address("other"),
            token_ids=[43, i, i, i],
            cache_salt="",
            timeout_s=3600.0,
        )
        try:
            toy.engine.expect(wanted, toy.clock())
        except NoFreeBlocks:
            continue
        granted += 1
        toy.engine.end_transfer(wanted.transfer_id, 1, "over")
    assert granted == 3
    toy.run()
    assert toy.tokens[toy_request("big", BIG).key] == toy_output(BIG, 2)


def test_blocks_on_their_way_are_waited_for_before_they_are_given_up() -> None:
    """Waste: a pool full of transfers about to complete threw them away at the first plan that ran nothing."""
    toy = ToyEngine(num_blocks=6)
    wanted = ExpectRequest(
        transfer_id=TransferId("t"),
        attempt=1,
        source=toy_address("other"),
        token_ids=[1] * 16,
        cache_salt="",
        timeout_s=3600.0,
    )
    toy.engine.expect(wanted, toy.clock())
    toy.submit(toy_request("big", [2] * 18, 1, sends_transfer_id=TransferId("out")))
    toy.step()
    toy.step()
    assert toy.engine.inbound.ids() == ["t"]
    assert not toy.engine.has_work(), "it spins"
    due = toy.engine.next_deadline_ns()
    assert due is not None
    toy.clock.now_ns = due
    toy.step()
    assert toy.engine.inbound.ids() == []
    toy.run()
    assert toy.ends[toy_request("big", []).key] == "length"


def test_low_priority_ages_until_it_goes_first() -> None:
    """Starvation: requests of a better priority that keep coming are served before it for ever."""
    toy = ToyEngine(num_blocks=64, max_sequences=1, priority_step_s=5.0)
    toy.submit(toy_request("busy", [9], 3))
    toy.step()
    toy.submit(toy_request("low", [1], 1, priority=2, arrival_ns=0))
    for second in range(16):
        toy.submit(toy_request(f"high{second}", [2, second], 1, priority=0, arrival_ns=second * SECOND))
    toy.run()
    order = [key.request_id for key in toy.ends if key.request_id != "busy"]
    assert order.index("low") == 10, "two steps of five seconds: those of the first ten seconds go before it"


@given(
    queue=st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 100)), min_size=2, max_size=12),
    step_s=st.integers(0, 20),
)
@settings(max_examples=40, deadline=None)
def test_order_is_that_of_the_twin(queue: list[tuple[int, int]], step_s: int) -> None:
    """The twin recomputes every rank whenever a place is free: priority minus the steps waited, then arrival."""
    toy = ToyEngine(num_blocks=64, max_sequences=1, priority_step_s=float(step_s))
    toy.submit(toy_request("busy", [9], 2, priority=-100))
    toy.step()
    for i, (priority, arrival_s) in enumerate(queue):
        toy.submit(toy_request(f"r{i}", [i], 1, priority=priority, arrival_ns=arrival_s * SECOND))
    toy.run()
    left = list(range(len(queue)))
    for key in [key for key in toy.ends if key.request_id != "busy"]:
        now_s = 1000

        def rank(i: int, now_s: int = now_s) -> tuple[float, int]:
            priority, arrival_s = queue[i]
            return priority * step_s - (now_s - arrival_s), i

        best = min(left, key=rank)
        assert key.request_id == f"r{best}"
        left.remove(best)
