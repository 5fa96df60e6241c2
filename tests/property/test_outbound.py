"""Transfers from a group against a naive twin: blocks sent twice, never or unpinned; any report at any time."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvferry.runtime.ids import BlockHash, BlockId, Peer, TransferId
from kvferry.runtime.step import Send
from kvferry.runtime.transfer.outbound import Outbound
from kvferry.runtime.transfer.ticket import (
    GroupAddress,
    Sent,
    Ticket,
    TicketBlock,
    TransferState,
)
from tests.support.fake_pool import FakePool
from tests.support.ledgers import CHAINS, IDS, NEWER, NS, PICK, RARELY, SOURCES, Key

pytestmark = pytest.mark.core


class OutboundMachine(RuleBasedStateMachine):
    """`open`: per transfer, what may still be sent. A block is pinned once for each message that is in flight."""

    partial = True

    def __init__(self) -> None:
        super().__init__()
        self.pool = FakePool(50)
        self.ledger = Outbound(self.pool, blocks_per_message=2, partial=self.partial)
        self.now = 0
        self.open: dict[Key, list[TicketBlock]] = {}
        self.deadlines: dict[Key, int] = {}
        self.destinations: dict[Key, Peer] = {}
        self.attempts: dict[TransferId, int] = {}
        self.flying: dict[tuple[TransferId, int, int], tuple[Send, set[int]]] = {}
        self.num_planned: Counter[Key] = Counter()
        self.prefilled: dict[TransferId, bool] = {}
        self.failed: list[Key] = []
        self.shortened: list[tuple[Key, list[BlockHash]]] = []

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
        sealed_only=st.booleans(),
    )
    def send(
        self, transfer_id: TransferId, newer: int, chain: int, skip: int, peer: Peer, long: bool, sealed_only: bool
    ) -> None:
        attempt = max(1, self.attempts.get(transfer_id, 0) + newer)
        key = transfer_id, attempt
        blocks = [TicketBlock(i, h, BlockId(50 + i)) for i, h in enumerate(CHAINS[chain]) if i >= skip]
        ticket = Ticket(
            transfer_id=transfer_id,
            attempt=attempt,
            destination=GroupAddress(peer, 1, b"f", []),
            missing=blocks[::-1],
            timeout_s=9.0 if long else 2.0,
            sealed_only=sealed_only,
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
        unwanted = known or self.prefilled.get(transfer_id) is False
        self.check(sends, set() if unwanted else {b.hash for b in blocks} & self.pool.sealed.keys())
        if known or not self.open[key]:
            return
        if self.prefilled.get(transfer_id) is False:
            self.fail(key)
        elif sealed_only or transfer_id in self.prefilled:
            self.close(key)

    @rule(transfer_id=IDS, over=RARELY, handed_over=st.booleans())
    def prefill(self, transfer_id: TransferId, over: bool, handed_over: bool) -> None:
        """Once a prompt is computed, what is not sealed never will be; and perhaps nobody needs any of it."""
        if not over:
            self.ledger.prefill_begins(transfer_id)
            self.prefilled.pop(transfer_id, None)
            return
        self.ledger.prefill_over(transfer_id, handed_over)
        self.prefilled[transfer_id] = handed_over
        key = transfer_id, self.attempts.get(transfer_id, 0)
        if not handed_over:
            self.fail(key)
        elif self.open.get(key):
            self.close(key)

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

    def close(self, key: Key) -> None:
        """Nothing more will be sealed: what is lacking is named, if there is anything else."""
        if not (self.partial and self.num_planned[key]):
            self.fail(key)
            return
        self.shortened.append((key, [block.hash for block in self.open[key]]))
        self.open[key] = []

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
        shortened, self.shortened = self.shortened, []
        events = self.ledger.take_events(self.now)
        ended = [event for event in events if event.state is TransferState.FAILED]
        assert sorted((event.transfer_id, event.attempt) for event in ended) == sorted(failed)
        goes_on = [event for event in events if event.state is TransferState.ACTIVE]
        assert [((event.transfer_id, event.attempt), event.lacking) for event in goes_on] == shortened
        assert len(ended) + len(goes_on) == len(events)
        assert all(event.reason and bool(event.lacking) == (event in goes_on) for event in events)
        assert all(event.begin_ns <= event.end_ns == self.now for event in events)
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


class WholeOnlyMachine(OutboundMachine):
    partial = False


TestOutbound = OutboundMachine.TestCase
TestWholeOnly = WholeOnlyMachine.TestCase
TestOutbound.settings = TestWholeOnly.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
