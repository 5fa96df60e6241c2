"""The router's choice against every option written out."""

from __future__ import annotations

import math
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from kvferry.cluster.costs import COST_GRAIN_S, TRANSFER_LATENCY_S, Work, weigh
from kvferry.cluster.depths import Depths, Owners
from kvferry.cluster.messages import Load, WindowBlocks
from kvferry.cluster.native_costs import NativeWeigher
from kvferry.cluster.prices import Price, Roster
from kvferry.cluster.registry import Member
from kvferry.cluster.router import Demand, Router, RouterConfig
from kvferry.kernels.cpu.library import short_calls
from kvferry.runtime.ids import Epoch, GroupId, Peer
from tests.support.cluster_groups import ManualPort

pytestmark = pytest.mark.core

SIZE, BYTES = 16, 400_000
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 64},
    "two block groups": {"num_blocks": 200, "beside": WindowBlocks(num_blocks=50, max_held=5, block_bytes=100_000)},
}
GROUPS = st.lists(
    st.tuples(
        st.sampled_from(["prefill", "decode", "mixed"]),
        st.builds(
            Load,
            num_running=st.integers(0, 20),
            waiting_tokens=st.sampled_from([0, 0, 50, 3000]),
            prefill_tokens_per_s=st.sampled_from([0.0, 1000.0, 5000.0]),
            decode_step_s=st.sampled_from([0.0, 0.01, 0.03]),
            link_bytes_per_s=st.sampled_from([0.0, 1e7, 1e9]),
        ),
        st.integers(0, 60),
        st.integers(0, 60),
        st.sampled_from([0, 0, 1, 5]),
    ),
    min_size=1,
    max_size=5,
)


def options(router: Router, members: list[Member], demand: Demand, hits: Any, held: Any, config: Any) -> list[float]:
    """Seconds of everything that could be done."""
    usable, full = (demand.num_tokens - 1) // SIZE, demand.num_tokens // SIZE
    most = 0 if config.fetch_prefix == "never" else min(usable, max(held.values(), default=0))

    def ferry_s(m: Member, num: int) -> float:
        info = m.info
        num_bytes = (num if info.max_held is None else min(num, info.max_held)) * info.block_bytes
        if info.beside is not None:
            num_bytes += min(num, info.beside.max_held) * info.beside.block_bytes
        return TRANSFER_LATENCY_S + num_bytes / router.rates.link_bytes_per_s(m.peer)

    def firsts(m: Member) -> list[float]:
        rate, booked = router.rates.prefill_tokens_per_s(m.peer), router.load.booked(m.peer)
        queue_s = max(m.load.waiting_tokens, booked.num_tokens) / rate
        decoding = booked.num_sequences if m.role == "prefill" else m.load.num_running
        weight = 2 + (max(1, decoding) if m.role == "decode" else decoding)
        hit = min(usable, hits.get(m.peer, 0))
        computed = queue_s + (demand.num_tokens - hit * SIZE) / rate * weight
        if hit >= most:
            return [computed]
        fetched = max(queue_s, ferry_s(m, most - hit)) + (demand.num_tokens - most * SIZE) / rate * weight
        return [fetched] if config.fetch_prefix == "always" else [computed, fetched]

    def decode_s(m: Member) -> float:
        there = max(0 if m.role == "prefill" else m.load.num_running, router.load.booked(m.peer).num_sequences)
        base, slope = router.rates.step_line(m.peer)
        n = demand.num_sequences
        step_s = base + slope * (there + n) + slope * n * there
        return min(demand.max_new_tokens - 1, router.rates.output_tokens) * step_s

    homes = [m for m in members if m.role != "prefill"]
    if demand.max_new_tokens == 1 or not homes:
        return [first + decode_s(m) for m in members for first in firsts(m)]
    whole = [first + decode_s(m) for m in homes for first in firsts(m)]
    apart = [
        first + ferry_s(d, full - hits.get(d.peer, 0)) + decode_s(d)
        for p in members
        for first in firsts(p)
        for d in homes
        if p.role != "decode" and p is not d and hits.get(d.peer, 0) < full
    ]
    if config.disaggregate == "never" or not apart:
        return whole
    return apart if config.disaggregate == "always" else whole + apart


