"""The block pool against a twin that keeps plain sets and recomputes everything.

Guards against: a block lent twice, a held or parent block evicted, a hit on a block that nobody filled, lost blocks, a
victim that is not the one its policy names.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvferry.runtime.errors import InvariantBroken, NoFreeBlocks
from kvferry.runtime.ids import BlockHash, BlockId
from kvferry.runtime.kv.eviction import HEAD_START, MAX_REUSES, EvictionName
from kvferry.runtime.kv.hashing import hash_block
from kvferry.runtime.kv.pool import BlockPool

pytestmark = pytest.mark.core
SIZE = 2
NUM_BLOCKS = 6
ROOT = b"r" * 16


class PoolMachine(RuleBasedStateMachine):
    """`held` lists references one by one; `sealed` maps hash to (block, parent, tokens)."""

    eviction: EvictionName = "reuse"

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, SIZE, eviction=self.eviction)
        self.held: list[BlockId] = []
        self.filling: dict[BlockId, tuple[BlockHash, BlockHash | None, list[int]]] = {}
        self.sealed: dict[BlockHash, tuple[BlockId, BlockHash | None, list[int]]] = {}
        self.uses: list[BlockHash] = []
        """All of them, the newest last."""
        self.found: dict[BlockHash, int] = {}
        self.gone: list[BlockHash] = []
        """Evicted ones that are remembered, the newest last."""
        self.told: set[BlockHash] = set()

    def _in_use(self) -> set[BlockId]:
        """What is held, with all ancestors: a held block holds its parent."""
        used = set(self.held)
        for _ in range(NUM_BLOCKS):
            used |= {self.sealed[p][0] for b, p, _ in self.sealed.values() if b in used and p is not None}
        return used

    def _find(self, block_hash: BlockHash) -> None:
        self.found[block_hash] = min(MAX_REUSES, self.found.get(block_hash, 0) + 1)
        self.uses.append(block_hash)

    def _rank(self, block_hash: BlockHash) -> int:
        last_use = max(i for i, used in enumerate(self.uses) if used == block_hash)
        head_start = HEAD_START * NUM_BLOCKS * self.found.get(block_hash, 0)
        return last_use + (head_start if self.eviction == "reuse" else 0)

    def _let_go(self, block: BlockId) -> None:
        """Its last holder has, and so does everything above it that only it held."""
        for block_hash, (b, parent, _) in self.sealed.items():
            if b == block and block not in self._in_use():
                self.uses.append(block_hash)
                if parent is not None:
                    self._let_go(self.sealed[parent][0])
                return

    def _settle(self) -> None:
        """Applies the pool's own account of evictions to the twin, checking that each was allowed."""
        stored, removed = self.pool.take_events()
        for block_hash in removed:
            evictable = [
                h
                for h in self.sealed
                if self.sealed[h][0] not in self._in_use()
                and not any(parent == h for _, parent, _ in self.sealed.values())
            ]
            assert block_hash == min(evictable, key=self._rank), "not the idle leaf with the lowest rank"
            del self.sealed[block_hash]
            self.gone.append(block_hash)
            for forgotten in self.gone[:-NUM_BLOCKS]:
                self.gone.remove(forgotten)
                self.found.pop(forgotten, None)
        self.told |= set(stored)
        self.told -= set(removed)

    @rule(count=st.integers(1, 4))
    def lease(self, count: int) -> None:
        used = self._in_use()
        idle = sum(b not in used for b, _, _ in self.sealed.values())
        free = NUM_BLOCKS - len(used) - idle
        try:
            blocks = self.pool.lease(count)
        except NoFreeBlocks:
            assert count > free + idle
            assert not self.pool.take_events()[1]
            return
        assert count <= free + idle
        self._settle()
        assert not set(blocks) & set(self.held)
        assert not set(blocks) & {b for b, _, _ in self.sealed.values()}
        self.held += blocks

    def _open(self) -> list[BlockId]:
        in_cache = {b for b, _, _ in self.sealed.values()}
        return [b for b in self.held if b not in in_cache and b not in self.filling]

    @precondition(lambda self: self._open())
    @rule(data=st.data())
    def begin_fill(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self._open()))
        parents = [h for h, (b, _, _) in self.sealed.items() if b in self.held]
        parent = data.draw(st.sampled_from([None, *parents]))
        tokens = data.draw(st.lists(st.integers(0, 1), min_size=SIZE, max_size=SIZE))
        block_hash = hash_block(ROOT, parent, tokens)
        self.pool.begin_fill(block, block_hash, parent, tokens)
        self.filling[block] = (block_hash, parent, tokens)

    @precondition(lambda self: self.filling)
    @rule(data=st.data())
    def seal(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.filling)))
        block_hash, parent, tokens = self.filling.pop(block)
        result = self.pool.seal(block)
        self.held.remove(block)
        if block_hash in self.sealed:
            assert result == self.sealed[block_hash][0]
            self._find(block_hash)
        elif parent is not None and parent not in self.sealed:
            assert result is None
            return
        else:
            assert result == block
            self.sealed[block_hash] = (block, parent, tokens)
            if parent is not None:
                self.uses.append(parent)
            if block_hash in self.gone:
                self.gone.remove(block_hash)
                self._find(block_hash)
            else:
                self.uses.append(block_hash)
        assert result is not None
        self.held.append(result)
        self._settle()

    @precondition(lambda self: self.filling)
    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.filling)))
        del self.filling[block]
        self.held.remove(block)
        self.pool.abandon(block)

    @precondition(lambda self: self.sealed)
    @rule(data=st.data())
    def acquire(self, data: st.DataObject) -> None:
        block_hash = data.draw(st.sampled_from(sorted(self.sealed)))
        block = self.sealed[block_hash][0]
        self.pool.acquire(block)
        self.held.append(block)
        self._find(block_hash)

    @precondition(lambda self: [b for b in self.held if b not in self.filling])
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted({b for b in self.held if b not in self.filling})))
        self.pool.release(block)
        self.held.remove(block)
        self._let_go(block)

    @rule(tokens=st.lists(st.integers(0, 1), min_size=SIZE, max_size=SIZE))
    def release_of_a_free_block_is_refused(self, tokens: list[int]) -> None:
        free = set(range(NUM_BLOCKS)) - self._in_use()
        for block in list(free)[:1]:
            with pytest.raises(InvariantBroken):
                self.pool.release(BlockId(block))

    @invariant()
    def agrees(self) -> None:
        self.pool.check_invariants()
        assert self.pool.num_leased == len(self._in_use())
        assert set(self.pool.hashes()) == set(self.sealed)
        for block_hash, (block, _, tokens) in self.sealed.items():
            assert self.pool.lookup(block_hash, tokens) == block
            assert self.pool.lookup(block_hash, [9, 9]) is None
        for block_hash, _, _ in self.filling.values():
            assert self.pool.is_pending(block_hash)
            assert block_hash in self.sealed or self.pool.lookup(block_hash) is None
        self.told |= set(self.pool.take_events()[0])
        assert self.told == set(self.sealed), "events do not add up to the cache"

    def teardown(self) -> None:
        for block in list(self.filling):
            self.abandon_all(block)
        for block in list(self.held):
            self.pool.release(block)
        self.pool.check_invariants()
        assert self.pool.num_leased == 0

    def abandon_all(self, block: BlockId) -> None:
        del self.filling[block]
        self.held.remove(block)
        self.pool.abandon(block)


class LruMachine(PoolMachine):
    eviction = "lru"


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestLruPool = LruMachine.TestCase
TestLruPool.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def test_memory_that_was_used_is_used_again_first() -> None:
    """A worker touches the whole pool though few of its blocks are ever in use: pages that nobody needs."""
    pool = BlockPool(8, SIZE)
    first = pool.lease(3)
    for block in first:
        pool.release(block)
    kept = pool.lease(2)
    pool.begin_fill(kept[0], hash_block(ROOT, None, [1, 2]), None, [1, 2])
    assert pool.seal(kept[0]) == kept[0]
    pool.release(kept[0])  # cached: goes last of all
    used = pool.lease(2)
    assert {*kept, used[0]} == set(first)
    assert used[1] not in first, "a cached block was given away while free ones were left"
