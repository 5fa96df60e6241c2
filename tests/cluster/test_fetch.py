"""Prefixes that a peer holds: when they are fetched, what happens when they do not come, and what counts as cached."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.cluster.kv_events import KvEventLog
from kvferry.cluster.messages import Load
from kvferry.cluster.registry import Member
from kvferry.cluster.router import Demand, Router, RouterConfig
from kvferry.runtime.errors import NoFreeBlocks
from kvferry.runtime.ids import TransferId
from kvferry.runtime.kv.hashing import hash_chain, salted_root, tenant_salt
from kvferry.runtime.request import FinishReason
from kvferry.runtime.transfer.ticket import ExpectRequest, Received, Sent, Ticket, TransferEvent, TransferState
from tests.support.cluster_world import event, turns
from tests.support.toy_engine import ToyEngine, toy_address, toy_output, toy_request

pytestmark = pytest.mark.core
SIZE = 4


def member(toy: Any, name: str, role: str, **load: Any) -> Member:
    made = Member(toy.ManualPort(name, 1, role, block_size=16, block_bytes=400_000), 0)
    made.load = Load(**load)
    return made


# ---------------------------------------------------------------- what the router weighs
def test_fetching_is_weighed_against_computing(toy: Any) -> None:
    """A prefix is fetched over a link that is slower than the model, or computed beside a link that is not."""
    p, d = member(toy, "p", "prefill"), member(toy, "d", "decode", num_running=8)
    held = {d.peer: 60}
    demand = Demand(2000, 1, 50)
    fast, slow = Router(RouterConfig(prior_link_bytes_per_s=1e9)), Router(RouterConfig(prior_link_bytes_per_s=1e5))
    decision = fast.route(demand, [p, d], held, held=held)
    assert decision is not None
    assert decision.prefill == p.peer
    assert decision.fetch is not None
    assert (decision.fetch.source, decision.fetch.num_blocks) == (d.peer, 60)
    assert decision.num_prefill_tokens == 2000 - 60 * 16
    assert decision.total_s < fast.route(demand, [p, d], held).total_s  # type: ignore[union-attr]
    assert slow.route(demand, [p, d], held, held=held).fetch is None  # type: ignore[union-attr]


@pytest.mark.parametrize(("fetch_prefix", "fetched"), [("never", False), ("always", True)])
def test_fetching_can_be_forbidden_and_forced(toy: Any, fetch_prefix: Any, fetched: bool) -> None:
    m, other = member(toy, "m", "mixed"), member(toy, "other", "mixed")
    router = Router(RouterConfig(fetch_prefix=fetch_prefix, prior_link_bytes_per_s=1.0))
    decision = router.route(Demand(100, 1, 50), [m], {}, held={other.peer: 4})
    assert decision is not None
    assert (decision.fetch is not None) == fetched


def test_the_last_token_is_never_fetched(toy: Any) -> None:
    """A prompt of whole blocks is fetched to the end and then computed again, or nothing is left to draw from."""
    m, other = member(toy, "m", "mixed"), member(toy, "other", "mixed")
    decision = Router(RouterConfig(fetch_prefix="always")).route(Demand(64, 1, 50), [m], {}, held={other.peer: 4})
    assert decision is not None
    assert decision.fetch is not None
    assert (decision.fetch.num_blocks, decision.num_prefill_tokens) == (3, 16)
    full = Router(RouterConfig()).route(Demand(64, 1, 50), [m], {m.peer: 4})
    assert full is not None
    assert full.num_prefill_tokens == 16


def test_what_is_only_expected_is_not_fetched(toy: Any) -> None:
    """The source waits for blocks that it may never compute, and the request waits for the source."""

    async def main() -> None:
        async with toy.World(router=RouterConfig(fetch_prefix="always", disaggregate="never")) as w:
            a, b = w.up(toy.ManualPort("a", 1, "mixed")), w.up(toy.ManualPort("b", 2, "mixed"))
            chain = hash_chain(salted_root(toy.ROOT, ""), toy.request().prompt_token_ids, SIZE)
            w.index.expect(a.peer, chain, w.clock.now_ns(), w.clock.now_ns() + 10**12)
            assert w.index.longest_prefix(chain, w.clock.now_ns()) == {a.peer: 2}
            assert w.index.find(chain, w.clock.now_ns()).held == {}
            stream = w.coordinator.start(toy.request())
            await turns()
            assert not a.expects + b.expects
            await stream.aclose()

    toy.run(main())


# ---------------------------------------------------------------- one fetch
class Fetching:
    """`d` holds the prompt's first two blocks, `p` prefills: it must ask `d` for them."""

    def __init__(self, toy: Any, w: Any) -> None:
        self.w = w
        self.p, self.d = w.up(toy.ManualPort("p", 1, "prefill")), w.up(toy.ManualPort("d", 2, "decode"))
        request = toy.request(prompt=14, max_tokens=4)
        chain = hash_chain(salted_root(toy.ROOT, ""), request.prompt_token_ids, SIZE)
        log = KvEventLog()
        for block_hash in chain[:2]:
            log.stored(block_hash)
        w.index.apply(self.d.peer, 0, log.take())
        self.stream = w.coordinator.start(request)


