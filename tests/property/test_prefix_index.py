"""The index against a naive twin, over a wire that loses, repeats and reorders frames."""

from hashlib import blake2b

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvferry.cluster.kv_events import KvEventLog
from kvferry.cluster.messages import KvEvents
from kvferry.cluster.prefix_index import MAX_PENDING_FRAMES, PrefixIndex
from kvferry.runtime.ids import BlockHash, Epoch, GroupId, Peer

pytestmark = pytest.mark.core


def h(i: int) -> BlockHash:
    """Spread like real hashes: small numbers would cancel out in an XOR."""
    return BlockHash(blake2b(bytes([i]), digest_size=16).digest())


CHAIN = [h(i) for i in range(1, 7)]
PEERS = [Peer(GroupId(f"g{i}"), Epoch(i)) for i in range(3)]


class Group:
    """The truth: what one group holds, and what it said so far."""

    def __init__(self) -> None:
        self.log = KvEventLog()
        self.held: set[BlockHash] = set()
        self.frames: list[tuple[KvEvents | None, frozenset[BlockHash]]] = []

    def toggle(self, block_hash: BlockHash) -> None:
        if block_hash in self.held:
            self.held.remove(block_hash)
            self.log.removed(block_hash)
        else:
            self.held.add(block_hash)
            self.log.stored(block_hash)

    def step(self) -> int:
        self.frames.append((self.log.take(), frozenset(self.held)))
        return len(self.frames) - 1


