"""Sliding windows: which blocks a sequence keeps, which prefix is a hit, what a transfer carries.

Guards against: memory that grows with a sequence past its window; a block given back that a later token reads; a hit
without the window before it; blocks ferried that nobody can see.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.runtime.ids import NO_BLOCK, BlockHash, TransferId
from kvferry.runtime.kv.groups import one_group
from kvferry.runtime.kv.hashing import hash_chain
from kvferry.runtime.kv.pools import Pools
from kvferry.runtime.kv.table import TableKeeper
from kvferry.runtime.sequence import Sequence
from kvferry.runtime.transfer.ticket import ExpectRequest
from tests.support.toy_engine import ROOT, ToyEngine, toy_address, toy_layout, toy_output, toy_request

pytestmark = pytest.mark.core
SIZE = 4
TOKENS = list(range(40))
CHAIN = hash_chain(ROOT, TOKENS, SIZE)


def visible(window: int | None, position: int) -> set[int]:
    """Blocks with a token that the one at `position` sees, itself left out."""
    first = 0 if window is None else max(0, position - window + 1)
    return {p // SIZE for p in range(first, position)}


@given(
    window=st.one_of(st.none(), st.integers(1, 50)),
    here=st.sets(st.integers(0, len(CHAIN) - 1)),
    coming=st.sets(st.integers(0, len(CHAIN) - 1)),
    length=st.integers(1, len(TOKENS)),
)
@settings(max_examples=300, deadline=None)
def test_the_longest_prefix_whose_window_is_here(
    window: int | None, here: set[int], coming: set[int], length: int
) -> None:
    """Against trying every length."""
    kv = one_group(toy_layout(SIZE), 32, window)
    if window is None:
        here = set(range(len(here)))  # parents outlive their children
    pools = Pools(kv)
    for i in sorted(here):
        (block_id,) = pools.lease(1, 0)
        named = kv.main.named(CHAIN, i)
        pools.begin_fill(block_id, named.hash, named.parent, TOKENS[i * SIZE : (i + 1) * SIZE])
        pools.seal(block_id)
    keeper = TableKeeper(kv.main, pools.pools[0], 64)
    sequence = Sequence(toy_request("r", TOKENS[:length]), ROOT, CHAIN[: length // SIZE], 1, 0)
    limit = (length - 1) // SIZE

    def naive(there: set[int]) -> int:
        return max(n for n in range(limit + 1) if visible(window, n * SIZE) <= there)

    found = keeper.find(sequence, limit)
    assert len(found) == naive(here)
    assert {i for i, block_id in enumerate(found) if block_id != NO_BLOCK} == visible(window, len(found) * SIZE)
    names = {kv.main.name(CHAIN[i]) for i in coming}
    assert keeper.reach(sequence, len(found), limit, names.__contains__) == naive(here | coming)


@pytest.mark.parametrize("window", [2, 5, 8, 9, 30])
@pytest.mark.parametrize("budget", [3, 16])
def test_memory_is_flat_once_past_the_window(window: int, budget: int) -> None:
    """Fault: a windowed sequence keeps what it cannot see."""
    toy = ToyEngine(num_blocks=200, window=window, max_batch_tokens=budget)
    toy.submit(toy_request("r", list(range(100)), 60))
    most = -(-window // SIZE) + 1
    while toy.engine.has_work():
        toy.step()
        leased = toy.engine.pool.num_leased
        assert leased <= most, "between steps"
        rows = toy.runner.plans[-1].rows
        used = len({b for row in rows for b in row.block_ids if b != NO_BLOCK})
        assert used <= most + -(-budget // SIZE), "in a step"
    assert next(iter(toy.tokens.values())) == toy_output(list(range(100)), 60, window=window)
    assert toy.engine.pool.num_sealed == 39, "what fell out of the window stays cached"


@given(window=st.integers(1, 20), extra=st.integers(0, 3), prompt=st.integers(1, 90), budget=st.integers(1, 20))
@settings(max_examples=60, deadline=None)
def test_a_pool_of_one_window_serves_any_length(window: int, extra: int, prompt: int, budget: int) -> None:
    """Fault: a sequence longer than the pool is refused, or waits for ever for blocks that it does not need."""
    num_blocks = -(-(window - 1) // SIZE) + 1 + extra
    toy = ToyEngine(num_blocks=num_blocks, window=window, max_batch_tokens=budget)
    tokens = [7 * i % 31 for i in range(prompt)]
    toy.submit(toy_request("a", tokens, 30))
    toy.submit(toy_request("b", tokens[::-1], 30, arrival_ns=1))
    for _ in range(3000):
        if not toy.engine.has_work():
            break
        toy.step()
        assert toy.engine.audit().broken == []
    for name, text in (("a", tokens), ("b", tokens[::-1])):
        assert toy.tokens[toy_request(name, text).key] == toy_output(text, 30, window=window)


def test_a_hit_needs_its_window_only() -> None:
    """Blocks before the window were evicted: a second turn hits all the same, and computes its own tokens only."""
    toy = ToyEngine(num_blocks=8, window=9, max_batch_tokens=64)
    first = list(range(40))
    toy.submit(toy_request("a", first, 1))
    toy.run()
    assert toy.engine.pool.lookup(CHAIN[0]) is None, "evicted"
    toy.runner.plans.clear()
    toy.submit(toy_request("b", [*first, 1, 2, 3], 1))
    toy.run()
    assert sum(plan.num_tokens for plan in toy.runner.plans) == 3
    assert toy.engine.load().cached_tokens_total == 40


def test_a_window_that_is_gone_is_computed_from_the_start() -> None:
    """Fault: its last block alone counts as a prefix, though the tokens after it see further back."""
    toy = ToyEngine(num_blocks=64, window=9, max_batch_tokens=64)
    toy.submit(toy_request("a", TOKENS, 1))
    toy.run()
    pool = toy.engine.pool
    last = pool.lookup(CHAIN[9])
    assert last is not None
    pool.acquire(last)
    while pool.lookup(CHAIN[8]) is not None:  # the other one of its window
        pool._evict()
    pool.release(last)
    toy.submit(toy_request("b", [*TOKENS, 1], 2))
    toy.run()
    assert toy.engine.load().cached_tokens_total == 0
    assert toy.tokens[toy_request("b", []).key] == toy_output([*TOKENS, 1], 2, window=9)


@pytest.mark.parametrize(("window", "num_window_blocks", "shipped"), [(9, None, 2), (9, 30, 12), (None, None, 10)])
def test_a_transfer_carries_what_is_seen(window: int | None, num_window_blocks: int | None, shipped: int) -> None:
    """Fault: blocks that fell out of every window are expected, waited for and sent."""
    options = {"window": window, "num_window_blocks": num_window_blocks}
    prefill, decode = ToyEngine(name="prefill", **options), ToyEngine(name="decode", **options)
    wanted = ExpectRequest(
        transfer_id=TransferId("t"),
        attempt=1,
        source=prefill.address,
        token_ids=TOKENS,
        cache_salt="",
        timeout_s=60,
    )
    ticket = decode.engine.expect(wanted, decode.clock())
    assert len(ticket.missing) == shipped == decode.engine.pools.num_leased
    prefill.submit(toy_request("r", TOKENS, 4, handoff_after=1, sends_transfer_id=TransferId("t")))
    prefill.engine.send(ticket, prefill.clock())
    prefill.run()
    sends = [send for send, _ in prefill.runner.sends]
    assert sum(len(send.hashes) for send in sends) == shipped
    kv = prefill.kv
    assert all(len({kv.index_of(b) for b in send.source_block_ids}) == 1 for send in sends), "of one block group each"


def test_sharers_of_a_windowed_prefix_wait_for_its_maker() -> None:
    """Fault: sequences behind a window lease chunk by chunk, so nothing tells a sharer what is about to be filled."""
    for options in ({"window": 9}, {"window": 9, "num_window_blocks": 100}):
        toy = ToyEngine(num_blocks=200, max_batch_tokens=10, max_sequences=16, **options)
        system = list(range(48))
        for i in range(4):
            toy.submit(toy_request(f"r{i}", [*system, i, i], 1, arrival_ns=i))
        toy.run()
        assert sum(plan.num_tokens for plan in toy.runner.plans) == 48 + 4 * 2
        assert toy.engine.load().cached_tokens_total == 3 * 48


def test_groups_of_another_window_do_not_match() -> None:
    kinds = [toy_address("a", kv=ToyEngine(**kv).kv).fingerprint for kv in ({}, {"window": 8}, {"window": 9})]
    assert len(set(kinds)) == 3
    assert BlockHash(kinds[0]) == toy_layout().fingerprint, "without windows as ever"
