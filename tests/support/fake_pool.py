"""A block pool that is nothing but dictionaries."""

from __future__ import annotations

from collections import Counter

from kvferry.runtime.errors import NoFreeBlocks
from kvferry.runtime.ids import BlockHash, BlockId


class FakePool:
    def __init__(self, num_blocks: int) -> None:
        self.free = [BlockId(i) for i in range(num_blocks)]
        self.references: Counter[BlockId] = Counter()
        self.sealed: dict[BlockHash, BlockId] = {}
        self.pending: dict[BlockId, BlockHash] = {}
        self.parents: dict[BlockId, BlockHash | None] = {}

    def lookup(self, block_hash: BlockHash) -> BlockId | None:
        return self.sealed.get(block_hash)

    def is_pending(self, block_hash: BlockHash) -> bool:
        return block_hash in self.pending.values()

    def acquire(self, block_id: BlockId) -> None:
        assert block_id in self.sealed.values()
        self.references[block_id] += 1

    def release(self, block_id: BlockId) -> None:
        assert self.references[block_id] > 0, f"block {block_id} is released once too often"
        self.references[block_id] -= 1
        if not self.references[block_id]:
            del self.references[block_id]
            assert block_id not in self.pending
            if block_id not in self.sealed.values():
                self.free.append(block_id)

    def evict(self) -> None:
        for block_hash, block_id in list(self.sealed.items()):
            if block_id not in self.references:
                del self.sealed[block_hash]
                self.free.append(block_id)

    def group_of(self, block_id: BlockId) -> int:
        return 0

    def lease(self, count: int, group: int = 0) -> list[BlockId]:
        if count > len(self.free):
            idle = sum(block_id not in self.references for block_id in self.sealed.values())
            if count > len(self.free) + idle:
                raise NoFreeBlocks("full")
            self.evict()
        leased = [self.free.pop(0) for _ in range(count)]
        self.references.update(leased)
        return leased

    def begin_fill(
        self, block_id: BlockId, block_hash: BlockHash, parent: BlockHash | None, token_ids: list[int]
    ) -> None:
        assert self.references[block_id] == 1
        assert block_id not in self.pending
        assert token_ids == [block_hash[0]], "the tokens of another block"
        self.pending[block_id] = block_hash
        self.parents[block_id] = parent

    def seal(self, block_id: BlockId) -> BlockId | None:
        block_hash = self.pending.pop(block_id)
        parent = self.parents.pop(block_id)
        if block_hash not in self.sealed and parent is not None and parent not in self.sealed:
            self.release(block_id)
            return None
        canonical = self.sealed.setdefault(block_hash, block_id)
        if canonical != block_id:
            self.references[canonical] += 1
            self.release(block_id)
        return canonical

    def abandon(self, block_id: BlockId) -> None:
        del self.pending[block_id], self.parents[block_id]
        self.release(block_id)

    def compute(self, block_hash: BlockHash) -> None:
        """Someone else fills that block and lets it go; also while it is being received."""
        if block_hash not in self.sealed and self.free:
            (block_id,) = self.lease(1)
            self.sealed[block_hash] = block_id
            self.release(block_id)