def _world(toy: Any) -> Any:
    return toy.World(router=RouterConfig(fetch_prefix="always", disaggregate="always"))


def test_the_way_of_a_fetch(toy: Any) -> None:
    """The leg is submitted before room was asked for, so it never waits; or the ferry takes the fetch's name."""

    async def main() -> None:
        async with _world(toy) as w:
            case = Fetching(toy, w)
            await turns()
            p, d = case.p, case.d
            (asked, _), (leg,) = p.expects[0], p.submitted
            assert (asked.source.peer, asked.sealed_only, len(asked.token_ids)) == (d.peer, True, 2 * SIZE)
            assert leg.transfer_id == asked.transfer_id
            assert leg.sends_transfer_id is not None
            assert leg.sends_transfer_id != leg.transfer_id
            ticket = p.answer()
            await turns()
            assert d.tickets == [ticket]
            assert d.expects[0][0].transfer_id == leg.sends_transfer_id
            assert not d.expects[0][0].sealed_only
            ferry = d.answer(num_missing=1)
            await turns()
            done = toy.TransferEvent(
                transfer_id=ticket.transfer_id, attempt=ticket.attempt, state=toy.TransferState.COMPLETE, num_blocks=2
            )
            w.frame(p, transfers=[done])
            assert w.coordinator.open_transfers() == {ticket.transfer_id, ferry.transfer_id}
            w.frame(p, event(leg.key, 0, 7, FinishReason.HANDOFF, num_cached_tokens=8, begin_ns=1, end_ns=2))
            assert w.coordinator.open_transfers() == {ferry.transfer_id}
            (second,) = d.submitted
            w.frame(d, event(second.key, 1, 8, num_cached_tokens=12, begin_ns=3))
            for position in (2, 3):
                reason = FinishReason.LENGTH if position == 3 else None
                w.frame(d, event(second.key, position, 9, reason, num_cached_tokens=12))
            assert [e.token_id async for e in case.stream] == [7, 8, 9, 9]
            assert case.stream.usage.num_cached_tokens == 8, "fetched is cached, ferried is not"
            assert (w.coordinator.num_fetched_blocks, w.coordinator.num_hit_tokens) == (2, 8)
            assert w.coordinator.num_expected_hit_tokens == 8
            await w.settled()

    toy.run(main())


@pytest.mark.parametrize("what", ["no room", "source dies", "takes too long", "source lacks them", "client leaves"])
def test_a_fetch_that_fails_is_a_cache_miss(toy: Any, what: str) -> None:
    """The request waits for what will not come, fails with it, or leaves a lease behind."""

    async def main() -> None:
        async with _world(toy) as w:
            case = Fetching(toy, w)
            await turns()
            p, d = case.p, case.d
            (leg,) = p.submitted
            if what == "no room":
                p.refuse(NoFreeBlocks("full"))
            else:
                ticket = p.answer()
                await turns()
                assert d.tickets == [ticket]
            if what == "source dies":
                w.coordinator.on_group_down(d.peer, "killed")
            elif what == "source lacks them":
                failed = toy.TransferEvent(
                    transfer_id=ticket.transfer_id,
                    attempt=ticket.attempt,
                    state=toy.TransferState.FAILED,
                    reason="gone",
                )
                w.frame(d, transfers=[failed])
            elif what == "takes too long":
                for _ in range(60):
                    await w.clock.sleep(0.5)
                    w.frame(p), w.frame(d)
            elif what == "client leaves":
                await case.stream.aclose()
            await turns()
            assert leg.transfer_id in p.ended, "its lease is left to lapse"
            assert leg.transfer_id not in w.coordinator.open_transfers()
            if what != "client leaves":
                assert not p.cancelled, "the leg goes on and computes"
                w.frame(p, event(leg.key, 0, 0, FinishReason.STOP, begin_ns=1, end_ns=2))
                assert [e.token_id async for e in case.stream] == [0]
                assert case.stream.usage.num_cached_tokens == 0
            await w.settled()

    toy.run(main())


