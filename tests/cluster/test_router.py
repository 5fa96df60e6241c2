"""Guards against bursts that pile up on one group, groups that must not be picked, and load never given back."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.cluster.messages import Load, WindowBlocks
from kvferry.cluster.registry import GroupState, Member
from kvferry.cluster.router import Demand, Router, RouterConfig

pytestmark = pytest.mark.core

ROLES = st.sampled_from(["prefill", "decode", "mixed"])


def member(toy: Any, name: str, role: str = "mixed", **load: Any) -> Member:
    made = Member(toy.ManualPort(name, 1, role, block_size=16, block_bytes=400_000), 0)
    made.load = Load(**load)
    return made


def test_a_burst_spreads(toy: Any) -> None:
    """Fault 35: load counted only when streams start, so 64 simultaneous requests went to one worker."""
    prefills = [member(toy, f"p{i}", "prefill") for i in range(4)]
    decodes = [member(toy, f"d{i}", "decode") for i in range(4)]
    router = Router(RouterConfig())
    decisions = []
    for _ in range(64):
        decision = router.route(Demand(500, 1, 100), prefills + decodes, {})
        assert decision is not None
        router.book(decision)
        decisions.append(decision)
    prefilled = Counter(d.prefill or d.decode for d in decisions)
    for role in (prefills, decodes):
        assert max(prefilled[m.peer] for m in role) - min(prefilled[m.peer] for m in role) <= 1
    assert prefilled[prefills[0].peer] >= prefilled[decodes[0].peer]  # which help only while nobody decodes there yet
    assert set(Counter(d.decode for d in decisions).values()) == {16}


def test_a_burst_with_one_system_prompt_computes_it_once(toy: Any) -> None:
    """Of 16 simultaneous requests with a shared prefix, one computes it; the others go where it is or will be."""
    p, d = member(toy, "p", "prefill"), member(toy, "d", "decode")
    router = Router(RouterConfig())
    hits: dict[Any, int] = {}
    computed = []
    for _ in range(16):
        decision = router.route(Demand(240, 1, 64), [p, d], hits)
        assert decision is not None
        assert decision.decode == d.peer
        router.book(decision)
        computed.append(decision.num_prefill_tokens)
        hits = {p.peer: 12, d.peer: 12}
    assert computed == [240] + 15 * [240 - 12 * 16]


def test_equal_groups_take_turns(toy: Any) -> None:
    """Without load to tell them apart, and when each request is over before the next comes."""
    members = [member(toy, f"m{i}") for i in range(3)]
    router = Router(RouterConfig(disaggregate="never"))
    picks = []
    for _ in range(9):
        decision = router.route(Demand(10, 1, 10), members, {})
        assert decision is not None
        router.book(decision).release()
        picks.append(decision.decode)
    assert picks[:3] * 3 == picks
    assert len(set(picks)) == 3


def test_short_and_cached_prompts_stay_on_the_decode_group(toy: Any) -> None:
    """Fault 41: shipping what is cheaper to compute in place."""
    p, d = member(toy, "p", "prefill"), member(toy, "d", "decode")
    router = Router(RouterConfig())
    short = router.route(Demand(10, 1, 50), [p, d], {})
    cached = router.route(Demand(1000, 1, 50), [p, d], {d.peer: 62})
    long = router.route(Demand(1000, 1, 50), [p, d], {})
    assert short is not None
    assert cached is not None
    assert long is not None
    assert (short.prefill, cached.prefill, long.prefill) == (None, None, p.peer)


def test_running_decodes_make_prefilling_beside_them_dear(toy: Any) -> None:
    p = member(toy, "p", "prefill", waiting_tokens=2000)
    router = Router(RouterConfig())
    for running, expected in ((0, None), (16, p.peer)):
        decision = router.route(Demand(400, 1, 50), [p, member(toy, "d", "decode", num_running=running)], {})
        assert decision is not None
        assert decision.prefill == expected, running


def test_one_token_goes_anywhere_whole(toy: Any) -> None:
    p, d = member(toy, "p", "prefill"), member(toy, "d", "decode", num_running=5)
    decision = Router(RouterConfig(disaggregate="always")).route(Demand(400, 1, 1), [p, d], {})
    assert decision is not None
    assert (decision.prefill, decision.decode, decision.num_decoding) == (None, p.peer, 0)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_no_group_of_a_role_means_slow_not_down(toy: Any, role: str) -> None:
    only = member(toy, "only", role)
    decision = Router(RouterConfig(disaggregate="always")).route(Demand(400, 1, 50), [only], {})
    assert decision is not None
    assert (decision.prefill, decision.decode) == (None, only.peer)


def test_rates_are_learned_and_lent_to_newcomers(toy: Any) -> None:
    """A newcomer with a pessimistic prior would never be chosen, so never measured."""
    a, b = member(toy, "a"), member(toy, "b")
    router = Router(RouterConfig(disaggregate="never"))
    router.observe(a.peer, Load(prefill_tokens_per_s=10_000, decode_step_s=0.001, num_running=1))
    decision = router.route(Demand(10_000, 1, 2), [a, b], {a.peer: 0})
    assert decision is not None
    assert decision.prefill_s == pytest.approx(1.0)
    router.book(decision)
    other = router.route(Demand(10_000, 1, 2), [a, b], {})
    assert other is not None
    assert other.decode != decision.decode
    for _ in range(100):
        router.observe(b.peer, Load(prefill_tokens_per_s=100))
    assert router.route(Demand(1000, 1, 2), [b], {}).prefill_s == pytest.approx(10.0)  # type: ignore[union-attr]
    router.forget(b.peer)
    assert router.route(Demand(1000, 1, 2), [b], {}).prefill_s == pytest.approx(0.1)  # type: ignore[union-attr]


def test_step_times_are_lent_to_newcomers(toy: Any) -> None:
    """Fault: a group that was added decodes nothing, because the prior is slower than what the others measured."""
    old, new = member(toy, "old"), member(toy, "new")
    router = Router(RouterConfig(disaggregate="never"))
    router.observe(old.peer, Load(decode_step_s=0.001, num_running=8))
    router.book(router.route(Demand(100, 8, 50), [old], {}))  # type: ignore[arg-type]
    decision = router.route(Demand(100, 1, 50), [old, new], {})
    assert decision is not None
    assert decision.decode == new.peer


def test_step_time_against_batch_is_fitted(toy: Any) -> None:
    router = Router(RouterConfig(disaggregate="never"))
    m = member(toy, "m")
    for i in range(200):
        batch = 1 + i % 16
        router.observe(m.peer, Load(num_running=batch, decode_step_s=0.010 + 0.001 * batch))
    base, slope = router.rates._step[m.peer].line(0.03)
    assert base == pytest.approx(0.010, rel=0.05)
    assert slope == pytest.approx(0.001, rel=0.05)


MEMBERS = st.lists(
    st.tuples(ROLES, st.sampled_from(["live", "unreachable", "abandoned", "draining"]), st.integers(0, 2000)),
    max_size=6,
)


@given(
    kinds=MEMBERS,
    demand=st.builds(Demand, st.integers(1, 2000), st.integers(1, 4), st.integers(1, 300)),
    hits=st.lists(st.integers(0, 60), min_size=6, max_size=6),
    avoid=st.sets(st.integers(0, 5)),
    policy=st.sampled_from(["auto", "always", "never"]),
)
@settings(max_examples=300, deadline=None)
def test_choices_are_sound(
    toy: Any, kinds: list[Any], demand: Demand, hits: list[int], avoid: set[int], policy: Any
) -> None:
    """Only routable groups, no transfer to itself or of nothing, avoided groups last, a choice if there is any."""
    members = []
    for i, (role, state, waiting) in enumerate(kinds):
        m = member(toy, f"m{i}", role, waiting_tokens=waiting, num_running=waiting // 100)
        m.draining = state == "draining"
        m.state = GroupState(state) if state != "draining" else GroupState.LIVE
        members.append(m)
    by_peer = {m.peer: m for m in members}
    avoided = {m.peer for i, m in enumerate(members) if i in avoid}
    router = Router(RouterConfig(disaggregate=policy))
    decision = router.route(
        demand, members, {m.peer: min(h, demand.num_tokens // 16) for m, h in zip(members, hits, strict=False)}, avoided
    )
    live = [m for m in members if m.routable]
    if not live:
        assert decision is None
        return
    assert decision is not None
    chosen = {p for p in (decision.prefill, decision.decode) if p is not None}
    assert all(by_peer[p].routable for p in chosen)
    if any(m.peer not in avoided for m in live):
        assert not chosen & avoided
    if decision.prefill is not None:
        assert decision.prefill != decision.decode
        assert demand.max_new_tokens > 1
        assert decision.hits.get(decision.decode, 0) < demand.num_tokens // 16
        assert by_peer[decision.prefill].info.role != "decode"
        assert by_peer[decision.decode].info.role != "prefill"
        assert policy != "never"
    assert decision.total_s >= 0
    booking = router.book(decision)
    router.check_invariants()
    booking.release()
    assert router.num_bookings == 0
    assert router.booked(decision.decode) == (0, 0)


@given(hits=st.lists(st.integers(0, 30), min_size=3, max_size=3), policy=st.sampled_from(["auto", "never"]))
@settings(deadline=None)
def test_more_hits_win_among_equals(toy: Any, hits: list[int], policy: Any) -> None:
    members = [member(toy, f"m{i}") for i in range(3)]
    known = {m.peer: h for m, h in zip(members, hits, strict=True)}
    decision = Router(RouterConfig(disaggregate=policy)).route(Demand(500, 1, 50), members, known)
    assert decision is not None
    assert known[decision.prefill or decision.decode] == max(hits)


@given(
    steps=st.lists(st.tuples(st.sampled_from(["book", "prefilled", "left", "move", "release"]), st.integers(0, 9))),
)
@settings(deadline=None)
def test_bookings_return_to_zero(toy: Any, steps: list[tuple[str, int]]) -> None:
    """Whatever order a placement's parts end in."""
    members = [member(toy, "p", "prefill"), member(toy, "d", "decode"), member(toy, "e", "decode")]
    router = Router(RouterConfig())
    bookings = []
    for what, i in steps:
        if what == "book":
            decision = router.route(Demand(100 + i, 1 + i % 3, 5), members, {})
            assert decision is not None
            bookings.append(router.book(decision))
        elif bookings:
            booking = bookings[i % len(bookings)]
            if what == "prefilled":
                booking.prefilled()
            elif what == "left":
                booking.sequence_left()
            elif what == "move":
                booking.move_decode(members[1 + i % 2].peer)
            else:
                booking.release()
        router.check_invariants()
    for booking in bookings:
        booking.release()
    router.check_invariants()
    assert router.num_bookings == 0
    assert all(router.booked(m.peer) == (0, 0) for m in members)


