"""Which idle leaf of the block pool goes first: the one with the lowest rank.

A rank is given when a block is used and stays until its next use, so the pool keeps leaves in a heap. Time is the
number of uses so far: no clock, and the same calls give the same choices.

    lru     rank = time of the last use
    reuse   rank = time of the last use + a head start for each time that somebody found the block here

A sweep of long prompts that nobody asks for again passes through the blocks without a head start; a system prompt or a
conversation that came back stays. A head start wears off as time goes on, so what was popular once is not kept for
ever. Who comes back after it was evicted is remembered by name for a while (a ghost) and goes on where it was.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Literal, Protocol

from kvferry.runtime.ids import BlockHash

EvictionName = Literal["reuse", "lru"]

MAX_REUSES = 4
"""More often than that makes no difference."""
HEAD_START = 4
"""Of one reuse, in uses for each block of the pool."""


class Eviction(Protocol):
    """Told of every use of a sealed block; returns the block's rank from then on."""

    def sealed(self, block_hash: BlockHash) -> int:
        """It was filled."""

    def found(self, block_hash: BlockHash) -> int:
        """Somebody who wanted it found it here."""

    def used(self, block_hash: BlockHash) -> int:
        """Its last holder let it go, or a child of it was sealed."""

    def evicted(self, block_hash: BlockHash) -> None: ...


class LeastRecentlyUsed:
    """Knows only when."""

    def __init__(self) -> None:
        self._uses = 0

    def used(self, _block_hash: BlockHash) -> int:
        self._uses += 1
        return self._uses

    sealed = found = used

    def evicted(self, _block_hash: BlockHash) -> None:
        """Forgotten."""


class ReuseAware:
    """Knows when and how often. `num_blocks`: of the pool; as many evicted ones are remembered."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._head_start = HEAD_START * num_blocks
        self._uses = 0
        self._reuses: dict[BlockHash, int] = {}
        """Of sealed blocks, those that were found at least once."""
        self._ghosts: OrderedDict[BlockHash, int] = OrderedDict()
        """The same of blocks that were evicted, oldest first; 0 for those that nobody found."""

    def sealed(self, block_hash: BlockHash) -> int:
        if (before := self._ghosts.pop(block_hash, None)) is not None:
            self._count(block_hash, before + 1)
        return self.used(block_hash)

    def found(self, block_hash: BlockHash) -> int:
        self._count(block_hash, self._reuses.get(block_hash, 0) + 1)
        return self.used(block_hash)

    def used(self, block_hash: BlockHash) -> int:
        self._uses += 1
        return self._uses + self._head_start * self._reuses.get(block_hash, 0)

    def evicted(self, block_hash: BlockHash) -> None:
        self._ghosts[block_hash] = self._reuses.pop(block_hash, 0)
        if len(self._ghosts) > self._num_blocks:
            self._ghosts.popitem(last=False)

    def _count(self, block_hash: BlockHash, num_reuses: int) -> None:
        self._reuses[block_hash] = min(num_reuses, MAX_REUSES)


def make_eviction(name: EvictionName, num_blocks: int) -> Eviction:
    return ReuseAware(num_blocks) if name == "reuse" else LeastRecentlyUsed()
