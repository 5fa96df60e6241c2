"""Which group holds which prefix: a flat map from block hash to the groups that hold the block.

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

from kvferry.cluster.kv_events import digest_bytes, xor
from kvferry.cluster.messages import KvEvents
from kvferry.runtime.ids import BlockHash, Peer

MAX_PENDING_FRAMES = 4096
"""Frames kept for replay after a snapshot that is on its way; more than that and the next snapshot is used."""


class _Entries:
    """One group's blocks as known here."""

    def __init__(self) -> None:
        self.seq = -1
        self.trusted = False
        self.hashes: set[BlockHash] = set()
        self.digest = 0
        self.expected: set[BlockHash] = set()
        self.pending: deque[tuple[int, KvEvents | None]] = deque(maxlen=MAX_PENDING_FRAMES)


class PrefixIndex:
    """Answers "who holds how much of this prompt". Errors in it make routing worse, never a result."""

    def __init__(self) -> None:
        self._peers: dict[Peer, _Entries] = {}
        self._holders: dict[BlockHash, set[Peer]] = {}
        self._expected: dict[BlockHash, dict[Peer, int]] = {}
        self._expiries: list[tuple[int, int, Peer, list[BlockHash]]] = []
        self._num_expects = 0

    # ------------------------------------------------------------ what groups report
    def apply(self, peer: Peer, seq: int, events: KvEvents | None) -> bool:
        """Takes over one frame; old and repeated ones are ignored.

        Returns whether a snapshot of the group is needed: true with every frame until it arrived, so the caller keeps
        one call in flight per group.
        """
        entries = self._peers.setdefault(peer, _Entries())
        if seq > entries.seq:
            if seq != entries.seq + 1:
                entries.trusted = False
            entries.seq = seq
            self._update(peer, entries, events)
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
        for gone in entries.hashes - set(hashes):
            self._remove(peer, entries, gone)
        for block_hash in hashes:
            self._store(peer, entries, block_hash)
        entries.trusted = True
        entries.seq = max(seq, entries.seq)
        entries.pending.clear()
        for _, events in later:
            self._update(peer, entries, events)
        return not entries.trusted

    def forget(self, peer: Peer) -> None:
        """The group is gone, and with it its cache."""
        entries = self._peers.pop(peer, None)
        if entries is None:
            return
        for block_hash in entries.hashes:
            self._drop_holder(peer, block_hash)
        for block_hash in list(entries.expected):
            self._drop_expected(peer, entries, block_hash)

    # ------------------------------------------------------------ what routing asks
    def expect(self, peer: Peer, hashes: Iterable[BlockHash], now_ns: int, until_ns: int) -> None:
        """Books blocks that a routed request will make appear at `peer`; they count as held until `until_ns`."""
        self._expire(now_ns)
        entries = self._peers.setdefault(peer, _Entries())
        booked = [h for h in hashes if h not in entries.hashes]
        for block_hash in booked:
            until = self._expected.setdefault(block_hash, {})
            until[peer] = max(until_ns, until.get(peer, 0))
            entries.expected.add(block_hash)
        if booked:
            self._num_expects += 1
            heapq.heappush(self._expiries, (until_ns, self._num_expects, peer, booked))

    def longest_prefix(
        self, hashes: Sequence[BlockHash], now_ns: int, num_window: int | None = None
    ) -> dict[Peer, int]:
        """How many leading blocks each group holds or is about to hold; groups without any are left out.

        `num_window`: only the last so many of them need to be there.
        """
        self._expire(now_ns)
        return _walk(hashes, lambda h: self._holders.get(h, set()) | self._expected.get(h, {}).keys(), num_window)

    def longest_held(self, hashes: Sequence[BlockHash], num_window: int | None = None) -> dict[Peer, int]:
        """The same without those that are about to appear: what each group could send now."""
        return _walk(hashes, lambda h: self._holders.get(h, set()), num_window)

    def hashes(self, peer: Peer) -> set[BlockHash]:
        """What the group is thought to hold."""
        entries = self._peers.get(peer)
        return set(entries.hashes) if entries else set()

    def num_blocks(self, peer: Peer) -> int:
        entries = self._peers.get(peer)
        return len(entries.hashes) if entries else 0

    # ------------------------------------------------------------ inside
    def _update(self, peer: Peer, entries: _Entries, events: KvEvents | None) -> None:
        if events is None:
            return
        for block_hash in events.stored:
            self._store(peer, entries, block_hash)
        for block_hash in events.removed:
            self._remove(peer, entries, block_hash)
        entries.trusted = len(entries.hashes) == events.count and digest_bytes(entries.digest) == events.digest

    def _store(self, peer: Peer, entries: _Entries, block_hash: BlockHash) -> None:
        if block_hash in entries.hashes:
            return
        entries.hashes.add(block_hash)
        entries.digest = xor(entries.digest, block_hash)
        self._holders.setdefault(block_hash, set()).add(peer)
        self._drop_expected(peer, entries, block_hash)

    def _remove(self, peer: Peer, entries: _Entries, block_hash: BlockHash) -> None:
        if block_hash not in entries.hashes:
            return
        entries.hashes.remove(block_hash)
        entries.digest = xor(entries.digest, block_hash)
        self._drop_holder(peer, block_hash)

    def _drop_holder(self, peer: Peer, block_hash: BlockHash) -> None:
        holders = self._holders[block_hash]
        holders.discard(peer)
        if not holders:
            del self._holders[block_hash]

    def _drop_expected(self, peer: Peer, entries: _Entries, block_hash: BlockHash) -> None:
        if block_hash not in entries.expected:
            return
        entries.expected.remove(block_hash)
        peers = self._expected[block_hash]
        del peers[peer]
        if not peers:
            del self._expected[block_hash]

    def _expire(self, now_ns: int) -> None:
        while self._expiries and self._expiries[0][0] <= now_ns:
            _, _, peer, hashes = heapq.heappop(self._expiries)
            entries = self._peers.get(peer)
            if entries is None:
                continue
            for block_hash in hashes:
                # It may have arrived, or a later booking may have prolonged it.
                if self._expected.get(block_hash, {}).get(peer, now_ns + 1) <= now_ns:
                    self._drop_expected(peer, entries, block_hash)

    def check_invariants(self) -> None:
        """Recomputes every derived value. For tests and audits."""
        holders: dict[BlockHash, set[Peer]] = {}
        expected: dict[BlockHash, set[Peer]] = {}
        for peer, entries in self._peers.items():
            digest = 0
            for block_hash in entries.hashes:
                holders.setdefault(block_hash, set()).add(peer)
                digest = xor(digest, block_hash)
            for block_hash in entries.expected:
                expected.setdefault(block_hash, set()).add(peer)
            assert digest == entries.digest, f"{peer}: digest out of step"
            assert not entries.expected & entries.hashes, f"{peer}: expects blocks that it holds"
            assert not (entries.trusted and entries.pending), f"{peer}: trusted with frames pending"
        assert holders == self._holders, "holders differ from the groups' entries"
        assert expected == {h: set(peers) for h, peers in self._expected.items()}, "expected blocks differ"


def _walk(
    hashes: Sequence[BlockHash], holders_of: Callable[[BlockHash], set[Peer]], num_window: int | None
) -> dict[Peer, int]:
    found: dict[Peer, int] = {}
    if num_window is not None:
        runs: dict[Peer, int] = {}
        for i, block_hash in enumerate(hashes):
            runs = {peer: runs.get(peer, 0) + 1 for peer in holders_of(block_hash)}
            found |= {peer: i + 1 for peer, run in runs.items() if run >= min(i + 1, num_window)}
        return found
    walking: set[Peer] | None = None
    for i, block_hash in enumerate(hashes):
        holders = holders_of(block_hash)
        walking = holders if walking is None else walking & holders
        if not walking:
            break
        for peer in walking:
            found[peer] = i + 1
    return found