def test_behind_a_window_a_sequence_takes_no_more_than_its_window(toy: Any) -> None:
    """Fault: a sequence longer than the pool waits for ever at the gateway, though it needs few of its blocks."""
    plain, windowed = (
        Member(toy.ManualPort(g, 1, "decode", block_size=16, block_bytes=400_000, window=w), 0)
        for g, w in (("p", None), ("w", 64))
    )
    prefill = member(toy, "first", "prefill")
    router, demand = Router(RouterConfig()), Demand(1600, 2, 1)
    assert router.num_blocks(demand, plain) == 100 + 2
    assert router.num_blocks(demand, windowed) == 2 * 5
    shipped = [router.route_decode(demand, prefill, [m], {}) for m in (plain, windowed)]
    assert shipped[1].transfer_s < shipped[0].transfer_s / 5  # type: ignore[union-attr]


def test_the_fuller_of_two_block_groups_counts(toy: Any) -> None:
    """Fault: short sequences fill the pool of layers with a window long before the other, and none the wiser."""
    beside = WindowBlocks(num_blocks=50, max_held=5, block_bytes=100_000)
    port = toy.ManualPort("m", 1, "decode", block_size=16, block_bytes=400_000, num_blocks=200, beside=beside)
    mixed, router = Member(port, 0), Router(RouterConfig())
    assert router.num_blocks(Demand(32, 1, 1), mixed) == 3 * 200 // 50
    assert router.num_blocks(Demand(1600, 1, 1), mixed) == 101
    assert router.num_blocks(Demand(1600, 1, 1), mixed, 100) == 5 * 200 // 50
