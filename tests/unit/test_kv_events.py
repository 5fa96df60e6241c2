"""Guards against events that do not add up to what the cache holds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cluster.kv_events import KvEventLog
from kvferry.runtime.errors import InvariantBroken
from kvferry.runtime.ids import BlockHash

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
