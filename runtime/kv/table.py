"""Which blocks a sequence holds in one block group, and what becomes of them as it runs.

    index   0 … num_dropped … num_sealed … num_announced … len(block_ids)
             NO_BLOCK    │ sealed    │ being filled  │ to be filled by decode

Nothing is dropped without a window. With one, blocks are leased as chunks need them, not all at admission, so memory
stays flat however long the sequence is.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

from kvferry.runtime.errors import InvariantBroken
from kvferry.runtime.ids import NO_BLOCK, BlockHash, BlockId
from kvferry.runtime.kv.groups import BlockGroup
from kvferry.runtime.kv.pool import BlockPool
from kvferry.runtime.sequence import BlockTable, Sequence
from kvferry.runtime.step import make_table


class TableKeeper:
    """All tables of one group. `max_chunk`: tokens that one step computes at most."""

    def __init__(self, group: BlockGroup, pool: BlockPool, max_chunk: int) -> None:
        self.group = group
        self.pool = pool
        self._size = group.layout.block_size
        self._max_held = None
        if group.max_held is not None:
            self._max_held = min(group.max_held + self._num_blocks(max_chunk), group.num_blocks)

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._size)

    # ------------------------------------------------------------- admission
    def find(self, sequence: Sequence, limit: int) -> list[BlockId]:
        """The table of the longest prefix of at most `limit` blocks that is here."""
        if self.group.window is not None:
            return self._find_window(limit, lambda index: self._lookup(sequence, index))
        hits: list[BlockId] = []
        size = self._size
        for index, block_hash in enumerate(sequence.hashes[:limit]):
            block_id = self.pool.lookup(block_hash, sequence.tokens[index * size : (index + 1) * size])
            if block_id is None:
                break
            hits.append(block_id)
        return hits

    def reach(self, sequence: Sequence, begin: int, limit: int, comes: Callable[[BlockHash], bool]) -> int:
        """Blocks of the longest prefix, if all that is on its way were here. `begin`: so many surely are."""

        def lookup(index: int) -> BlockId | None:
            block_id = self._lookup(sequence, index)
            return NO_BLOCK if block_id is None and comes(self._name(sequence, index)) else block_id

        if self.group.window is not None:
            return len(self._find_window(limit, lookup))
        return next((index for index in range(begin, limit) if lookup(index) is None), limit)

    def _find_window(self, limit: int, lookup: Callable[[int], BlockId | None]) -> list[BlockId]:
        """From the end: what lies before the window of the token after it may be gone."""
        hits: list[BlockId] = []
        end = index = limit
        while index > self.group.first_needed(end * self._size):
            index -= 1
            block_id = lookup(index)
            if block_id is None:
                end = index
                hits.clear()
            else:
                hits.append(block_id)
        return [NO_BLOCK] * index + hits[::-1]

    def _name(self, sequence: Sequence, index: int) -> BlockHash:
        return self.group.name(sequence.hashes[index])

    def _lookup(self, sequence: Sequence, index: int) -> BlockId | None:
        tokens = sequence.tokens[index * self._size : (index + 1) * self._size]
        return self.pool.lookup(self._name(sequence, index), tokens)

    def acquire(self, hits: list[BlockId]) -> None:
        for block_id in hits:
            if block_id != NO_BLOCK:
                self.pool.acquire(block_id)

    def release(self, block_ids: SequenceOf[BlockId]) -> None:
        """Children first: they are evicted before their parents."""
        for block_id in reversed(block_ids):
            if block_id != NO_BLOCK:
                self.pool.release(block_id)

    def num_wanted(self, sequence: Sequence, hits: list[BlockId]) -> int:
        """Blocks besides `hits`, which it holds, that it needs until its known tokens are computed.

        Behind a window it gives some back meanwhile, but that makes no room where others hold them too (seed 5946).
        """
        fresh = self._num_blocks(len(sequence.tokens)) - len(hits)
        if self._max_held is None:
            return fresh
        return max(1, min(fresh, self._max_held - self._num_alone(hits)))

    def num_growing(self, running: list[Sequence], place: int) -> int:
        """Blocks that running sequences may soon ask for; `place`: of this group's table."""
        if self._max_held is None:
            return len(running)
        return sum(self._num_growing(sequence, sequence.tables[place]) for sequence in running)

    def _num_growing(self, sequence: Sequence, table: BlockTable) -> int:
        assert self._max_held is not None
        if sequence.num_uncomputed <= 1:
            return 1
        left = self._num_blocks(len(sequence.tokens)) - table.num_dropped
        return max(1, min(left - table.num_held, self._max_held - self._num_alone(table.block_ids)))

    def _num_alone(self, block_ids: SequenceOf[BlockId]) -> int:
        return self.pool.num_alone([block_id for block_id in block_ids if block_id != NO_BLOCK])

    def open(self, sequence: Sequence, table: BlockTable, hits: list[BlockId]) -> None:
        """Begins a table with references taken before; leases the rest at once unless there is a window."""
        table.block_ids = make_table(hits)
        table.num_sealed = table.num_announced = len(hits)
        table.num_dropped = next((i for i, block_id in enumerate(hits) if block_id != NO_BLOCK), len(hits))
        if self.group.window is None:
            self.extend(sequence, table, len(sequence.tokens))

    # ------------------------------------------------------------- running
    def extend(self, sequence: Sequence, table: BlockTable, num_tokens: int) -> int:
        """Leases what is lacking for so many tokens, as far as there are blocks. Returns how many are covered."""
        lacking = self._num_blocks(num_tokens) - len(table.block_ids)
        if lacking > 0 and (count := min(lacking, self.pool.num_available)):
            table.block_ids.extend(self.pool.lease(count))
            while table.num_announced < min(len(table.block_ids), len(sequence.hashes)):
                self._announce(sequence, table)
        return len(table.block_ids) * self._size

    def _announce(self, sequence: Sequence, table: BlockTable) -> None:
        index = table.num_announced
        named = self.group.named(sequence.hashes, index)
        tokens = sequence.tokens[index * self._size : (index + 1) * self._size]
        self.pool.begin_fill(table.block_ids[index], named.hash, named.parent, tokens)
        table.num_announced += 1

    def computed(self, sequence: Sequence, table: BlockTable) -> None:
        """Seals what is full, and lets go of what nobody reads after it. `sequence.hashes` names all full blocks.

        What the token after the last full block sees is kept, so that all full blocks stay a prefix to resume from.
        """
        num_full = sequence.num_computed // self._size
        for index in range(table.num_sealed, num_full):
            if index == table.num_announced:  # filled by decode, so not announced before
                self._announce(sequence, table)
            canonical = self.pool.seal(table.block_ids[index])
            if canonical is None:
                raise InvariantBroken(f"{sequence.key}: block {index} filled while its parent is not here")
            table.block_ids[index] = canonical
            table.num_sealed = index + 1
        for index in range(table.num_dropped, self.group.first_needed(num_full * self._size)):
            self.pool.release(table.block_ids[index])
            table.block_ids[index] = NO_BLOCK
            table.num_dropped = index + 1

    def shorten(self, table: BlockTable, num_tokens: int) -> None:
        """Gives back blocks that so many tokens do not need; they were leased for drafts and hold nothing of use."""
        num_blocks = self._num_blocks(num_tokens)
        for block_id in table.block_ids[num_blocks:]:
            self.pool.release(block_id)
        del table.block_ids[num_blocks:]

    def check(self, sequence: Sequence, table: BlockTable) -> str | None:
        """What is wrong with it."""
        num_full = sequence.num_computed // self._size
        ids, first = table.block_ids, self.group.first_needed(num_full * self._size)
        rules = {
            "a table is too short": len(ids) * self._size >= sequence.num_computed,
            "a table is longer than its tokens": (len(ids) - 1) * self._size < len(sequence.tokens),
            "a full block is not sealed": table.num_sealed == num_full,
            "a block is gone that is needed": NO_BLOCK not in ids[first:],
            "a block is kept that nobody needs": all(block_id == NO_BLOCK for block_id in ids[:first]),
            "dropped blocks are miscounted": table.num_dropped == sum(block_id == NO_BLOCK for block_id in ids),
        }
        return next((words for words, holds in rules.items() if not holds), None)
