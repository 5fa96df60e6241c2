"""Which group holds which prefix: a flat map from block hash to the groups that hold the block (`holders.py`).

Per group (incarnation) the frames' sequence numbers are followed:

    first frame ─▶ UNTRUSTED ── snapshot, or an event whose count and digest prove the entries ──▶ TRUSTED
                       ▲                                                                              │
                       └──────────── gap in the numbers, or count/digest do not match ◀───────────────┘

Entries of an untrusted group are kept and updated: at worst they are stale, and a stale entry only costs speed.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Sequence
from functools import reduce
from operator import xor
from typing import NamedTuple

from kvferry.cluster.holders import HolderTable, bits, longest_runs
from kvferry.cluster.kv_events import digest_bytes
from kvferry.cluster.messages import KvEvents
from kvferry.runtime.ids import BlockHash, Peer

MAX_PENDING_FRAMES = 4096
"""Frames kept for replay after a snapshot that is on its way; more than that and the next snapshot is used."""
MAX_NAMED_SETS = 65_536
"""Sets of groups whose names are remembered; beyond that they are found anew."""


class _Entries:
    """One group's blocks as known here."""

    def __init__(self, bit: int) -> None:
        self.bit = bit
        """In the table of holders."""
        self.seq = -1
        self.trusted = False
        self.count = 0
        self.digest = 0
        self.expected: dict[BlockHash, int] = {}
        """Until when."""
        self.pending: deque[tuple[int, KvEvents | None]] = deque(maxlen=MAX_PENDING_FRAMES)


class Prefixes(NamedTuple):
    """Leading blocks of a prompt per group; groups without any are left out."""

    hits: dict[Peer, int]
    """That it holds or is about to hold."""
    held: dict[Peer, int]
    """That it holds: what it could send now."""


