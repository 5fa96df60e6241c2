"""The block pool against a twin that keeps plain sets and recomputes everything.

Guards against: a block lent twice, a held or parent block evicted, a hit on a block that nobody filled, lost blocks.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvferry.runtime.errors import InvariantBroken, NoFreeBlocks
from kvferry.runtime.ids import BlockHash, BlockId
from kvferry.runtime.kv.hashing import hash_block
from kvferry.runtime.kv.pool import BlockPool

pytestmark = pytest.mark.core
SIZE = 2
NUM_BLOCKS = 6
ROOT = b"r" * 16


class PoolMachine(RuleBasedStateMachine):
    """`held` lists references one by one; `sealed` maps hash to (block, parent, tokens); recency is a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, SIZE)
        self.held: list[BlockId] = []
        self.filling: dict[BlockId, tuple[BlockHash, BlockHash | None, list[int]]] = {}
        self.sealed: dict[BlockHash, tuple[BlockId, BlockHash | None, list[int]]] = {}
        self.recent: list[BlockHash] = []
        self.told: set[BlockHash] = set()

    def _in_use(self) -> set[BlockId]:
        """What is held, with all ancestors: a held block holds its parent."""
        used = set(self.held)
        for _ in range(NUM_BLOCKS):
            used |= {self.sealed[p][0] for b, p, _ in self.sealed.values() if b in used and p is not None}
        return used

    def _use(self, block_hash: BlockHash) -> None:
        if block_hash in self.recent:
            self.recent.remove(block_hash)
        self.recent.append(block_hash)

    def _settle(self) -> None:
        """Applies the pool's own account of evictions to the twin, checking that each was allowed."""
        stored, removed = self.pool.take_events()
        for block_hash in removed:
            evictable = [
                h
                for h in self.recent
                if h in self.sealed
                and self.sealed[h][0] not in self._in_use()
                and not any(parent == h for _, parent, _ in self.sealed.values())
            ]
            assert block_hash == evictable[0], "not the least recently used idle leaf"
            del self.sealed[block_hash]
            self.recent.remove(block_hash)
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
        elif parent is not None and parent not in self.sealed:
            assert result is None
            return
        else:
            assert result == block
            self.sealed[block_hash] = (block, parent, tokens)
        assert result is not None
        self.held.append(result)
        self._use(block_hash)
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
        self._use(block_hash)

    @precondition(lambda self: [b for b in self.held if b not in self.filling])
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted({b for b in self.held if b not in self.filling})))
        self.pool.release(block)
        self.held.remove(block)
        for block_hash, (b, _, _) in self.sealed.items():
            if b == block and block not in self.held:
                self._use(block_hash)

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


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