@given(
    groups=GROUPS,
    kind=st.sampled_from(sorted(KINDS)),
    demand=st.builds(Demand, st.integers(1, 1000), st.integers(1, 3), st.integers(1, 300)),
    config=st.builds(
        RouterConfig,
        disaggregate=st.sampled_from(["auto", "always", "never"]),
        fetch_prefix=st.sampled_from(["auto", "always", "never"]),
    ),
    later=st.integers(0, 4),
)
@settings(max_examples=400, deadline=None)
def test_the_cheapest_of_all_options_is_chosen(
    groups: list[Any], kind: str, demand: Demand, config: RouterConfig, later: int
) -> None:
    """Faults: a pair that was not looked at, a price that is not made anew when load, bookings or rates change."""
    router, members = Router(config), list[Member]()
    hits, held, full = {}, {}, demand.num_tokens // SIZE
    for i, (role, load, num_hits, num_held, num_booked) in enumerate(groups):
        port = ManualPort(f"m{i}", 1, role, block_size=SIZE, block_bytes=BYTES, **KINDS[kind])
        m = Member(port, 0)
        m.load = load
        router.observe(m.peer, load)
        members.append(m)
        hits[m.peer], held[m.peer] = min(full, num_hits), min(full, num_hits, num_held)
        for _ in range(num_booked):
            router.load.book(m.peer, 300, m.peer, 1, 3)
    for changed in (None, members[later % len(members)]):
        if changed is not None:  # and the same list of members again
            changed.load = Load(num_running=3, waiting_tokens=700, prefill_tokens_per_s=700, decode_step_s=0.02)
            router.observe(changed.peer, changed.load)
            router.load.book(changed.peer, 100, members[0].peer, 2, 3)
        decision = router.route(demand, members, hits, held=held)
        assert decision is not None
        least = min(options(router, members, demand, hits, held, config))
        assert least - 1e-9 <= decision.total_s <= least + 4 * COST_GRAIN_S
        assert math.isfinite(decision.total_s)


@given(
    groups=st.lists(
        st.tuples(
            *[st.sampled_from([0.0, 1e-4, 3e-3, 0.1]) | st.floats(0, 1)] * 4,
            st.integers(0, 2),
            st.sampled_from(["prefill", "decode", "mixed"]),
            st.sampled_from(sorted(KINDS)),
            st.booleans(),
        ),
        min_size=1,
        max_size=20,
    ),
    lead=st.sampled_from([0, 60, 130]),
    num_tokens=st.integers(1, 600),
    num_sequences=st.integers(1, 3),
    gain_s=st.sampled_from([-math.inf, COST_GRAIN_S]),
    data=st.data(),
)
@settings(max_examples=400, deadline=None)
def test_fleets_are_weighed_alike_in_cpp(
    groups: list[Any], lead: int, num_tokens: int, num_sequences: int, gain_s: float, data: st.DataObject
) -> None:
    """Faults: a formula or a tie that the two disagree on, a group that may not be chosen, bits beyond a word, a row
    that is not written anew."""
    code = short_calls()
    if code is None:
        pytest.skip("the kernels are not built")
    full, usable, prices, hits = num_tokens // SIZE, (num_tokens - 1) // SIZE, list[Price](), {}
    for i, (*_, role, kind, _) in enumerate(groups):
        port = ManualPort(f"m{i}", 1, role, block_size=SIZE, block_bytes=BYTES, **KINDS[kind])
        price = Price(Member(port, 0))
        prices.append(price)
        hits[price.peer] = data.draw(st.integers(0, full))
    known = data.draw(st.sets(st.sampled_from(prices)))
    owners = Owners({p.peer: 1 << lead + i for i, p in enumerate(prices) if p in known})
    everyone, weigh_in_cpp = Roster(prices), NativeWeigher(code).weigh
    open_ones = everyone.without({p.peer for p, (*_, shut) in zip(prices, groups, strict=True) if shut})
    most = data.draw(st.integers(0, usable))
    work = Work(num_tokens, num_sequences, 9.5, Depths.of(hits, owners), SIZE, full, usable, most, gain_s)
    for factor in (1.0, 0.5):  # and again after prices have changed
        for price, (step_s, queue_s, token_s, block_s, picked, *_) in zip(prices, groups, strict=True):
            price.queue_s, price.token_s, price.block_s = factor * queue_s, token_s / 50, block_s / 50
            price.step_s, price.join_s = 0.7 * step_s / 9, 0.3 * step_s / 9
            price.turn = picked, price.name
        everyone.renewed(prices)
        for live in [everyone, *([open_ones] if open_ones.prices else [])]:
            anywhere = not live.homes or data.draw(st.booleans())
            assert weigh_in_cpp(work, live, anywhere) == weigh(work, live, anywhere)


@given(depths=st.dictionaries(st.integers(0, 7), st.integers(0, 5)), among=st.sets(st.integers(0, 9)))
def test_depths_are_the_mapping_that_they_were_made_of(depths: dict[int, int], among: set[int]) -> None:
    """Faults: a group counted at a depth that another has, one that was left out, one without a bit."""
    peers = [Peer(GroupId(f"m{i}"), Epoch(1)) for i in range(10)]
    truth = {peers[i]: depth for i, depth in depths.items() if depth}
    found = Depths.of(
        {peers[i]: depth for i, depth in depths.items()}, Owners({p: 1 << i for i, p in enumerate(peers)})
    )
    assert found == truth
    assert [found.depth(peer) for peer in peers] == [truth.get(peer, 0) for peer in peers]
    for left in (found, found.among({peers[i] for i in among})):
        kept = {p: n for p, n in truth.items() if left is found or p in {peers[i] for i in among}}
        assert left == kept
        assert len(left) == len(kept)
        assert left.deepest == max(kept.values(), default=0)
        assert set(left.having_most()) == {p for p, n in kept.items() if n == left.deepest}
