"""The transfer ledgers against naive twins: lost pins, early frees, wrong ends, messages of any kind at any time."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvferry.runtime.errors import IncompatiblePeer, NoFreeBlocks, StaleAttempt
from kvferry.runtime.ids import BlockHash, BlockId, Epoch, GroupId, Peer, TransferId
from kvferry.runtime.step import Import, Send
from kvferry.runtime.transfer.inbound import Inbound
from kvferry.runtime.transfer.outbound import Outbound
from kvferry.runtime.transfer.ticket import (
    ExpectRequest,
    GroupAddress,
    Received,
    Sent,
    Ticket,
    TicketBlock,
    TransferState,
)

sys.path.insert(0, str(Path(__file__).parent))
from fake_pool import FakePool

pytestmark = pytest.mark.core

Key = tuple[TransferId, int]
NS = 10**9
SOURCES = [Peer(GroupId("p0"), Epoch(1)), Peer(GroupId("p1"), Epoch(2))]
OWN = GroupAddress(Peer(GroupId("d0"), Epoch(3)), 1, b"f", [])
ROUTES = {(0, 0), (1, 0)}
CHAINS = [[BlockHash(bytes([10 * c + i]) * 16) for i in range(5)] for c in range(8)]
for chain in range(1, 8, 2):
    CHAINS[chain][:2] = CHAINS[chain - 1][:2]  # a shared prefix
IDS = st.sampled_from([TransferId(x) for x in "abc"])
NEWER = st.sampled_from([1, 1, 1, 1, 0, -1])
"""Added to the latest attempt."""
RARELY = st.integers(0, 4).map(lambda draw: draw == 4)
PICK = st.integers(0, 1 << 16)


def expect_request(
    transfer_id: TransferId, attempt: int, chain: int, source: Peer, timeout_s: float = 10, fingerprint: bytes = b"f"
) -> ExpectRequest:
    return ExpectRequest(
        transfer_id=transfer_id,
        attempt=attempt,
        source=GroupAddress(source, 2, fingerprint, []),
        token_ids=[block_hash[0] for block_hash in CHAINS[chain]],
        cache_salt="",
        timeout_s=timeout_s,
    )


class Twin:
    """One transfer as a person would keep it on paper."""

    def __init__(self, ticket: Ticket, source: Peer, deadline_ns: int) -> None:
        self.ticket, self.source, self.deadline_ns = ticket, source, deadline_ns
        self.wanted = {block.block_id for block in ticket.missing}
        self.planned: set[BlockId] = set()
        self.arrived: set[BlockId] = set()
        self.pinned: set[BlockId] = set()
        self.num_bytes = 0
        self.end: TransferState | None = None
        self.over: TransferState | None = None
        self.released = False

    def settle(self) -> None:
        if self.over is None and not self.planned - self.arrived:
            self.over = TransferState.COMPLETE if self.arrived == self.wanted else self.end

    @property
    def gone(self) -> bool:
        return self.over is not None and self.released


class InboundMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = FakePool(17)
        self.ledger = Inbound(self.pool)
        self.now = 0
        self.twins: dict[Key, Twin] = {}
        self.attempts: dict[TransferId, int] = {}
        self.staged: dict[Key, set[tuple[int, tuple[int, int]]]] = {}
        self.discarded: set[Key] = set()
        self.wire: list[Received] = []
        self.num_sent: Counter[Key] = Counter()
        self.num_sent_blocks: Counter[Key] = Counter()
        self.planned: list[Import] = []
        self.events: dict[Key, TransferState] = {}

    def current(self, transfer_id: TransferId) -> Twin | None:
        twin = self.twins.get((transfer_id, self.attempts.get(transfer_id, 0)))
        return None if twin is None or twin.gone else twin

    def finish(self, twin: Twin | None, state: TransferState, release: bool = False) -> None:
        if twin is not None:
            twin.end = twin.end or state
            twin.released |= release
            twin.settle()

    @rule(transfer_id=IDS, newer=NEWER, chain=st.integers(0, 7), source=st.sampled_from(SOURCES), long=st.booleans())
    def expect(self, transfer_id: TransferId, newer: int, chain: int, source: Peer, long: bool) -> None:
        attempt = max(1, self.attempts.get(transfer_id, 0) + newer)
        timeout_s = 9.0 if long else 2.0
        request = expect_request(transfer_id, attempt, chain, source, timeout_s)
        known = self.twins.get((transfer_id, attempt))
        old = self.current(transfer_id)
        highest = self.attempts.get(transfer_id, 0)
        before = self.pool.references.copy()
        try:
            ticket = self.ledger.expect(request, CHAINS[chain], 1, ROUTES, OWN, self.now)
        except StaleAttempt:
            assert attempt < highest or (known and (known.gone or known.over not in (None, TransferState.COMPLETE)))
            assert self.pool.references == before
            return
        except NoFreeBlocks:
            assert known is None
            if old and attempt > highest:
                self.finish(old, TransferState.FAILED, release=True)
            else:
                assert self.pool.references == before
            return
        if known:
            assert ticket is known.ticket
            return
        assert attempt > highest
        if old:
            self.finish(old, TransferState.FAILED, release=True)
        missing = {block.hash for block in ticket.missing}
        assert all(self.pool.pending[block.block_id] == block.hash for block in ticket.missing)
        assert [CHAINS[chain][block.index] for block in ticket.missing] == [block.hash for block in ticket.missing]
        for block_hash in set(CHAINS[chain]) - missing:
            assert self.pool.lookup(block_hash) is not None or self.pool.is_pending(block_hash)
        twin = Twin(ticket, source, self.now + int(timeout_s * NS))
        self.twins[transfer_id, attempt] = twin
        self.attempts[transfer_id] = attempt
        twin.settle()

    @rule(transfer_id=IDS, size=st.integers(1, 3))
    def message(self, transfer_id: TransferId, size: int) -> None:
        """The source's ranks send one message; each report may be delivered late, twice or out of order."""
        self.put_on_wire(transfer_id, size)

    @rule(transfer_id=IDS, size=st.integers(1, 3))
    def message_in_good_order(self, transfer_id: TransferId, size: int) -> None:
        before = len(self.wire)
        self.put_on_wire(transfer_id, size)
        fresh, self.wire = self.wire[before:], self.wire[:before]
        for report in fresh:
            self.receive(report)

    @rule(pick=PICK)
    def progress(self, pick: int) -> None:
        """Nothing goes wrong for a moment, so that some lives are long."""
        waiting = [key for key in self.twins if self.ledger.is_waiting(key[0])]
        if waiting:
            self.message_in_good_order(waiting[pick % len(waiting)][0], 2)
        if self.planned and pick % 2:
            self.run(self.planned.pop())

    def put_on_wire(self, transfer_id: TransferId, size: int) -> None:
        key = transfer_id, self.attempts.get(transfer_id, 0)
        if key not in self.twins or key in self.discarded:
            return
        twin = self.twins[key]
        start = self.num_sent_blocks[key]
        blocks = twin.ticket.missing[start : start + size]
        if not blocks:
            return
        seq = self.num_sent[key]
        self.num_sent[key] += 1
        self.num_sent_blocks[key] += len(blocks)
        for rank in (0, 1):
            report = Received(
                *key, seq, twin.source, rank, 0, [b.hash for b in blocks], [b.block_id for b in blocks], 100
            )
            self.wire.append(report)
            self.staged.setdefault(key, set()).add((seq, (rank, 0)))

    @precondition(lambda self: self.wire)
    @rule(pick=PICK, again=st.booleans())
    def deliver(self, pick: int, again: bool) -> None:
        report = self.wire[pick % len(self.wire)]
        if not again:
            self.wire.remove(report)
        self.receive(report)

    def receive(self, report: Received) -> None:
        key = report.transfer_id, report.attempt
        twin = self.twins.get(key)
        imports = self.ledger.received(report)
        for planned in imports:
            assert twin is not None
            assert twin.over is None
            assert twin.end is None
            assert not set(planned.block_ids) & twin.planned
            assert set(planned.block_ids) <= twin.wanted
            assert {route for seq, route in self.staged[key] if seq == planned.seq} == ROUTES
            twin.planned |= set(planned.block_ids)
        self.planned += imports

    @rule(transfer_id=IDS, newer=NEWER, seq=st.integers(0, 2), what=st.integers(0, 4), luck=RARELY)
    def nonsense(self, transfer_id: TransferId, newer: int, seq: int, what: int, luck: bool) -> None:
        """Blocks nobody asked for, ranks that do not exist, transfers never heard of."""
        key = transfer_id, max(1, self.attempts.get(transfer_id, 0) + newer - luck)
        twin = self.twins.get(key)
        blocks = twin.ticket.missing[:1] if twin else []
        hashes = [b.hash for b in blocks]
        ids = [b.block_id for b in blocks]
        if what == 0:
            hashes, ids = [BlockHash(b"x" * 16)], [BlockId(0)]
        elif what == 1:
            hashes = []
        elif what == 2:
            ids = [BlockId(i + 1) for i in ids]
        source = SOURCES[0] if twin is None else twin.source
        route = (7, 0) if what == 3 else (0, 0)
        if what == 4:
            source = Peer(source.group, Epoch(99))
        before = self.ledger.counters.refused
        assert self.ledger.received(Received(*key, 100 + seq, source, *route, hashes, ids, 100)) == []
        if self.ledger.counters.refused > before:
            self.finish(twin, TransferState.FAILED)
        else:
            assert twin is None or twin.over or twin.end

    @precondition(lambda self: self.planned)
    @rule(pick=PICK, twice=st.booleans())
    def step(self, pick: int, twice: bool) -> None:
        self.run(self.planned.pop(pick % len(self.planned)), twice)

    def run(self, planned: Import, twice: bool = False) -> None:
        key = planned.transfer_id, planned.attempt
        staged = {entry for entry in self.staged[key] if entry[0] == planned.seq}
        assert {route for _, route in staged} == ROUTES, "a discard has taken the payload of a planned import"
        assert all(block_id in self.pool.pending for block_id in planned.block_ids), "the copy hits a freed block"
        self.staged[key] -= staged
        names = [self.pool.pending[block_id] for block_id in planned.block_ids]
        for _ in range(1 + twice):
            self.ledger.imported(planned)
        twin = self.twins[key]
        twin.pinned |= {block_id for name in names if (block_id := self.pool.lookup(name)) is not None}
        twin.arrived |= set(planned.block_ids)
        twin.num_bytes += 200
        twin.settle()

    @rule(transfer_id=IDS, newer=NEWER, luck=RARELY)
    def end(self, transfer_id: TransferId, newer: int, luck: bool) -> None:
        attempt = max(1, self.attempts.get(transfer_id, 0) + newer - luck)
        self.ledger.end(transfer_id, attempt, "cancelled")
        twin = self.twins.get((transfer_id, attempt))
        if twin and twin.over is None:
            self.finish(twin, TransferState.FAILED)

    @precondition(lambda self: self.planned or self.wire)
    @rule(source=st.sampled_from(SOURCES), luck=RARELY)
    def link_down(self, source: Peer, luck: bool) -> None:
        if not luck:
            return
        self.ledger.link_down(source, "gone")
        for twin in self.twins.values():
            if twin.source == source and twin.over is None and twin.planned != twin.wanted:
                self.finish(twin, TransferState.FAILED)

    @rule(seconds=st.sampled_from([0.2, 0.5, 3.0]))
    def wait(self, seconds: float) -> None:
        self.now += int(seconds * NS)
        self.ledger.expire(self.now)
        for twin in self.twins.values():
            if twin.deadline_ns <= self.now and not twin.gone:
                self.finish(twin, TransferState.EXPIRED, release=True)

    @rule(transfer_ids=st.lists(IDS, max_size=3))
    def renew(self, transfer_ids: list[TransferId]) -> None:
        self.ledger.renew(transfer_ids, 4.0, self.now)
        for transfer_id in transfer_ids:
            if twin := self.current(transfer_id):
                twin.deadline_ns = max(twin.deadline_ns, self.now + 4 * NS)

    @rule(transfer_id=IDS, luck=RARELY)
    def release(self, transfer_id: TransferId, luck: bool) -> None:
        if self.ledger.is_waiting(transfer_id) and not luck:
            return
        self.ledger.release(transfer_id)
        self.finish(self.current(transfer_id), TransferState.FAILED, release=True)

    @rule(block=st.sampled_from(sorted({h for chain in CHAINS for h in chain})), evict=RARELY)
    def others(self, block: BlockHash, evict: bool) -> None:
        """Compute blocks that may be on their way here, too; the pool drops what nobody holds."""
        if evict:
            self.pool.evict()
        else:
            self.pool.compute(block)

    @invariant()
    def agrees(self) -> None:
        self.ledger.check_invariants()
        assert self.pool.references == self.ledger.references()
        for event in self.ledger.take_events(self.now):
            key = event.transfer_id, event.attempt
            assert key not in self.events, "a transfer ends once"
            self.events[key] = event.state
            twin = self.twins[key]
            assert (event.num_blocks, event.num_bytes) == (len(twin.arrived), twin.num_bytes)
            assert event.end_ns == self.now
        assert self.events == {key: twin.over for key, twin in self.twins.items() if twin.over}
        for discard in self.ledger.take_discards():
            key = discard.transfer_id, discard.attempt
            assert all((planned.transfer_id, planned.attempt) != key for planned in self.planned)
            self.staged.pop(key, None)
            if key in self.twins:
                self.discarded.add(key)
        for transfer_id in "abc":
            twin = self.current(TransferId(transfer_id))
            assert self.ledger.is_waiting(TransferId(transfer_id)) == (twin is not None and twin.over is None)
        alive = [twin.deadline_ns for twin in self.twins.values() if not twin.gone]
        assert self.ledger.next_deadline_ns() == min(alive, default=None)
        for key, twin in self.twins.items():
            if twin.over and not twin.gone:
                held = self.ledger.references()
                assert all(held[block_id] for block_id in twin.pinned), f"{key} lost its pins before it was released"

    def teardown(self) -> None:
        for planned in self.planned:
            self.run(planned)
        self.planned.clear()
        self.wait(1000)
        self.agrees()
        for report in self.wire:
            self.receive(report)
        self.agrees()
        assert self.ledger.ids() == []
        assert not self.pool.references
        assert not self.pool.pending
        assert not any(self.staged.values()), "ranks keep payloads that nobody will fetch or discard"


