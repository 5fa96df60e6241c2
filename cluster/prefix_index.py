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
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from operator import xor
from typing import NamedTuple

from kvferry.cluster.depths import Depths, Level, Owners
from kvferry.cluster.holders import longest_runs
from kvferry.cluster.kv_events import digest_bytes
from kvferry.cluster.messages import KvEvents
from kvferry.cluster.native_holders import holder_table
from kvferry.runtime.ids import BlockHash, Peer

MAX_PENDING_FRAMES = 4096
"""Frames kept for replay after a snapshot that is on its way; more than that and the next snapshot is used."""
EXPIRED_PER_CALL = 8
"""Bookings that one call of `expect` clears away; each call adds one."""


class _Entries:
    """One group's blocks as known here."""

    def __init__(self, bit: int) -> None:
        self.bit = bit
        """In the table of holders; 0: the group is gone."""
        self.seq = -1
        self.trusted = False
        self.count = 0
        self.digest = 0
        self.pending: deque[tuple[int, KvEvents | None]] = deque(maxlen=MAX_PENDING_FRAMES)


_Expected = tuple[int, _Entries]
"""Until when, and where: one object for all blocks of a booking."""


class Prefixes(NamedTuple):
    """Leading blocks of a prompt per group."""

    hits: Depths
    """That it holds or is about to hold."""
    held: Depths
    """That it holds: what it could send now."""


