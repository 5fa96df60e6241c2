"""Guards against events that do not add up to what the cache holds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cluster.engine_driver import EngineDriver, Output
from kvferry.cluster.kv_events import KvEventLog
from kvferry.cluster.messages import KvSnapshot, Query, Submit
from kvferry.runtime.errors import InvariantBroken
from kvferry.runtime.ids import BlockHash
from tests.support.toy_engine import ToyEngine, toy_request

pytestmark = pytest.mark.core


def h(i: int) -> BlockHash:
    return BlockHash(i.to_bytes(16, "big"))


def test_what_comes_and_goes_within_a_step_leaves_no_trace() -> None:
    log = KvEventLog()
    log.stored(h(1))
    log.removed(h(1))
    assert log.take() is None
    log.stored(h(2))
    log.take()
    log.removed(h(2))
    log.stored(h(2))
    assert log.take() is None


def test_count_and_digest_are_those_after_the_events() -> None:
    log = KvEventLog()
    log.stored(h(1))
    log.stored(h(2))
    events = log.take()
    assert events is not None
    assert (events.stored, events.removed, events.count, events.digest) == ([h(1), h(2)], [], 2, h(3))
    log.removed(h(1))
    events = log.take()
    assert events is not None
    assert (events.stored, events.removed, events.count, events.digest) == ([], [h(1)], 1, h(2))


def test_impossible_events_are_refused() -> None:
    """A pool that reports a block twice would break every router's proof silently."""
    log = KvEventLog()
    with pytest.raises(InvariantBroken):
        log.removed(h(1))
    log.stored(h(1))
    with pytest.raises(InvariantBroken):
        log.stored(h(1))


@given(st.lists(st.tuples(st.integers(1, 6), st.booleans()), max_size=60))
def test_replayed_events_give_the_same_set(steps: list[tuple[int, bool]]) -> None:
    """Twin: a set. `True` takes the events and applies them on the other side."""
    log, truth, mirror = KvEventLog(), set[BlockHash](), set[BlockHash]()
    for i, take in [*steps, (1, True)]:
        if h(i) in truth:
            truth.remove(h(i))
            log.removed(h(i))
        else:
            truth.add(h(i))
            log.stored(h(i))
        if take:
            events = log.take()
            if events is not None:
                assert not set(events.stored) & set(events.removed)
                mirror = (mirror | set(events.stored)) - set(events.removed)
                digest = 0
                for block_hash in truth:
                    digest ^= int.from_bytes(block_hash, "big")
                assert (events.count, events.digest) == (len(truth), digest.to_bytes(16, "big"))
            assert mirror == truth


def test_what_a_long_step_evicts_is_told_before_it() -> None:
    """Routers count on blocks that are gone until the prefill that took them is over, and fetch them in vain."""
    toy, early, replies = ToyEngine(num_blocks=6), list[tuple[int, Output]](), list[KvSnapshot]()
    driver = EngineDriver(
        toy.engine,
        lambda _, reply: replies.append(reply),  # type: ignore[arg-type]
        lambda output: early.append((len(toy.runner.plans), output)),
        toy.clock,
    )
    known = set[BlockHash]()

    def step() -> None:
        num_early, num_plans = len(early), len(toy.runner.plans)
        output = driver.step(toy.clock())
        for when, told in early[num_early:]:
            assert when == num_plans, "told after the step"
            assert told.kv is not None
            assert told.kv.removed
        for kv in [*(told.kv for _, told in early[num_early:]), output.kv]:
            if kv is not None:
                assert set(kv.removed) <= known
                assert not set(kv.stored) & known
                known.difference_update(kv.removed)
                known.update(kv.stored)
                assert kv.count == len(known)
        driver.handle("g", Query(1, "snapshot"))
        assert set(replies.pop().hashes) == known == set(toy.engine.cached_hashes())

    for name, first in (("a", 1), ("b", 21)):
        driver.handle("g", Submit([toy_request(name, list(range(first, first + 16)), 4)]))
        while toy.engine.has_work():
            step()
    assert len(early) == 1
    assert early[0][1].kv is not None
    assert not early[0][1].tokens
    assert len(early[0][1].kv.removed) == 2, "what decode takes later is told when its step is over"