def test_a_source_that_lost_some_blocks_sends_the_others(toy: Any) -> None:
    """The destination waits for blocks that are gone, or both sides end a transfer whose other blocks are on their way.

    Only the source can know, and only of the present attempt.
    """

    async def main() -> None:
        async with _world(toy) as w:
            case = Fetching(toy, w)
            await turns()
            p, d = case.p, case.d
            ticket, (leg,) = p.answer(), p.submitted
            await turns()
            lacking = [ticket.missing[-1].hash]
            less = toy.TransferEvent(
                transfer_id=ticket.transfer_id,
                attempt=ticket.attempt,
                state=toy.TransferState.ACTIVE,
                reason="evicted",
                lacking=lacking,
            )
            w.frame(d, transfers=[msgspec.structs.replace(less, attempt=ticket.attempt + 1)])
            w.frame(p, transfers=[less])
            assert p.shortened == []
            w.frame(d, transfers=[less])
            assert p.shortened == [(ticket.transfer_id, lacking)]
            assert not p.ended + d.ended + d.shortened
            assert ticket.transfer_id in w.coordinator.open_transfers()
            done = toy.TransferEvent(
                transfer_id=ticket.transfer_id, attempt=ticket.attempt, state=toy.TransferState.COMPLETE, num_blocks=1
            )
            w.frame(p, transfers=[done])
            w.frame(p, event(leg.key, 0, 0, FinishReason.STOP, num_cached_tokens=SIZE, begin_ns=1, end_ns=2))
            w.frame(d, transfers=[less])
            assert p.shortened == [(ticket.transfer_id, lacking)], "it is over"
            assert [e.token_id async for e in case.stream] == [0]
            assert case.stream.usage.num_cached_tokens == SIZE
            assert (w.coordinator.num_fetched_blocks, w.coordinator.num_hit_tokens) == (1, SIZE)
            await w.settled()

    toy.run(main())


# ---------------------------------------------------------------- conversations
@pytest.mark.parametrize("disaggregate", ["auto", "always", "never"])
def test_the_next_turn_finds_prompt_and_answer(toy: Any, disaggregate: Any) -> None:
    """Blocks that decode filled are not found by the next turn, wherever it goes."""

    async def main() -> None:
        config = RouterConfig(fetch_prefix="always", disaggregate=disaggregate)
        async with toy.World(router=config) as w:
            for name in ("p", "q"):
                w.add(name, "prefill")
            for name in ("d", "e"):
                w.add(name, "decode")
            seed = toy.seed_where(lambda outs: len(outs[0]) == 20, max_tokens=20, prompt=21)
            first = toy.request(prompt=21, max_tokens=20, seed=seed)
            (answer,) = await toy.collect(w.coordinator.start(first), 1)
            await w.clock.sleep(0.5)
            prompt = [*first.prompt_token_ids, *answer, 7, 8, 9]
            second = msgspec.structs.replace(first, request_id="next", prompt_token_ids=prompt)
            stream = w.coordinator.start(second)
            assert await toy.collect(stream, 1) == toy.expected(second)
            assert stream.usage.num_cached_tokens == (21 + 20 - 1) // SIZE * SIZE
            await w.settled()

    toy.run(main())