class PrefixIndex:
    """Answers "who holds how much of this prompt". Errors in it make routing worse, never a result."""

    def __init__(self) -> None:
        self._peers: dict[Peer, _Entries] = {}
        self._table = HolderTable()
        self._owners: dict[int, Peer] = {}
        self._names: dict[int, tuple[Peer, ...]] = {}
        self._expected: dict[BlockHash, int] = {}
        """Groups that expect the block, as bits."""
        self._expiries: list[tuple[int, int, Peer, list[BlockHash]]] = []
        self._num_expects = 0

    # ------------------------------------------------------------ what groups report
    def apply(self, peer: Peer, seq: int, events: KvEvents | None) -> bool:
        """Takes over one frame; old and repeated ones are ignored.

        Returns whether a snapshot of the group is needed: true with every frame until it arrived, so the caller keeps
        one call in flight per group.
        """
        self._table.sweep()
        entries = self._entries(peer)
        if seq > entries.seq:
            if seq != entries.seq + 1:
                entries.trusted = False
            entries.seq = seq
            self._update(entries, events)
            if entries.trusted:
                entries.pending.clear()
            else:
                entries.pending.append((seq, events))
        return not entries.trusted

    def snapshot(self, peer: Peer, seq: int, hashes: Sequence[BlockHash]) -> bool:
        """All blocks that the group held after frame `seq`; frames that came since are applied again on top.

        Returns whether yet another snapshot is needed. Ignored for a group that no frame has come from.
        """
        entries = self._peers.get(peer)
        if entries is None:
            return False
        later = [(s, events) for s, events in entries.pending if s > seq]
        if entries.trusted:
            return False
        if [s for s, _ in later] != list(range(seq + 1, entries.seq + 1)):
            return True
        if entries.count:
            self._clear(peer, entries)
        self._store(entries, hashes)
        entries.trusted = True
        entries.seq = max(seq, entries.seq)
        entries.pending.clear()
        for _, events in later:
            self._update(entries, events)
        return not entries.trusted

    def forget(self, peer: Peer) -> None:
        """The group is gone, and with it its cache."""
        entries = self._peers.pop(peer, None)
        if entries is None:
            return
        for block_hash in list(entries.expected):
            self._drop_expected(entries, block_hash)
        self._table.retire(entries.bit)
        del self._owners[entries.bit]

    # ------------------------------------------------------------ what routing asks
    def expect(self, peer: Peer, hashes: Iterable[BlockHash], now_ns: int, until_ns: int) -> None:
        """Books blocks that a routed request will make appear at `peer`; they count as held until `until_ns`."""
        self._expire(now_ns)
        entries = self._entries(peer)
        bit, mine, all_expected = entries.bit, entries.expected, self._expected
        booked = self._table.missing(bit, hashes)
        for block_hash in booked:
            if until_ns > mine.get(block_hash, 0):
                mine[block_hash] = until_ns
            all_expected[block_hash] = all_expected.get(block_hash, 0) | bit
        if booked:
            self._num_expects += 1
            heapq.heappush(self._expiries, (until_ns, self._num_expects, peer, booked))

    def find(self, hashes: Sequence[BlockHash], now_ns: int, num_window: int | None = None) -> Prefixes:
        """Of the blocks of a prompt, how many leading ones each group has.

        `num_window`: only the last so many of them need to be there.
        """
        if self._expiries and self._expiries[0][0] <= now_ns:
            self._expire(now_ns)
        shards, expected = self._table.shards, self._expected
        walking = self._table.live
        held, hits = list[int](), list[int]()
        for block_hash in hashes:
            holders = shards[block_hash[0]].get(block_hash, 0)
            held.append(holders)
            if block_hash in expected:
                holders |= expected[block_hash]
            hits.append(holders)
            walking &= holders
            if not walking and num_window is None:
                break
        found = self._longest(hits, num_window)
        return Prefixes(found, found if hits == held else self._longest(held, num_window))

    def longest_prefix(
        self, hashes: Sequence[BlockHash], now_ns: int, num_window: int | None = None
    ) -> dict[Peer, int]:
        """How many leading blocks each group holds or is about to hold; groups without any are left out."""
        return self.find(hashes, now_ns, num_window).hits

    def hashes(self, peer: Peer) -> set[BlockHash]:
        """What the group is thought to hold. Walks through the whole index."""
        entries = self._peers.get(peer)
        return set(self._table.held(entries.bit)) if entries else set()

    def num_blocks(self, peer: Peer) -> int:
        entries = self._peers.get(peer)
        return entries.count if entries else 0

    # ------------------------------------------------------------ inside
    def _entries(self, peer: Peer) -> _Entries:
        entries = self._peers.get(peer)
        if entries is None:
            entries = self._peers[peer] = _Entries(self._new_bit(peer))
        return entries

    def _new_bit(self, peer: Peer) -> int:
        bit = self._table.new_holder()
        self._owners[bit] = peer
        self._names.clear()  # the bit may have been another's
        return bit

    def _clear(self, peer: Peer, entries: _Entries) -> None:
        """The group holds nothing. What it expects stays."""
        old, entries.bit = entries.bit, self._new_bit(peer)
        self._table.retire(old)
        del self._owners[old]
        for block_hash in entries.expected:
            self._expected[block_hash] ^= old | entries.bit
        entries.count = entries.digest = 0

    def _update(self, entries: _Entries, events: KvEvents | None) -> None:
        if events is None:
            return
        self._store(entries, events.stored)
        removed = self._table.discard(entries.bit, events.removed)
        entries.count -= len(removed)
        entries.digest = _digest(entries.digest, removed)
        entries.trusted = entries.count == events.count and digest_bytes(entries.digest) == events.digest

    def _store(self, entries: _Entries, hashes: Sequence[BlockHash]) -> None:
        added = self._table.add(entries.bit, hashes)
        entries.count += len(added)
        entries.digest = _digest(entries.digest, added)
        if entries.expected:
            for block_hash in added:
                self._drop_expected(entries, block_hash)

    def _drop_expected(self, entries: _Entries, block_hash: BlockHash) -> None:
        if entries.expected.pop(block_hash, None) is None:
            return
        if left := self._expected[block_hash] ^ entries.bit:
            self._expected[block_hash] = left
        else:
            del self._expected[block_hash]

    def _expire(self, now_ns: int) -> None:
        while self._expiries and self._expiries[0][0] <= now_ns:
            _, _, peer, hashes = heapq.heappop(self._expiries)
            entries = self._peers.get(peer)
            if entries is None:
                continue
            for block_hash in hashes:
                # It may have arrived, or a later booking may have prolonged it.
                if entries.expected.get(block_hash, now_ns + 1) <= now_ns:
                    self._drop_expected(entries, block_hash)

    def _longest(self, sets: list[int], num_window: int | None) -> dict[Peer, int]:
        """`sets`: of each block, who has it."""
        live = self._table.live
        if num_window is not None:
            runs = longest_runs([holders & live for holders in sets], num_window)
            return {self._owners[bit]: n for bit, n in runs.items()}
        found, walking = dict[Peer, int](), live
        for i, holders in enumerate(sets):
            left = walking & holders
            if left != walking:  # those that end here, and those that go on: they are overwritten later
                if i:
                    found |= dict.fromkeys(self._named(walking), i)
                walking = left
        if walking and sets:
            found |= dict.fromkeys(self._named(walking), len(sets))
        return found

    def _named(self, holders: int) -> tuple[Peer, ...]:
        names = self._names.get(holders)
        if names is None:
            if len(self._names) > MAX_NAMED_SETS:
                self._names.clear()
            names = self._names[holders] = tuple(self._owners[bit] for bit in bits(holders))
        return names

    def check_invariants(self) -> None:
        """Recomputes every derived value. For tests and audits."""
        self._table.check_invariants()
        expected: dict[BlockHash, int] = {}
        for peer, entries in self._peers.items():
            hashes = self.hashes(peer)
            assert self._owners[entries.bit] == peer, f"{peer}: its bit is another's"
            assert len(hashes) == entries.count, f"{peer}: count out of step"
            assert _digest(0, hashes) == entries.digest, f"{peer}: digest out of step"
            assert not entries.expected.keys() & hashes, f"{peer}: expects blocks that it holds"
            assert not (entries.trusted and entries.pending), f"{peer}: trusted with frames pending"
            for block_hash in entries.expected:
                expected[block_hash] = expected.get(block_hash, 0) | entries.bit
        assert reduce(xor, self._owners, 0) == self._table.live, "bits in use differ from the groups'"
        assert expected == self._expected, "expected blocks differ"


def _digest(digest: int, hashes: Iterable[BlockHash]) -> int:
    """`kv_events.xor` of them all."""
    return reduce(xor, map(int.from_bytes, hashes), digest)
