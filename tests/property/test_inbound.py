"""Transfers to a group against a naive twin: lost pins, early frees, wrong ends, messages of any kind at any time."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvferry.runtime.errors import IncompatiblePeer, NoFreeBlocks, StaleAttempt
from kvferry.runtime.ids import BlockHash, BlockId, Epoch, Peer, TransferId
from kvferry.runtime.step import Import
from kvferry.runtime.transfer.inbound import Inbound
from kvferry.runtime.transfer.ticket import (
    Received,
    Ticket,
    TransferState,
)
from tests.support.fake_pool import FakePool
from tests.support.ledgers import (
    CHAINS,
    IDS,
    NEWER,
    NS,
    OWN,
    PICK,
    RARELY,
    ROUTES,
    SOURCES,
    Key,
    expect_request,
    named,
)

pytestmark = pytest.mark.core


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
        self.granted: dict[Key, set[BlockId]] = {}
        """Blocks that links of a rank may write."""
        self.holding = 0
        """How many rules more the next plan takes."""
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
            ticket = self.ledger.expect(request, named(CHAINS[chain]), 1, ROUTES, OWN, self.now)
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
        before = self.ledger.counters.refused
        imports = self.ledger.received(report)
        if self.ledger.counters.refused > before:
            assert twin is not None
            assert not set(report.block_ids) <= twin.wanted, "only what is not wanted is refused"
            self.finish(twin, TransferState.FAILED)
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
        self.granted.get(key, set()).difference_update(planned.block_ids)
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

    @rule(transfer_id=IDS, newer=NEWER, last=st.integers(0, 4), luck=RARELY)
    def shorten(self, transfer_id: TransferId, newer: int, last: int, luck: bool) -> None:
        """The source has lost the end of the chain, or says so of what it is sending."""
        attempt = max(1, self.attempts.get(transfer_id, 0) + newer - luck)
        twin = self.twins.get((transfer_id, attempt))
        lacking = [] if twin is None else twin.ticket.missing[last:]
        self.ledger.shorten(transfer_id, attempt, [*(block.hash for block in lacking), BlockHash(b"x" * 16)])
        if twin is not None and twin.over is None and twin.end is None:
            twin.wanted -= {block.block_id for block in lacking} - twin.planned
            twin.settle()

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

    @rule(rules=st.integers(1, 4))
    def compute(self, rules: int) -> None:
        """A step takes longer."""
        self.holding = rules

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
        self.holding -= 1
        if self.holding < 0:
            self.plan()
        for transfer_id in "abc":
            twin = self.current(TransferId(transfer_id))
            assert self.ledger.is_waiting(TransferId(transfer_id)) == (twin is not None and twin.over is None)
        alive = [twin.deadline_ns for twin in self.twins.values() if not twin.gone]
        assert self.ledger.next_deadline_ns() == min(alive, default=None)
        for key, twin in self.twins.items():
            if twin.over and not twin.gone:
                held = self.ledger.references()
                assert all(held[block_id] for block_id in twin.pinned), f"{key} lost its pins before it was released"

    def plan(self) -> None:
        """What ranks do before any row of the next step."""
        for discard in self.ledger.take_discards():
            key = discard.transfer_id, discard.attempt
            assert all((planned.transfer_id, planned.attempt) != key for planned in self.planned)
            self.staged.pop(key, None)
            self.granted.pop(key, None)
            if key in self.twins:
                self.discarded.add(key)
        grants, revokes = self.ledger.take_grants()
        for revoke in revokes:
            self.granted.get((revoke.transfer_id, revoke.attempt), set()).difference_update(revoke.block_ids)
        for grant in grants:
            assert (grant.transfer_id, grant.attempt) not in self.granted
            self.granted[grant.transfer_id, grant.attempt] = set(grant.block_ids)
        for key, block_ids in self.granted.items():
            twin = self.twins[key]
            assert block_ids <= twin.wanted - twin.arrived, "a link writes blocks that the transfer has given back"
            names = {block.block_id: block.hash for block in twin.ticket.missing}
            assert all(self.pool.pending[block_id] == names[block_id] for block_id in block_ids)
            assert twin.over is None or not block_ids
        assert sum(map(len, self.granted.values())) == len(set().union(*self.granted.values()))

    def teardown(self) -> None:
        for planned in self.planned:
            self.run(planned)
        self.planned.clear()
        self.wait(1000)
        self.agrees()
        for report in self.wire:
            self.receive(report)
        self.agrees()
        self.plan()
        assert self.ledger.ids() == []
        assert not any(self.granted.values())
        assert not self.pool.references
        assert not self.pool.pending
        assert not any(self.staged.values()), "ranks keep payloads that nobody will fetch or discard"


TestInbound = InboundMachine.TestCase
TestInbound.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)


def test_layouts_must_agree() -> None:
    """Guards against leases for blocks that could never be used."""
    pool = FakePool(9)
    with pytest.raises(IncompatiblePeer, match="model, KV dtype or block size"):
        Inbound(pool).expect(
            expect_request(TransferId("t"), 1, 0, SOURCES[0], fingerprint=b"?"), named(CHAINS[0]), 1, ROUTES, OWN, 0
        )
    assert not pool.references


def test_everything_is_here() -> None:
    """Guards against a request that waits for a transfer with nothing to transfer."""
    pool = FakePool(9)
    ledger = Inbound(pool)
    for block_hash in CHAINS[0]:
        pool.compute(block_hash)
    ticket = ledger.expect(expect_request(TransferId("t"), 1, 0, SOURCES[0]), named(CHAINS[0]), 1, ROUTES, OWN, 0)
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
        ledger.expect(expect_request(TransferId(f"t{i}"), 1, 0, SOURCES[0]), named(CHAINS[0]), 1, ROUTES, OWN, 0)
        ledger.release(TransferId(f"t{i}"))
    with pytest.raises(StaleAttempt):
        ledger.expect(expect_request(TransferId("t29"), 1, 0, SOURCES[0]), named(CHAINS[0]), 1, ROUTES, OWN, 0)
    assert len(ledger._ended._attempts) == 10


def halfway() -> tuple[FakePool, Inbound, Ticket, Import, Received]:
    """A transfer whose first message is complete, and its last report."""
    pool = FakePool(9)
    ledger = Inbound(pool)
    ticket = ledger.expect(expect_request(TransferId("t"), 1, 0, SOURCES[0]), named(CHAINS[0]), 1, ROUTES, OWN, 0)
    first = ticket.missing[:2]
    for rank in (0, 1):
        report = Received(
            *(TransferId("t"), 1, 0, SOURCES[0], rank, 0),
            *([b.hash for b in first], [b.block_id for b in first], 5, 0.25 * (2 - rank)),
        )
        imports = ledger.received(report)
    return pool, ledger, ticket, imports[0], report


def test_late_message_does_not_take_a_planned_import_with_it() -> None:
    """Guards against a discard that reaches the ranks before the import of the same transfer."""
    pool, ledger, _, planned, report = halfway()
    ledger.end(TransferId("t"), 1, "cancelled")
    assert ledger.received(report) == []
    assert ledger.take_discards() == []
    assert ledger.is_waiting(TransferId("t"))
    ledger.imported(planned)
    assert len(ledger.take_discards()) == 1
    assert [(e.state, e.num_blocks, e.num_bytes) for e in ledger.take_events(1)] == [(TransferState.FAILED, 2, 10)]
    assert sorted(pool.references) == sorted(planned.block_ids), "what has arrived stays, what has not is given back"


def test_a_link_is_timed_while_bytes_flow() -> None:
    """Counting the wait for the source's prefill would make links look so slow that the router shuns transfers."""
    _, ledger, _, planned, _ = halfway()
    ledger.imported(planned)
    ledger.end(TransferId("t"), 1, "cancelled")
    assert [event.link_s for event in ledger.take_events(10**9)] == [0.5], "of two routes at once the slower counts"


def test_repeated_message_is_discarded_at_the_end() -> None:
    """Guards against staged bytes of a message that came twice, in a transfer that went well."""
    _, ledger, ticket, planned, report = halfway()
    ledger.imported(planned)
    assert ledger.received(report) == []
    assert ledger.take_discards() == [], "the rest of the transfer is still wanted"
    rest = ticket.missing[2:]
    for rank in (0, 1):
        last = ledger.received(
            Received(TransferId("t"), 1, 1, SOURCES[0], rank, 0, [b.hash for b in rest], [b.block_id for b in rest], 5)
        )
    ledger.imported(last[0])
    assert [event.state for event in ledger.take_events(1)] == [TransferState.COMPLETE]
    assert len(ledger.take_discards()) == 1