def test_tenants_share_nothing(toy: Any) -> None:
    """A tenant learns from `cached_tokens`, or from a quick first token, what another one has asked."""

    async def main() -> None:
        async with toy.World(router=RouterConfig(fetch_prefix="always")) as w:
            w.add("p", "prefill"), w.add("d", "decode")
            found = {}
            for number, (tenant, salt) in enumerate(
                [("ann", ""), ("bob", ""), ("ann", "x"), ("bob", "x"), ("ann", "")]
            ):
                request = toy.request(f"r{number}", prompt=40, cache_salt=tenant_salt(tenant, salt))
                stream = w.coordinator.start(request)
                assert await toy.collect(stream, 1) == toy.expected(request)
                found[number] = stream.usage.num_cached_tokens
                await w.clock.sleep(0.2)
            assert [found[i] for i in range(4)] == [0, 0, 0, 0]
            assert found[4] == 39
            await w.settled()

    toy.run(main())


# ---------------------------------------------------------------- the engines' part
def _expect(destination: ToyEngine, prompt: list[int], sealed_only: bool) -> Ticket:
    wanted = ExpectRequest(
        transfer_id=TransferId("t"),
        attempt=1,
        source=toy_address("source", kv=destination.kv),
        token_ids=prompt,
        cache_salt="",
        timeout_s=9.0,
        sealed_only=sealed_only,
    )
    return destination.engine.expect(wanted, destination.clock())


def test_a_source_without_the_blocks_says_so_at_once() -> None:
    """What was evicted since it was routed is waited for until the lease lapses, as if somebody computed it."""
    source, destination = ToyEngine(name="source"), ToyEngine(name="destination")
    source.engine.send(_expect(destination, list(range(1, 13)), sealed_only=True), source.clock())
    (report,) = source.step().transfers
    assert report.state is TransferState.FAILED
    assert source.engine.audit().outbound == []


