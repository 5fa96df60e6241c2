"""Who holds a block: a map from block hash to a set of holders, each of which is one bit of an integer.

Most blocks are held by few groups. The map is cut into shards by the hash's first byte, because it grows by copying: a
shard of 16 000 blocks takes a fraction of a millisecond. `holder_table` makes the one in C++ (`native_holders.py`, some
40 bytes per block) where that was compiled, else the one below.

    bit ── `new_holder` ──▶ in use ── `retire` ──▶ stays in the map, masked by `live` ── all shards swept ──▶ free
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import islice

from kvferry.runtime.ids import BlockHash

NUM_SHARDS = 256
MAX_SHARED_SETS = 65_536
"""Different sets that are remembered for sharing; beyond that they are found anew."""
SWEPT_PER_CALL = 8192
"""Blocks that one call of `sweep` looks at, about; some tenths of a millisecond."""
LOOKUPS = 64
"""Blocks that one call of `runs` looks at, at most: most prompts as a whole, and of a long one little in vain."""


class HolderTable(ABC):
    """Which bits are in use. The map itself is the subclass's."""

    def __init__(self) -> None:
        self.live = 0
        """All bits in use. Others may still stand in the map."""
        self._retired = 0
        self._swept = 0
        """Bits that the present round of `sweep` takes out."""
        self._next_shard = 0

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
            num_seen += self._sweep_shard(self._next_shard, self._swept) + 1
            self._next_shard += 1
            if self._next_shard == NUM_SHARDS:
                self._next_shard = self._swept = 0

    # ------------------------------------------------------------ blocks
    @abstractmethod
    def add(self, bit: int, hashes: Sequence[BlockHash]) -> list[BlockHash]:
        """Returns those that were not held by it before."""

    @abstractmethod
    def discard(self, bit: int, hashes: Sequence[BlockHash]) -> list[BlockHash]:
        """Returns those that were held by it before."""

    @abstractmethod
    def runs(self, hashes: Sequence[BlockHash], begin: int) -> list[tuple[int, int]]:
        """Whose the hashes from `begin` on are: runs of them that the same holders have. At least one hash, at most
        `LOOKUPS`.

        Returns `(end of the run, set of holders)`; in the sets may be bits that are not `live`.
        """

    def narrow(self, hashes: Sequence[BlockHash]) -> list[tuple[int, int]]:
        """Of holders in use, who has how many leading ones: each set of them is smaller than the one before.

        Returns `(set of holders, leading hashes that all of them have)`, from 0 on.
        """
        left, found, begin = self.live, list[tuple[int, int]](), 0
        while left and begin < len(hashes):
            for end, holders in self.runs(hashes, begin):
                if left & holders != left:
                    found.append((left, begin))
                    left &= holders
                begin = end
        if left:
            found.append((left, begin))
        return found

    @abstractmethod
    def shard(self, number: int) -> dict[BlockHash, int]:
        """A copy of all that stands there; slow."""

    @abstractmethod
    def _held_in(self, number: int, bit: int) -> list[BlockHash]:
        """Of a shard."""

    @abstractmethod
    def _sweep_shard(self, number: int, gone: int) -> int:
        """Returns how many blocks it had."""

    def missing(self, bit: int, hashes: Sequence[BlockHash]) -> list[BlockHash]:
        """Those that it does not hold."""
        missing, begin = list[BlockHash](), 0
        while begin < len(hashes):
            for end, holders in self.runs(hashes, begin):
                if not holders & bit:
                    missing += hashes[begin:end]
                begin = end
        return missing

    def held(self, bit: int) -> Iterator[BlockHash]:
        """Walks through all blocks of all holders: for snapshots' audits and tests."""
        for number in range(NUM_SHARDS):
            yield from self._held_in(number, bit)

    def check_invariants(self) -> None:
        known = self.live | self._retired | self._swept
        assert not self.live & (self._retired | self._swept), "a bit is in use and retired"
        for i in range(NUM_SHARDS):
            swept = self._swept if i < self._next_shard else 0
            for block_hash, holders in self.shard(i).items():
                assert block_hash[0] == i, f"{block_hash.hex()} stands in shard {i}"
                assert holders, f"{block_hash.hex()} is held by nobody"
                assert not holders & ~known, f"{block_hash.hex()} is held by a bit that is free"
                assert not holders & swept, f"{block_hash.hex()} kept a bit that was swept"


class DictTable(HolderTable):
    """Few different sets occur, and equal ones are one object. A block costs a dict entry and its 16 bytes, some 110 in
    all, and nothing that the garbage collector visits."""

    def __init__(self) -> None:
        super().__init__()
        self._shards: list[dict[BlockHash, int]] = [{} for _ in range(NUM_SHARDS)]
        self._sets: dict[int, int] = {}

    def add(self, bit: int, hashes: Sequence[BlockHash]) -> list[BlockHash]:
        added, shards, put = list[BlockHash](), self._shards, self._put
        for block_hash in hashes:
            shard = shards[block_hash[0]]
            holders = shard.get(block_hash, 0)
            if not holders & bit:
                put(shard, block_hash, holders | bit)
                added.append(block_hash)
        return added

    def discard(self, bit: int, hashes: Sequence[BlockHash]) -> list[BlockHash]:
        removed, shards, put = list[BlockHash](), self._shards, self._put
        for block_hash in hashes:
            shard = shards[block_hash[0]]
            holders = shard.get(block_hash, 0)
            if holders & bit:
                put(shard, block_hash, holders ^ bit)
                removed.append(block_hash)
        return removed

    def runs(self, hashes: Sequence[BlockHash], begin: int) -> list[tuple[int, int]]:
        shards, found, before, i = self._shards, list[tuple[int, int]](), -1, begin
        for i, block_hash in enumerate(islice(hashes, begin, begin + LOOKUPS), begin):
            holders = shards[block_hash[0]].get(block_hash, 0)
            if holders != before:
                if i > begin:
                    found.append((i, before))
                before = holders
        found.append((i + 1, before))
        return found

    def shard(self, number: int) -> dict[BlockHash, int]:
        return dict(self._shards[number])

    def _held_in(self, number: int, bit: int) -> list[BlockHash]:
        return [block_hash for block_hash, holders in self._shards[number].items() if holders & bit]

    def _sweep_shard(self, number: int, gone: int) -> int:
        shard = self._shards[number]
        num_seen = len(shard)
        for block_hash in [h for h, holders in shard.items() if holders & gone]:
            self._put(shard, block_hash, shard[block_hash] & ~gone)
        return num_seen

    def _put(self, shard: dict[BlockHash, int], block_hash: BlockHash, holders: int) -> None:
        if not holders:
            shard.pop(block_hash, None)
            return
        if len(self._sets) > MAX_SHARED_SETS:
            self._sets.clear()
        shard[block_hash] = self._sets.setdefault(holders, holders)


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