class IndexMachine(RuleBasedStateMachine):
    """Faults guarded against: lost or repeated events counted, a gap unnoticed, a late snapshot undoing newer events,
    expected blocks that stay for ever."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.groups = {peer: Group() for peer in PEERS}
        self.newest = dict.fromkeys(PEERS, -1)
        self.needs: dict[Peer, bool] = {}
        self.expected: dict[tuple[Peer, BlockHash], int] = {}
        self.snapshots: list[tuple[Peer, int, list[BlockHash]]] = []
        self.now = 0

    peers = st.sampled_from(PEERS)

    def deliver(self, peer: Peer, seq: int) -> None:
        events, _ = self.groups[peer].frames[seq]
        was_new = seq > self.newest[peer]
        self.needs[peer] = self.index.apply(peer, seq, events)
        self.newest[peer] = max(self.newest[peer], seq)
        if was_new and events is not None:
            for block_hash in events.stored:
                self.expected.pop((peer, block_hash), None)

    @rule(peer=peers, blocks=st.lists(st.sampled_from(CHAIN), max_size=6), lost=st.booleans())
    def step(self, peer: Peer, blocks: list[BlockHash], lost: bool) -> None:
        for block_hash in blocks:
            self.groups[peer].toggle(block_hash)
        seq = self.groups[peer].step()
        if not lost:
            self.deliver(peer, seq)

    @rule(peer=peers, data=st.data())
    def late_or_repeated(self, peer: Peer, data: st.DataObject) -> None:
        if frames := self.groups[peer].frames:
            self.deliver(peer, data.draw(st.integers(0, len(frames) - 1)))

    @rule(peer=peers)
    def ask_snapshot(self, peer: Peer) -> None:
        if frames := self.groups[peer].frames:
            self.snapshots.append((peer, len(frames) - 1, sorted(frames[-1][1])))

    @rule(data=st.data())
    def snapshot_arrives(self, data: st.DataObject) -> None:
        if not self.snapshots:
            return
        peer, seq, hashes = self.snapshots.pop(data.draw(st.integers(0, len(self.snapshots) - 1)))
        if self.newest[peer] < 0:
            return
        needed = self.needs[peer]
        self.needs[peer] = self.index.snapshot(peer, seq, hashes)
        if needed and not self.needs[peer]:
            self.newest[peer] = max(self.newest[peer], seq)
            for block_hash in hashes:
                self.expected.pop((peer, block_hash), None)

    @rule(peer=peers, blocks=st.sets(st.sampled_from(CHAIN), min_size=1), for_ns=st.integers(1, 5))
    def expect(self, peer: Peer, blocks: set[BlockHash], for_ns: int) -> None:
        held = self.index_holds(peer)
        self.index.expect(peer, sorted(blocks), self.now, self.now + for_ns)
        for block_hash in blocks - held:
            until = self.expected.get((peer, block_hash), 0)
            self.expected[peer, block_hash] = max(until, self.now + for_ns)

    @rule(by=st.integers(1, 3))
    def time_passes(self, by: int) -> None:
        self.now += by
        self.expected = {k: until for k, until in self.expected.items() if until > self.now}
        self.index.longest_prefix(CHAIN, self.now)

    @rule(peer=peers)
    def dies(self, peer: Peer) -> None:
        self.index.forget(peer)
        self.groups[peer] = Group()
        self.newest[peer] = -1
        self.needs.pop(peer, None)
        self.expected = {k: until for k, until in self.expected.items() if k[0] != peer}
        self.snapshots = [s for s in self.snapshots if s[0] != peer]

    def index_holds(self, peer: Peer) -> set[BlockHash]:
        return self.index.hashes(peer)

    @invariant()
    def sound(self) -> None:
        self.index.check_invariants()
        for peer, needs in self.needs.items():
            if not needs:
                assert self.index_holds(peer) == self.groups[peer].frames[self.newest[peer]][1]

    @invariant()
    def longest_prefix_is_the_naive_one(self) -> None:
        naive = {}
        for peer in PEERS:
            have = self.index_holds(peer) | {b for p, b in self.expected if p == peer}
            length = next((i for i, b in enumerate(CHAIN) if b not in have), len(CHAIN))
            if length:
                naive[peer] = length
        assert self.index.longest_prefix(CHAIN, self.now) == naive

    @invariant()
    def what_is_held_is_told_from_what_is_expected(self) -> None:
        naive = {}
        for peer in PEERS:
            have = self.index_holds(peer)
            if length := next((i for i, b in enumerate(CHAIN) if b not in have), len(CHAIN)):
                naive[peer] = length
        assert self.index.find(CHAIN, self.now).held == naive

    @invariant()
    def a_window_needs_the_last_blocks_only(self) -> None:
        """Against trying every length."""
        for num_window in (1, 2, 3):
            naive = {}
            for peer in PEERS:
                held = self.index_holds(peer) | {h for p, h in self.expected if p == peer}
                ends = [n for n in range(1, len(CHAIN) + 1) if set(CHAIN[max(0, n - num_window) : n]) <= held]
                naive |= {peer: ends[-1]} if ends else {}
            assert self.index.longest_prefix(CHAIN, self.now, num_window) == naive


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


def test_a_snapshot_overtaken_by_frames_is_still_used() -> None:
    """Fault 37: recovery looped while frames came faster than snapshots."""
    index, group, peer = PrefixIndex(), Group(), PEERS[0]
    for i in range(1, 6):
        group.toggle(h(i))
        group.step()
    for seq in range(1, 5):  # frame 0 was lost
        events, _ = group.frames[seq]
        assert events is not None
        assert index.apply(peer, seq, events)
    assert not index.snapshot(peer, 1, sorted(group.frames[1][1]))
    assert index.longest_prefix(CHAIN, 0) == {peer: 5}


def test_more_frames_than_are_kept_ask_for_another_snapshot() -> None:
    """A bounded buffer must not pass off an incomplete replay as the truth."""
    index, peer = PrefixIndex(), PEERS[0]
    for seq in range(MAX_PENDING_FRAMES + 2):
        index.apply(peer, seq, None)
    assert index.snapshot(peer, 0, [h(1)])
    assert not index.snapshot(peer, MAX_PENDING_FRAMES + 1, [h(1)])
    assert index.longest_prefix(CHAIN, 0) == {peer: 1}


def test_memory_of_expected_blocks_goes_back() -> None:
    index = PrefixIndex()
    for i in range(100):
        index.expect(PEERS[i % 3], CHAIN, i, i + 3)
    assert index.longest_prefix(CHAIN, 1000) == {}
    for i in range(1000, 1050):
        index.expect(PEERS[0], CHAIN[:1], i, i + 1)
    index.check_invariants()
    assert len(index._expected) == len(index._expiries) == 1
