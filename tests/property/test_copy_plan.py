"""Guards against heads that are lost, doubled or swapped between groups of unequal tensor-parallel size."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.runtime.errors import IncompatiblePeer
from kvferry.runtime.kv.layout import KVLayout
from kvferry.runtime.transfer.plan import copy_plan

pytestmark = pytest.mark.core


def layout(kv_heads: int, tp_size: int) -> KVLayout:
    return KVLayout(num_layers=2, num_kv_heads=kv_heads, head_dim=4, block_size=16, dtype="float32", tp_size=tp_size)


VALID = [
    (heads, source, destination)
    for heads in range(1, 13)
    for source in (1, 2, 3, 4, 6, 8)
    for destination in (1, 2, 3, 4, 6, 8)
    if all(max(heads, tp) % min(heads, tp) == 0 for tp in (source, destination))
]


@given(st.sampled_from(VALID))
def test_against_brute_force(case: tuple[int, int, int]) -> None:
    heads, source_tp, destination_tp = case
    source, destination = layout(heads, source_tp), layout(heads, destination_tp)
    routes = copy_plan(source, destination)
    arrived: Counter[tuple[int, int]] = Counter()
    for route in routes:
        first = source.heads(route.source_rank)[0]
        target = destination.heads(route.destination_rank)[0]
        got = [first + local for local in range(*route.source_heads)]
        assert got == [target + local for local in range(*route.destination_heads)], "the same global heads"
        assert got
        assert all(head in range(*source.heads(route.source_rank)) for head in got), "the source has them"
        arrived.update((route.destination_rank, head) for head in got)
        full = route.num_heads == source.rank_heads == destination.rank_heads
        assert route.whole == full
    wanted = {(rank, head) for rank in range(destination_tp) for head in range(*destination.heads(rank))}
    assert arrived == dict.fromkeys(wanted, 1), "every head of every destination rank exactly once"
    pairs = [(route.source_rank, route.destination_rank) for route in routes]
    assert len(set(pairs)) == len(pairs), "one link per pair of ranks"


@given(st.sampled_from([case for case in VALID if case[1] > case[0]]))
def test_replicas_share_the_load(case: tuple[int, int, int]) -> None:
    """Guards against one replica that sends everything while the others idle."""
    heads, source_tp, destination_tp = case
    replicas = source_tp // heads
    per_head: dict[int, Counter[int]] = {}
    for route in copy_plan(layout(heads, source_tp), layout(heads, destination_tp)):
        per_head.setdefault(route.source_rank // replicas, Counter())[route.source_rank] += 1
    for used in per_head.values():
        receivers = used.total()
        assert len(used) == min(replicas, receivers)
        assert max(used.values()) - min(used.values()) <= 1


def test_other_content_is_refused() -> None:
    with pytest.raises(IncompatiblePeer, match="differ"):
        copy_plan(layout(4, 2), layout(8, 2))