class PrefixIndex:
    """Answers "who holds how much of this prompt". Errors in it make routing worse, never a result."""

    def __init__(self) -> None:
        self._peers: dict[Peer, _Entries] = {}
        self._table = holder_table()
        self._owners = Owners({})
        self._expected: dict[BlockHash, tuple[_Expected, ...]] = {}
        """Blocks with the same expectations share one tuple. Some may have passed."""
        self._expiries: list[tuple[int, int, list[BlockHash]]] = []
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
            self._clear(entries)
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
        self._table.retire(entries.bit)
        entries.bit = 0
        self._renumber()

    # ------------------------------------------------------------ what routing asks
    def expect(self, peer: Peer, hashes: Sequence[BlockHash], now_ns: int, until_ns: int) -> None:
        """Books blocks that a routed request will make appear at `peer`; they count as held until `until_ns`."""
        self._expire(now_ns)
        entries, all_expected = self._entries(peer), self._expected
        booked = self._table.missing(entries.bit, hashes)
        if not booked:
            return
        mine = (until_ns, entries)
        seen: tuple[_Expected, ...] = ()
        both: tuple[_Expected, ...] = (mine,)
        for block_hash in booked:
            before = all_expected.get(block_hash, ())
            if before is not seen:  # of a block's neighbours the same is expected
                later = [e for e in before if e[1] is entries and e[0] > until_ns]
                others = [e for e in before if e[1] is not entries and e[0] > now_ns]
                seen, both = before, (*others, *(later or [mine]))
            all_expected[block_hash] = both
        self._num_expects += 1
        heapq.heappush(self._expiries, (until_ns, self._num_expects, booked))

    def find(self, hashes: Sequence[BlockHash], now_ns: int, num_window: int | None = None) -> Prefixes:
        """Of the blocks of a prompt, how many leading ones each group has.

        `num_window`: only the last so many of them need to be there.
        """
        if num_window is not None:
            return self._find_runs(hashes, now_ns, num_window)
        levels = self._table.narrow(hashes)
        lacked = [hashes[depth] for _, depth in levels if depth < len(hashes)]
        held = Depths(levels if not levels or levels[0][1] else levels[1:], self._owners)
        if self._expected.keys().isdisjoint(lacked):
            return Prefixes(held, held)
        return Prefixes(self._expecting(hashes, now_ns), held)

    def _expecting(self, hashes: Sequence[BlockHash], now_ns: int) -> Depths:
        """With what is expected, which may differ from block to block."""
        table, expected = self._table, self._expected
        left, levels, begin = table.live, list[Level](), 0
        while left and begin < len(hashes):
            for end, holders in table.runs(hashes, begin):
                i = begin
                while i < end and left & holders != left:
                    still = left & holders
                    for until_ns, entries in expected.get(hashes[i], ()):
                        if until_ns > now_ns:
                            still |= left & entries.bit
                    if still != left and i:
                        levels.append((left, i))
                    left = still
                    i += 1
                begin = end
        if left and begin:
            levels.append((left, begin))
        return Depths(levels, self._owners)

    def longest_prefix(self, hashes: Sequence[BlockHash], now_ns: int, num_window: int | None = None) -> Depths:
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
            entries = self._peers[peer] = _Entries(self._table.new_holder())
            self._renumber()
        return entries

    def _renumber(self) -> None:
        """A bit is somebody else's now."""
        self._owners = Owners({peer: entries.bit for peer, entries in self._peers.items()})

    def _clear(self, entries: _Entries) -> None:
        """The group holds nothing. What it expects stays."""
        old, entries.bit = entries.bit, self._table.new_holder()
        self._table.retire(old)
        self._renumber()
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
        expected = self._expected
        if arrived := [h for h in added if h in expected]:
            self._keep_expected(arrived, lambda e: e[1] is not entries)

    def _keep_expected(self, hashes: Iterable[BlockHash], keep: Callable[[_Expected], bool]) -> None:
        """Of what is expected of the blocks."""
        all_expected = self._expected
        seen: tuple[_Expected, ...] = ()
        left = seen
        for block_hash in hashes:
            before = all_expected.get(block_hash, ())
            if before is not seen:
                seen, left = before, tuple([e for e in before if keep(e)])
            if left:
                all_expected[block_hash] = left
            elif before:
                del all_expected[block_hash]

    def _expire(self, now_ns: int) -> None:
        """Only to give memory back."""
        for _ in range(EXPIRED_PER_CALL):
            if not self._expiries or self._expiries[0][0] > now_ns:
                return
            _, _, hashes = heapq.heappop(self._expiries)
            self._keep_expected(hashes, lambda e: e[0] > now_ns)

    def _find_runs(self, hashes: Sequence[BlockHash], now_ns: int, num_window: int) -> Prefixes:
        table, expected = self._table, self._expected
        held, hits = list[int](), list[int]()
        while len(held) < len(hashes):
            for end, holders in table.runs(hashes, len(held)):
                held += [holders & table.live] * (end - len(held))
        for block_hash, holders in zip(hashes, held, strict=True):
            for until_ns, entries in expected.get(block_hash, ()):
                if until_ns > now_ns:
                    holders |= entries.bit
            hits.append(holders)
        found = self._windows(hits, num_window)
        return Prefixes(found, found if hits == held else self._windows(held, num_window))

    def _windows(self, sets: list[int], num_window: int) -> Depths:
        runs, peer_of = longest_runs(sets, num_window), self._owners.peer_of
        return Depths.of({peer_of[bit]: n for bit, n in runs.items()}, self._owners)

    def check_invariants(self) -> None:
        """Recomputes every derived value. For tests and audits."""
        self._table.check_invariants()
        for peer, entries in self._peers.items():
            hashes = self.hashes(peer)
            assert self._owners.peer_of[entries.bit] == peer, f"{peer}: its bit is another's"
            assert len(hashes) == entries.count, f"{peer}: count out of step"
            assert _digest(0, hashes) == entries.digest, f"{peer}: digest out of step"
            assert not (entries.trusted and entries.pending), f"{peer}: trusted with frames pending"
            expects = {h for h, expected in self._expected.items() if any(e is entries for _, e in expected)}
            assert not expects & hashes, f"{peer}: expects blocks that it holds"
        assert reduce(xor, self._owners.peer_of, 0) == self._table.live, "bits in use differ from the groups'"
        expiring = {(until_ns, h) for until_ns, _, hashes in self._expiries for h in hashes}
        for block_hash, expected in self._expected.items():
            assert len({id(entries) for _, entries in expected}) == len(expected) > 0, "expected twice, or by nobody"
            assert all((until_ns, block_hash) in expiring for until_ns, _ in expected), "expected for ever"


def _digest(digest: int, hashes: Iterable[BlockHash]) -> int:
    """`kv_events.xor` of them all."""
    return reduce(xor, map(int.from_bytes, hashes), digest)
