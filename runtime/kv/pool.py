"""Who holds which block.

            lease                begin_fill              seal                   release (last)
    free ──────────▶ leased ──────────────▶ pending ──────────────▶ sealed, held ──────────────▶ sealed, idle
     ▲                  │ release              │ abandon                 ▲  acquire                  │  │
     └──────────────────┴──────────────────────┘                         └───────────────────────────┘  │
     ▲                                                                     evict: the leaf of lowest rank (eviction.py)
     └──────────────────────────────────────────────────────────────────────────────────────────────────┘

Only sealed blocks are visible to `lookup`. A parent outlives its children, so a cached prefix is found by walking
forward; a held block holds its parent, so idle blocks always include an idle leaf. A block is reusable only with all
references gone; whoever holds a reference may read it.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Sequence

import msgspec

from kvferry.runtime.errors import InvariantBroken, NoFreeBlocks
from kvferry.runtime.ids import BlockHash, BlockId
from kvferry.runtime.kv.eviction import EvictionName, make_eviction


class _Content(msgspec.Struct):
    """What a pending or sealed block holds."""

    hash: BlockHash
    parent: BlockHash | None
    token_ids: list[int]
    sealed: bool = False
    num_children: int = 0
    """Sealed blocks that follow this one."""
    rank: int = 0
    """Idle leaves go in this order."""


class BlockPool:
    """The blocks of one group of layers; the same numbers on each rank. Ids count from `first_block`."""

    def __init__(
        self, num_blocks: int, block_size: int, first_block: int = 0, eviction: EvictionName = "reuse"
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._eviction = make_eviction(eviction, num_blocks)
        self._ids = range(first_block, first_block + num_blocks)
        self._free: deque[BlockId] = deque(map(BlockId, self._ids))
        """The next one first: what was used before goes before blocks whose memory nobody has touched yet."""
        self._refs = [0] * self._ids.stop
        self._content: list[_Content | None] = [None] * self._ids.stop
        self._sealed: dict[BlockHash, BlockId] = {}
        self._pending: dict[BlockHash, int] = {}
        self._num_idle = 0
        self._heap: list[tuple[int, BlockId]] = []
        self._news: dict[BlockHash, bool] = {}
        """Net changes of what is visible since the last `take_events`: True appeared, False vanished."""
        self._sealed_news: list[BlockHash] = []

    # ------------------------------------------------------------- views
    @property
    def num_available(self) -> int:
        """Blocks that `lease` could give: free or idle."""
        return len(self._free) + self._num_idle

    @property
    def num_sealed(self) -> int:
        return len(self._sealed)

    @property
    def num_leased(self) -> int:
        """Blocks that somebody holds."""
        return self.num_blocks - self.num_available

    def free_blocks(self) -> list[BlockId]:
        """Those that hold nothing; the simulator poisons them."""
        return list(self._free)

    def hashes(self) -> list[BlockHash]:
        """All that `lookup` would find."""
        return list(self._sealed)

    def lookup(self, block_hash: BlockHash, token_ids: Sequence[int] | None = None) -> BlockId | None:
        """The sealed block of that name; with `token_ids`, only if it holds just these."""
        block_id = self._sealed.get(block_hash)
        if block_id is not None and token_ids is not None and self._get(block_id).token_ids != list(token_ids):
            return None
        return block_id

    def is_pending(self, block_hash: BlockHash) -> bool:
        """Whether somebody is filling a block of that name right now."""
        return block_hash in self._pending

    def num_pending(self, block_hash: BlockHash) -> int:
        """How many blocks of that name are being filled."""
        return self._pending.get(block_hash, 0)

    def num_to_hold(self, hashes: Sequence[BlockHash]) -> int:
        """Available blocks that holding all of `hashes` takes: what is held or being filled takes none."""
        held = (h in self._pending or ((b := self._sealed.get(h)) is not None and self._refs[b] > 0) for h in hashes)
        return len(hashes) - sum(held)

    def num_alone(self, held: Sequence[BlockId]) -> int:
        """Of held blocks, those that nobody else holds: letting go of them makes room."""
        return sum(self._refs[block_id] == 1 for block_id in held)

    # ------------------------------------------------------------- holding
    def lease(self, count: int) -> list[BlockId]:
        """`count` blocks with one reference each and undefined contents; evicts idle ones as needed.

        Raises `NoFreeBlocks` and changes nothing.
        """
        if count > self.num_available:
            raise NoFreeBlocks(
                f"{count} KV blocks wanted, {self.num_available} of {self.num_blocks} available; "
                "wait for running sequences, or give the cache more memory (--kv-memory)"
            )
        while len(self._free) < count:
            self._evict()
        blocks = [self._free.popleft() for _ in range(count)]
        for block_id in blocks:
            self._refs[block_id] = 1
        return blocks

    def acquire(self, block_id: BlockId) -> None:
        """One more reference on a sealed block."""
        content = self._get(block_id)
        if not content.sealed:
            raise InvariantBroken(f"block {block_id} acquired while it is not sealed")
        content.rank = self._eviction.found(content.hash)
        self._hold(block_id, content)

    def _hold(self, block_id: BlockId, content: _Content) -> None:
        while True:
            self._refs[block_id] += 1
            if self._refs[block_id] > 1:
                return
            self._num_idle -= 1
            if content.parent is None:
                return
            block_id = self._sealed[content.parent]
            content = self._get(block_id)

    def release(self, block_id: BlockId) -> None:
        """Gives one reference back. The last one of a block that is not sealed frees it."""
        if self._refs[block_id] <= 0:
            raise InvariantBroken(f"block {block_id} released more often than it was held")
        while True:
            self._refs[block_id] -= 1
            if self._refs[block_id]:
                return
            content = self._content[block_id]
            if content is None or not content.sealed:
                if content is not None:
                    self._withdraw(block_id, content)
                self._free.appendleft(block_id)
                return
            self._num_idle += 1
            content.rank = self._eviction.used(content.hash)
            self._offer(block_id, content)
            if content.parent is None:
                return
            block_id = self._sealed[content.parent]

    # ------------------------------------------------------------- filling
    def begin_fill(
        self, block_id: BlockId, block_hash: BlockHash, parent: BlockHash | None, token_ids: Sequence[int]
    ) -> None:
        """Announces what a leased block is about to hold, so that nobody else computes it too."""
        if self._refs[block_id] != 1 or self._content[block_id] is not None:
            raise InvariantBroken(f"block {block_id} cannot be filled: {self._refs[block_id]} references")
        self._content[block_id] = _Content(block_hash, parent, list(token_ids))
        self._pending[block_hash] = self._pending.get(block_hash, 0) + 1

    def seal(self, block_id: BlockId) -> BlockId | None:
        """Makes a filled block visible and immutable. Returns the block that now carries the caller's reference.

        That is another one if the same content was sealed before (the duplicate is freed), and `None` if the parent is
        not here, so that the block could never be found (it is freed).
        """
        content = self._get(block_id)
        if content.sealed:
            raise InvariantBroken(f"block {block_id} sealed twice")
        twin = self._sealed.get(content.hash)
        if twin is not None:
            self.acquire(twin)
            self.release(block_id)
            return twin
        if content.parent is not None and content.parent not in self._sealed:
            self.release(block_id)
            return None
        self._drop_pending(content.hash)
        content.sealed = True
        self._sealed[content.hash] = block_id
        if content.parent is not None:
            parent_id = self._sealed[content.parent]
            parent = self._get(parent_id)
            parent.num_children += 1
            parent.rank = self._eviction.used(parent.hash)
            self._hold(parent_id, parent)
        content.rank = self._eviction.sealed(content.hash)
        self._sealed_news.append(content.hash)
        self._note(content.hash, True)
        return block_id

    def abandon(self, block_id: BlockId) -> None:
        """Gives back a pending block that will not be filled."""
        if self._get(block_id).sealed:
            raise InvariantBroken(f"block {block_id} abandoned after it was sealed")
        self.release(block_id)

    def take_events(self) -> tuple[list[BlockHash], list[BlockHash]]:
        """Hashes that have appeared and vanished since the last call; what did both is in neither list."""
        news, self._news = self._news, {}
        return [h for h, visible in news.items() if visible], [h for h, visible in news.items() if not visible]

    def has_evicted(self) -> bool:
        return not all(self._news.values())

    def take_sealed(self) -> list[BlockHash]:
        """All hashes sealed since the last call, in order, whatever became of them."""
        sealed, self._sealed_news = self._sealed_news, []
        return sealed

    # ------------------------------------------------------------- inner
    def _get(self, block_id: BlockId) -> _Content:
        content = self._content[block_id]
        if content is None:
            raise InvariantBroken(f"block {block_id} has no content")
        return content

    def _note(self, block_hash: BlockHash, visible: bool) -> None:
        if self._news.pop(block_hash, None) is None:  # else it is the opposite, and they cancel out
            self._news[block_hash] = visible

    def _offer(self, block_id: BlockId, content: _Content) -> None:
        """Notes an idle leaf for eviction. Entries go stale when it is used again; stale ones are skipped."""
        if content.num_children == 0:
            heapq.heappush(self._heap, (content.rank, block_id))
            if len(self._heap) > 2 * self.num_blocks + 64:
                self._heap = [entry for entry in self._heap if self._is_evictable(*entry)]
                heapq.heapify(self._heap)

    def _is_evictable(self, rank: int, block_id: BlockId) -> bool:
        content = self._content[block_id]
        return (
            content is not None
            and content.sealed
            and content.rank == rank
            and content.num_children == 0
            and self._refs[block_id] == 0
        )

    def _evict(self) -> None:
        while self._heap:
            entry = heapq.heappop(self._heap)
            if self._is_evictable(*entry):
                break
        else:
            raise InvariantBroken("idle blocks, but none is a leaf")
        block_id = entry[1]
        content = self._get(block_id)
        del self._sealed[content.hash]
        self._content[block_id] = None
        self._num_idle -= 1
        self._free.append(block_id)
        self._eviction.evicted(content.hash)
        self._note(content.hash, False)
        if content.parent is not None:
            parent_id = self._sealed[content.parent]
            parent = self._get(parent_id)
            parent.num_children -= 1
            if self._refs[parent_id] == 0:
                self._offer(parent_id, parent)

    def _withdraw(self, block_id: BlockId, content: _Content) -> None:
        self._drop_pending(content.hash)
        self._content[block_id] = None

    def _drop_pending(self, block_hash: BlockHash) -> None:
        left = self._pending[block_hash] - 1
        if left:
            self._pending[block_hash] = left
        else:
            del self._pending[block_hash]

    def check_holders(self, held: Counter[BlockId]) -> None:
        """`held`: the references that all holders together say they have. Raises `InvariantBroken`."""
        expected = held.copy()
        for num_refs, content in zip(self._refs, self._content, strict=True):
            if num_refs and content is not None and content.sealed and content.parent is not None:
                expected[self._sealed[content.parent]] += 1
        for block_id, num_refs in enumerate(self._refs):
            if num_refs != (wanted := expected[BlockId(block_id)]):
                raise InvariantBroken(
                    f"block pool: block {block_id} has {num_refs} references, its holders account for {wanted}"
                )

    def check_invariants(self) -> None:
        """Recomputes the truth the slow way. Raises `InvariantBroken`."""
        free = set(self._free)
        refs = self._refs
        sealed = {b: c for b, c in enumerate(self._content) if c is not None and c.sealed}
        pending = [c for c in self._content if c is not None and not c.sealed]
        children: dict[BlockHash, int] = {}
        for content in sealed.values():
            if content.parent is not None:
                children[content.parent] = children.get(content.parent, 0) + 1
        rules = {
            "free list has duplicates": len(free) == len(self._free),
            "a free block is held": all(refs[b] == 0 for b in free),
            "a free block has content": all(self._content[b] is None for b in free),
            "a block is lost": all(refs[b] > 0 or b in free or b in sealed for b in map(BlockId, self._ids)),
            "the map of sealed blocks is wrong": self._sealed == {c.hash: b for b, c in sealed.items()},
            "a parent is gone before its child": all(h in self._sealed for h in children),
            "a held block's parent is not held": all(
                refs[self._sealed[c.parent]] for b, c in sealed.items() if refs[b] and c.parent is not None
            ),
            "children miscounted": all(c.num_children == children.get(c.hash, 0) for c in sealed.values()),
            "idle blocks miscounted": self._num_idle == sum(refs[b] == 0 for b in sealed),
            "an idle leaf cannot be evicted": {b for rank, b in self._heap if self._is_evictable(rank, b)}
            == {b for b, c in sealed.items() if refs[b] == 0 and c.num_children == 0},
            "pending miscounted": sum(self._pending.values()) == len(pending)
            and {c.hash for c in pending} == set(self._pending),
        }
        for words, holds in rules.items():
            if not holds:
                raise InvariantBroken(f"block pool: {words}")
