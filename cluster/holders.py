"""Who holds a block: a map from block hash to a set of holders, each of which is one bit of an integer.

Most blocks are held by few groups, and few different sets occur; equal sets are one object. A block costs a dict entry
and its 16 bytes, some 110 bytes in all, and nothing that the garbage collector visits. The map is cut into shards by
the hash's first byte, because a dict grows in one go: a shard of 16 000 blocks in a fraction of a millisecond.

    bit ── `new_holder` ──▶ in use ── `retire` ──▶ stays in the map, masked by `live` ── all shards swept ──▶ free
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from kvferry.runtime.ids import BlockHash

NUM_SHARDS = 256
MAX_SHARED_SETS = 65_536
"""Different sets that are remembered for sharing; beyond that they are found anew."""
SWEPT_PER_CALL = 8192
"""Blocks that one call of `sweep` looks at, about; some tenths of a millisecond."""


class HolderTable:
    """Lookups read `shards[block_hash[0]].get(block_hash, 0) & live` themselves: a call each would double the cost."""

    def __init__(self) -> None:
        self.shards: list[dict[BlockHash, int]] = [{} for _ in range(NUM_SHARDS)]
        self.live = 0
        """All bits in use. Others may still stand in the shards."""
        self._retired = 0
        self._swept = 0
        """Bits that the present round of `sweep` takes out."""
        self._next_shard = 0
        self._sets: dict[int, int] = {}

    # ------------------------------------------------------------ holders
    def new_holder(self) -> int:
        """A bit that stands nowhere in the map."""
        used = self.live | self._retired | self._swept
        bit = ~used & (used + 1)
        self.live |= bit
        return bit

    def retire(self, bit: int) -> None:
        """The holder is gone, and with it all that it held."""
        self.live &= ~bit
        self._retired |= bit

    def sweep(self) -> None:
        """Takes retired bits out of some shards. Call it now and then."""
        if not self._swept:
            self._swept, self._retired = self._retired, 0
        num_seen = 0
        while self._swept and num_seen < SWEPT_PER_CALL:
            shard, gone = self.shards[self._next_shard], self._swept
            for block_hash in [h for h, holders in shard.items() if holders & gone]:
                self._put(shard, block_hash, shard[block_hash] & ~gone)
            num_seen += len(shard) + 1
            self._next_shard += 1
            if self._next_shard == NUM_SHARDS:
                self._next_shard = self._swept = 0

    # ------------------------------------------------------------ blocks
    def add(self, bit: int, hashes: Iterable[BlockHash]) -> list[BlockHash]:
        """Returns those that were not held by it before."""
        added, shards, put = list[BlockHash](), self.shards, self._put
        for block_hash in hashes:
            shard = shards[block_hash[0]]
            holders = shard.get(block_hash, 0)
            if not holders & bit:
                put(shard, block_hash, holders | bit)
                added.append(block_hash)
        return added

    def discard(self, bit: int, hashes: Iterable[BlockHash]) -> list[BlockHash]:
        """Returns those that were held by it before."""
        removed, shards, put = list[BlockHash](), self.shards, self._put
        for block_hash in hashes:
            shard = shards[block_hash[0]]
            holders = shard.get(block_hash, 0)
            if holders & bit:
                put(shard, block_hash, holders ^ bit)
                removed.append(block_hash)
        return removed

    def missing(self, bit: int, hashes: Iterable[BlockHash]) -> list[BlockHash]:
        """Those that it does not hold."""
        shards = self.shards
        return [h for h in hashes if not shards[h[0]].get(h, 0) & bit]

    def held(self, bit: int) -> Iterator[BlockHash]:
        """Walks through all blocks of all holders: for snapshots' audits and tests."""
        for shard in self.shards:
            for block_hash, holders in shard.items():
                if holders & bit:
                    yield block_hash

    def _put(self, shard: dict[BlockHash, int], block_hash: BlockHash, holders: int) -> None:
        if not holders & (self.live | self._retired):
            shard.pop(block_hash, None)
            return
        if len(self._sets) > MAX_SHARED_SETS:
            self._sets.clear()
        shard[block_hash] = self._sets.setdefault(holders, holders)

    def check_invariants(self) -> None:
        known = self.live | self._retired | self._swept
        assert not self.live & (self._retired | self._swept), "a bit is in use and retired"
        for i, shard in enumerate(self.shards):
            swept = self._swept if i < self._next_shard else 0
            for block_hash, holders in shard.items():
                assert block_hash[0] == i, f"{block_hash.hex()} stands in shard {i}"
                assert holders, f"{block_hash.hex()} is held by nobody"
                assert not holders & ~known, f"{block_hash.hex()} is held by a bit that is free"
                assert not holders & swept, f"{block_hash.hex()} kept a bit that was swept"


def bits(holders: int) -> Iterator[int]:
    """Each holder's own bit, lowest first."""
    while holders:
        bit = holders & -holders
        yield bit
        holders ^= bit


def longest_runs(sets: Sequence[int], num_window: int) -> dict[int, int]:
    """Per holder's bit, the largest n such that it is in all of the last `num_window` (or all) of the first n sets."""
    found, begins, before = dict[int, int](), dict[int, int](), 0
    for i, holders in enumerate((*sets, 0)):
        if holders == before:
            continue
        for bit in bits(before & ~holders):
            begin = begins.pop(bit)
            if begin == 0 or i - begin >= num_window:
                found[bit] = i
        for bit in bits(holders & ~before):
            begins[bit] = i
        before = holders
    return found