class OutboundMachine(RuleBasedStateMachine):
    """`open`: per transfer, what may still be sent. A block is pinned once for each message that is in flight."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = FakePool(50)
        self.ledger = Outbound(self.pool, blocks_per_message=2)
        self.now = 0
        self.open: dict[Key, list[TicketBlock]] = {}
        self.deadlines: dict[Key, int] = {}
        self.destinations: dict[Key, Peer] = {}
        self.attempts: dict[TransferId, int] = {}
        self.flying: dict[tuple[TransferId, int, int], tuple[Send, set[int]]] = {}
        self.num_planned: Counter[Key] = Counter()
        self.prefilled: set[TransferId] = set()
        self.failed: list[Key] = []

    def check(self, sends: list[Send], visible: set[BlockHash]) -> None:
        sent: Counter[Key] = Counter()
        for send in sends:
            key = send.transfer_id, send.attempt
            assert 1 <= len(send.hashes) <= 2
            assert send.seq == self.num_planned[key], "messages are numbered without gaps"
            self.num_planned[key] += 1
            assert send.destination == self.destinations[key]
            assert send.source_block_ids == [self.pool.sealed[h] for h in send.hashes]
            wanted = {block.hash: block for block in self.open[key]}
            assert [wanted[h].block_id for h in send.hashes] == send.destination_block_ids
            assert [wanted[h].index for h in send.hashes] == sorted(wanted[h].index for h in send.hashes)
            self.open[key] = [block for block in self.open[key] if block.hash not in send.hashes]
            self.flying[*key, send.seq] = (send, set())
            sent[key] += 1
        for key, blocks in self.open.items():
            assert not {block.hash for block in blocks} & visible, f"{key}: a visible block was not sent"

    @rule(
        transfer_id=IDS,
        newer=NEWER,
        chain=st.integers(0, 7),
        skip=st.integers(0, 5),
        peer=st.sampled_from(SOURCES),
        long=st.booleans(),
    )
    def send(self, transfer_id: TransferId, newer: int, chain: int, skip: int, peer: Peer, long: bool) -> None:
        attempt = max(1, self.attempts.get(transfer_id, 0) + newer)
        key = transfer_id, attempt
        blocks = [TicketBlock(i, h, BlockId(50 + i)) for i, h in enumerate(CHAINS[chain]) if i >= skip]
        ticket = Ticket(
            transfer_id=transfer_id,
            attempt=attempt,
            destination=GroupAddress(peer, 1, b"f", []),
            missing=blocks[::-1],
            timeout_s=9.0 if long else 2.0,
        )
        known = attempt <= self.attempts.get(transfer_id, 0)
        if not known:
            self.open.pop((transfer_id, self.attempts.get(transfer_id, 0)), None)
            self.attempts[transfer_id] = attempt
            self.open[key] = blocks
            self.destinations[key] = peer
            self.deadlines[key] = self.now + int(ticket.timeout_s * NS)
        sends = self.ledger.send(ticket, self.now)
        assert not (known and sends), "a repeated or older ticket sends nothing"
        self.check(sends, set() if known else {b.hash for b in blocks} & self.pool.sealed.keys())
        if not known and transfer_id in self.prefilled and self.open[key]:
            self.fail(key)

    @rule(transfer_id=IDS, over=RARELY)
    def prefill(self, transfer_id: TransferId, over: bool) -> None:
        """Once a prompt is computed, what is not sealed never will be."""
        if not over:
            self.ledger.prefill_begins(transfer_id)
            self.prefilled.discard(transfer_id)
            return
        self.ledger.prefill_over(transfer_id)
        self.prefilled.add(transfer_id)
        key = transfer_id, self.attempts.get(transfer_id, 0)
        if self.open.get(key):
            self.fail(key)

    @rule(chain=st.integers(0, 7), first=st.integers(0, 4), count=st.integers(1, 4), again=st.booleans())
    def sealed(self, chain: int, first: int, count: int, again: bool) -> None:
        hashes = CHAINS[chain][first : first + count][::-1]
        for block_hash in hashes:
            self.pool.compute(block_hash)
        visible = {h for h in hashes if h in self.pool.sealed}
        self.check(self.ledger.sealed(hashes), visible)
        if again:
            assert self.ledger.sealed(hashes) == []

    @rule()
    def evict(self) -> None:
        self.pool.evict()
        for send, _ in self.flying.values():
            assert [self.pool.sealed.get(h) for h in send.hashes] == send.source_block_ids, "a block left in mid-flight"

    @precondition(lambda self: self.flying)
    @rule(pick=PICK, rank=st.integers(0, 1), fails=st.booleans())
    def report(self, pick: int, rank: int, fails: bool) -> None:
        key = list(self.flying)[pick % len(self.flying)]
        self.sent(key, rank, "broken" if fails and pick % 3 == 0 else None)

    def sent(self, key: tuple[TransferId, int, int], rank: int, error: str | None) -> None:
        _, ranks = self.flying[key]
        if error and rank not in ranks:
            self.fail(key[:2])
        ranks.add(rank)
        if len(ranks) == 2:
            del self.flying[key]
        self.ledger.sent(Sent(*key, rank, error), 2)

    @rule(transfer_id=IDS, newer=NEWER, seq=st.integers(0, 6), rank=st.integers(-1, 3))
    def nonsense(self, transfer_id: TransferId, newer: int, seq: int, rank: int) -> None:
        key = (transfer_id, self.attempts.get(transfer_id, 0) + newer, seq)
        if key not in self.flying or rank not in (0, 1):
            self.ledger.sent(Sent(*key, rank, "broken"), 2)

    def fail(self, key: Any) -> None:
        """For a reason that the destination cannot know: told once, unless the transfer is over."""
        if key in self.open and (self.open[key] or any(flight[:2] == key for flight in self.flying)):
            self.failed.append(key)
        self.stop(key)

    def stop(self, key: Any) -> None:
        self.open.pop(key, None)

    @rule(transfer_id=IDS, newer=NEWER, luck=RARELY)
    def end(self, transfer_id: TransferId, newer: int, luck: bool) -> None:
        attempt = max(1, self.attempts.get(transfer_id, 0) + newer - luck)
        self.ledger.end(transfer_id, attempt)
        self.stop((transfer_id, attempt))

    @rule(peer=st.sampled_from(SOURCES), luck=RARELY)
    def link_down(self, peer: Peer, luck: bool) -> None:
        if not luck:
            return
        self.ledger.link_down(peer, "gone")
        for key in [key for key in self.open if self.destinations[key] == peer]:
            self.fail(key)

    @rule(seconds=st.sampled_from([0.2, 0.5, 3.0]))
    def wait(self, seconds: float) -> None:
        self.now += int(seconds * NS)
        self.ledger.expire(self.now)
        for key in [key for key in self.open if self.deadlines[key] <= self.now]:
            self.fail(key)

    @rule(transfer_id=IDS)
    def renew(self, transfer_id: TransferId) -> None:
        self.ledger.renew([transfer_id], 4.0, self.now)
        key = transfer_id, self.attempts.get(transfer_id, 0)
        if key in self.open and (self.open[key] or any(k[:2] == key for k in self.flying)):
            self.deadlines[key] = max(self.deadlines[key], self.now + 4 * NS)

    @invariant()
    def agrees(self) -> None:
        self.ledger.check_invariants()
        pins = Counter(b for send, _ in self.flying.values() for b in send.source_block_ids)
        assert self.ledger.references() == pins
        assert self.pool.references == pins
        alive = {key[0] for key in self.flying} | {key[0] for key, blocks in self.open.items() if blocks}
        assert self.ledger.ids() == sorted(alive)
        failed, self.failed = self.failed, []
        events = self.ledger.take_events()
        assert sorted((event.transfer_id, event.attempt) for event in events) == sorted(failed)
        assert all(event.state is TransferState.FAILED and event.reason for event in events)
        for discard in self.ledger.take_discards():
            assert not self.open.get((discard.transfer_id, discard.attempt)), "a live transfer must not be discarded"

    def teardown(self) -> None:
        self.wait(1000)
        for key in list(self.flying):
            for rank in {0, 1} - self.flying[key][1]:
                self.sent(key, rank, None)
        self.agrees()
        assert self.ledger.ids() == []
        assert not self.pool.references


FEW = settings(max_examples=150, stateful_step_count=50, deadline=None)
TestInbound = InboundMachine.TestCase
TestInbound.settings = FEW
TestOutbound = OutboundMachine.TestCase
TestOutbound.settings = FEW


def test_layouts_must_agree() -> None:
    """Guards against leases for blocks that could never be used."""
    pool = FakePool(9)
    with pytest.raises(IncompatiblePeer, match="model, KV dtype or block size"):
        Inbound(pool).expect(
            expect_request(TransferId("t"), 1, 0, SOURCES[0], fingerprint=b"?"), CHAINS[0], 1, ROUTES, OWN, 0
        )
    assert not pool.references


def test_everything_is_here() -> None:
    """Guards against a request that waits for a transfer with nothing to transfer."""
    pool = FakePool(9)
    ledger = Inbound(pool)
    for block_hash in CHAINS[0]:
        pool.compute(block_hash)
    ticket = ledger.expect(expect_request(TransferId("t"), 1, 0, SOURCES[0]), CHAINS[0], 1, ROUTES, OWN, 0)
    assert ticket.missing == []
    assert [event.state for event in ledger.take_events(1)] == [TransferState.COMPLETE]
    assert not ledger.is_waiting(TransferId("t"))
    pool.evict()
    assert len(pool.sealed) == 5, "pinned until the sequence has its own references"
    ledger.release(TransferId("t"))
    pool.evict()
    assert not pool.sealed


def test_memory_of_ended_transfers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a ledger that grows with every request ever served."""
    monkeypatch.setattr("kvferry.runtime.transfer.ledger.MAX_REMEMBERED", 10)
    pool = FakePool(9)
    ledger = Inbound(pool)
    for i in range(30):
        ledger.expect(expect_request(TransferId(f"t{i}"), 1, 0, SOURCES[0]), CHAINS[0], 1, ROUTES, OWN, 0)
        ledger.release(TransferId(f"t{i}"))
    with pytest.raises(StaleAttempt):
        ledger.expect(expect_request(TransferId("t29"), 1, 0, SOURCES[0]), CHAINS[0], 1, ROUTES, OWN, 0)
    assert len(ledger._ended._attempts) == 10
