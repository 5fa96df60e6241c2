"""The pools of all block groups behind one door, for those who know blocks by id or name only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvferry.runtime.ids import BlockHash, BlockId
from kvferry.runtime.kv.eviction import EvictionName
from kvferry.runtime.kv.groups import KVGroups
from kvferry.runtime.kv.pool import BlockPool


class Pools:
    """Implements `transfer.ledger.BlockStore`. `pools`: one for each group, in the groups' order."""

    def __init__(self, kv: KVGroups, eviction: EvictionName = "reuse") -> None:
        self.kv = kv
        self.pools = [BlockPool(g.num_blocks, kv.block_size, g.first_block, eviction) for g in kv.groups]

    def _of(self, block_id: BlockId) -> BlockPool:
        return self.pools[self.kv.index_of(block_id)]

    def group_of(self, block_id: BlockId) -> int:
        return self.kv.index_of(block_id)

    def lookup(self, block_hash: BlockHash) -> BlockId | None:
        found = (pool.lookup(block_hash) for pool in self.pools)
        return next((block_id for block_id in found if block_id is not None), None)

    def is_pending(self, block_hash: BlockHash) -> bool:
        return any(pool.is_pending(block_hash) for pool in self.pools)

    def num_pending(self, block_hash: BlockHash) -> int:
        return sum(pool.num_pending(block_hash) for pool in self.pools)

    def acquire(self, block_id: BlockId) -> None:
        self._of(block_id).acquire(block_id)

    def release(self, block_id: BlockId) -> None:
        self._of(block_id).release(block_id)

    def lease(self, count: int, group: int) -> list[BlockId]:
        return self.pools[group].lease(count)

    def begin_fill(
        self, block_id: BlockId, block_hash: BlockHash, parent: BlockHash | None, token_ids: Sequence[int]
    ) -> None:
        self._of(block_id).begin_fill(block_id, block_hash, parent, token_ids)

    def seal(self, block_id: BlockId) -> BlockId | None:
        return self._of(block_id).seal(block_id)

    def abandon(self, block_id: BlockId) -> None:
        self._of(block_id).abandon(block_id)

    def take_sealed(self) -> list[BlockHash]:
        return [block_hash for pool in self.pools for block_hash in pool.take_sealed()]

    def take_events(self) -> tuple[list[BlockHash], list[BlockHash]]:
        """Of the main group alone: how much of a prefix is here is told by it as well as by all."""
        events = [pool.take_events() for pool in self.pools]
        return events[0]

    def has_evicted(self) -> bool:
        """Whether the next `take_events` names blocks that vanished."""
        return self.pools[0].has_evicted()

    def free_blocks(self) -> list[BlockId]:
        """Those that hold nothing."""
        return [block_id for pool in self.pools for block_id in pool.free_blocks()]

    @property
    def num_leased(self) -> int:
        return sum(pool.num_leased for pool in self.pools)

    def check_invariants(self) -> None:
        for pool in self.pools:
            pool.check_invariants()

    def check_holders(self, held: Counter[BlockId]) -> None:
        """`held`: the references that all holders together say they have. Raises `InvariantBroken`."""
        for group, pool in enumerate(self.pools):
            pool.check_holders(Counter({b: n for b, n in held.items() if self.kv.index_of(b) == group}))