@given(
    num_lost=st.integers(0, 5),
    before=st.integers(0, 3),
    news=st.sampled_from(["first", "between", "last"]),
    windows=st.sampled_from([{}, {}, {"window": 6}, {"window": 6, "num_window_blocks": 12}]),
)
@settings(max_examples=120, deadline=None)
def test_what_a_source_has_left_is_fetched(num_lost: int, before: int, news: str, windows: dict[str, int]) -> None:
    """One evicted block costs all the others; a hole is taken for a prefix; the rest is waited for; a block leaks.

    `before`: blocks that the destination has already. `news`: when it hears what will not come.
    """
    source, destination = (ToyEngine(name=name, num_blocks=16, **windows) for name in ("source", "destination"))
    prompt = list(range(1, 21))
    for toy, count in ((source, 20), (destination, before * SIZE)):
        if count:
            toy.submit(toy_request("before", prompt[:count], 1))
            toy.run()
    pool = source.engine.pool
    for block_id in pool.lease(len(pool.free_blocks()) + num_lost):
        pool.release(block_id)
    source.engine.send(_expect(destination, prompt, sealed_only=True), source.clock())
    destination.submit(toy_request("r", [*prompt, 40], 3, transfer_id=TransferId("t")))
    reports = source.step().transfers
    sends, source.runner.sends = source.runner.sends, []
    tell_at = {"first": 0, "between": len(sends) // 2, "last": len(sends)}[news]
    for number in range(len(sends) + 1):
        for report in reports if number == tell_at else []:
            _pass_on(report, destination)
        for send, payload in sends[number : number + 1]:
            name = (send.transfer_id, send.attempt, send.seq)
            destination.runner.staged[name] = payload
            what = Received(*name, source.address.peer, 0, 0, send.hashes, send.destination_block_ids, len(payload))
            destination.engine.report(what)
            source.engine.report(Sent(*name, 0))
        destination.step()
    destination.run()
    source.run()
    truth = toy_output([*prompt, 40], 3, window=destination.kv.main.window)
    assert destination.tokens[toy_request("r", []).key] == truth
    if not windows:
        assert destination.engine.load().cached_tokens_total == max(before, 5 - num_lost) * SIZE
    for toy in (source, destination):
        audit = toy.engine.audit()
        assert (audit.broken, audit.inbound, audit.outbound, audit.num_leased_blocks) == ([], [], [], 0)


def _pass_on(report: TransferEvent, destination: ToyEngine) -> None:
    """What a coordinator does."""
    if report.state is TransferState.ACTIVE:
        destination.engine.shorten_transfer(report.transfer_id, report.attempt, report.lacking)
    else:
        destination.engine.end_transfer(report.transfer_id, report.attempt, report.reason)


@pytest.mark.parametrize("sealed_only", [True, False])
def test_who_prefills_waits_for_a_fetch_of_another(sealed_only: bool) -> None:
    """Two turns with one prefix: the second computes what is on its way. For a ferry's blocks it must not wait."""
    engine, prompt = ToyEngine(name="destination"), list(range(1, 13))
    _expect(engine, prompt, sealed_only)
    engine.submit(toy_request("r", [*prompt, 40], 1, sends_transfer_id=TransferId("other")))
    for _ in range(3):
        engine.step()
    assert bool(engine.tokens) != sealed_only
    engine.engine.end_transfer(TransferId("t"), 1, "given up")
    engine.run()
    assert list(engine.tokens.values()) == [toy_output([*prompt, 40], 1)]
    assert engine.engine.audit().num_leased_blocks == 0


# ---------------------------------------------------------------- what counts as cached
@pytest.mark.parametrize(("found_again", "cached"), [(4, 4), (14, 8)])
def test_what_a_resumed_request_computed_is_not_cached(toy: Any, found_again: int, cached: int) -> None:
    """The first leg's count stands although the next one had to compute more, or the next one finds its own work."""

    async def main() -> None:
        async with toy.World(router=RouterConfig(disaggregate="never")) as w:
            ports = {p.peer: p for p in (w.up(toy.ManualPort("a", 1, "mixed")), w.up(toy.ManualPort("b", 2, "mixed")))}
            stream = w.coordinator.start(toy.request(prompt=14, n=2, max_tokens=3))
            await turns()
            first = next(p for p in ports.values() if p.submitted)
            one, two = (s.key for s in first.submitted)
            w.frame(first, event(one, 0, 7, num_cached_tokens=8), event(two, 0, 8, num_cached_tokens=12))
            w.coordinator.on_group_down(first.peer, "killed")
            await turns()
            second = next(p for p in ports.values() if p is not first)
            for leg in second.submitted:
                w.frame(second, event(leg.key, 1, 9, num_cached_tokens=found_again))
                w.frame(second, event(leg.key, 2, 9, FinishReason.LENGTH, num_cached_tokens=found_again))
            async for _ in stream:
                pass
            assert stream.usage.num_cached_tokens == cached
            await w.settled()

    toy.run(main())


def test_what_a_moved_request_computed_is_not_cached(toy: Any) -> None:
    """The leg at the destination finds all of the prompt, which the source has computed for the same request."""

    async def main() -> None:
        async with toy.World(router=RouterConfig(disaggregate="never")) as w:
            groups = [w.add("d", "mixed"), w.add("e", "mixed")]
            seed = toy.seed_where(lambda outs: len(outs[0]) == 24, prompt=30, max_tokens=24)
            request = toy.request(prompt=30, max_tokens=24, seed=seed)
            stream = w.coordinator.start(request)
            collected = asyncio.ensure_future(toy.collect(stream, 1))
            await w.clock.sleep(0.2)
            source = next(group for group in groups if group.running)
            done = await w.coordinator.empty(source.peer, 5.0)
            assert done.num_moved == 1
            assert await collected == toy.expected(request)
            assert stream.usage.num_cached_tokens == 0
            await w.settled()

    toy.run(main())


def test_what_preemption_lost_is_not_cached() -> None:
    """A prefix that was found, evicted while the sequence waited again, and then computed still counts as cached."""
    toy = ToyEngine(num_blocks=8, block_size=4)
    prefix = list(range(1, 13))
    toy.submit(toy_request("warm", [*prefix, 40], 1))
    toy.run()
    toy.submit(toy_request("late", [*prefix, 41], 12, arrival_ns=2))
    toy.step()
    sequence = toy.engine.scheduler.running[0]
    assert sequence.num_cached == 12
    toy.engine.scheduler._preempt(sequence, 0)
    toy.submit(toy_request("big", list(range(20, 50)), 1, arrival_ns=1))
    toy.run()
    assert toy.tokens[sequence.key] == toy_output([*prefix, 41], 12)
    assert sequence.num_cached == 0
