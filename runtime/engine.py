"""One engine: pool, scheduler, ledgers and an executor, composed. Calls in, `step()`, events out.

Not thread-safe and without I/O: everything is called from one thread, time comes from an injected clock, and the
forward pass is an injected function (one rank's, or a whole group's).

    step:  expire leases ─▶ imports (sealed at once: every rank copies them before any row) ─▶ scheduler.plan
           ─▶ execute on all ranks ─▶ scheduler.commit ─▶ ends, sends of what was sealed, events
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from functools import partial

import msgspec

from kvferry.runtime.config import EngineConfig
from kvferry.runtime.errors import (
    DeadlineExceeded,
    InvalidArgument,
    InvariantBroken,
    KvferryError,
    NoFreeBlocks,
    QueueFull,
)
from kvferry.runtime.ids import BlockHash, Peer, SequenceKey, TransferId
from kvferry.runtime.kv.groups import KVGroups
from kvferry.runtime.kv.hashing import hash_chain, salted_root
from kvferry.runtime.kv.pools import Pools
from kvferry.runtime.kv.table import TableKeeper
from kvferry.runtime.meters import Meters
from kvferry.runtime.reports import EngineAudit, EngineLoad, OnEvicted, StepOutput
from kvferry.runtime.request import FinishReason, SequenceRequest, TokenEvent, check_length
from kvferry.runtime.scheduler import Scheduler
from kvferry.runtime.sequence import Sequence
from kvferry.runtime.speculation.speculator import Proposer, make_speculator
from kvferry.runtime.step import CloseLink, OpenLink, SampledToken, SampleInput, StepPlan, StepResult
from kvferry.runtime.transfer.inbound import Inbound
from kvferry.runtime.transfer.outbound import MESSAGE_BYTES, Outbound
from kvferry.runtime.transfer.plan import copy_plan
from kvferry.runtime.transfer.ticket import (
    ExpectRequest,
    GroupAddress,
    LinkReport,
    Received,
    Sent,
    Ticket,
)

RECLAIM_AFTER_NS = 500_000_000
"""Blocks on their way to sequences that wait usually arrive sooner, and then it runs again by itself."""

Execute = Callable[[StepPlan, list[SampleInput]], StepResult]


class Engine:
    """The brain of one group; lives on its rank 0."""

    def __init__(
        self,
        config: EngineConfig,
        kv: KVGroups,
        hash_root: bytes,
        address: GroupAddress,
        max_context: int,
        execute: Execute,
        clock: Callable[[], int] = time.time_ns,
        proposer: Proposer | None = None,
    ) -> None:
        self.config = config
        self.kv = kv
        self.address = address
        self.hash_root = hash_root
        self.max_context = kv.max_context(max_context)
        self.pools = Pools(kv, config.cache.eviction)
        self.pool = self.pools.pools[0]
        """Of the main block group."""
        keepers = [
            TableKeeper(group, pool, config.scheduler.max_batch_tokens)
            for group, pool in zip(kv.groups, self.pools.pools, strict=True)
        ]
        self._speculator = make_speculator(config.speculation, self.max_context, clock, proposer)
        self.scheduler = Scheduler(
            config.scheduler,
            keepers,
            self._may_start,
            self._leave_transfer,
            self._waits_for,
            self._holds_blocks,
            self._speculator,
        )
        self.inbound = Inbound(self.pools)
        # A window's shorter prefix needs blocks further ahead, which are evicted sooner: all of it, or nothing.
        whole = all(group.window is None for group in kv.groups)
        most = max(1, MESSAGE_BYTES // max(group.layout.block_bytes for group in kv.groups))
        self.outbound = Outbound(self.pools, min(config.transfer.blocks_per_message, most), partial=whole)
        self.meters = Meters()
        self._execute = execute
        self._clock = clock
        self._plan = StepPlan(step=0)
        """Transfer commands collected for the next step."""
        self._events: list[TokenEvent] = []
        self._adopters: dict[TransferId, set[SequenceKey]] = {}
        """Waiting sequences that will take over a transfer's lease."""
        self._senders: dict[TransferId, int] = {}
        """Live prefill legs of each transfer from here."""
        self._handed_over: set[TransferId] = set()
        """Those of them that carry at least one sequence away."""
        self._num_submitted = 0
        self._earliest_deadline_ns: int | None = None
        """No sequence has an earlier one."""
        self._stuck_since_ns: int | None = None
        """Since when sequences have waited for blocks while none ran."""
        self._changed = False
        """Something happened since the last step that found nothing to do."""

    # ------------------------------------------------------------- sequences
    def submit(self, request: SequenceRequest, now_ns: int) -> bool:
        """Queues a sequence. Idempotent by key; a newer attempt replaces an older one. Errors come as events.

        False: it is known, or older than what is known; no further events will come for it.
        """
        self._changed = True
        key = request.key
        if (known := self.scheduler.latest(key)) is not None:
            if known.key.attempt >= key.attempt:
                return False
            self.cancel(known.key)
        try:
            self._check(request, now_ns)
        except KvferryError as error:
            self._fail(key, len(request.output_token_ids), error)
            return True
        root = salted_root(self.hash_root, request.cache_salt)
        tokens = [*request.prompt_token_ids, *request.output_token_ids]
        self._num_submitted += 1
        hashes = hash_chain(root, tokens, self.kv.block_size)
        step_ns = int(self.config.scheduler.priority_step_s * 1e9)
        sequence = Sequence(request, root, hashes, self._num_submitted, step_ns)
        self.scheduler.add(sequence)
        self._earliest_deadline_ns = _earliest(self._earliest_deadline_ns, request.deadline_ns)
        if request.transfer_id is not None:
            self._adopters.setdefault(request.transfer_id, set()).add(key)
        if (sends := request.sends_transfer_id) is not None:
            self._senders[sends] = self._senders.get(sends, 0) + 1
            self.outbound.prefill_begins(sends)
        return True

    def _check(self, request: SequenceRequest, now_ns: int) -> None:
        check_length(len(request.prompt_token_ids) + len(request.output_token_ids), self.max_context)
        if request.deadline_ns is not None and request.deadline_ns <= now_ns:
            raise DeadlineExceeded(f"request {request.key.request_id}: its deadline passed before it was queued")
        waiting, limit = len(self.scheduler.waiting), self.config.scheduler.max_waiting
        if waiting >= limit and not request.output_token_ids:  # what has begun elsewhere is owed to its client
            retry = self.meters.seconds_to_prefill(self._waiting_tokens())
            raise QueueFull(f"{self.address.peer}: {waiting} sequences wait, at most {limit}", max(retry, 0.1))

    def cancel(self, key: SequenceKey) -> None:
        """Ends a sequence at this step border. Unknown keys are ignored."""
        self._changed = True
        sequence = self.scheduler.get(key)
        if sequence is not None:
            self._end(sequence)
            self._events.append(
                TokenEvent(key=key, position=sequence.num_output, token_id=None, finish_reason=FinishReason.CANCELLED)
            )

    def _end(self, sequence: Sequence) -> None:
        self.scheduler.remove(sequence)
        self._leave_transfer(sequence)
        if (sends := sequence.request.sends_transfer_id) is not None:
            self._senders[sends] -= 1
            if not self._senders[sends]:
                del self._senders[sends]
                self.outbound.prefill_over(sends, sends in self._handed_over)
                self._handed_over.discard(sends)

    def _fail(self, key: SequenceKey, position: int, error: KvferryError) -> None:
        self._events.append(
            TokenEvent(key=key, position=position, token_id=None, error_label=error.label, error_message=str(error))
        )

    # ------------------------------------------------------------- transfers
    def expect(self, request: ExpectRequest, now_ns: int) -> Ticket:
        """Makes room for blocks to come. Raises `NoFreeBlocks`, `IncompatiblePeer`, `StaleAttempt`."""
        if request.source.peer == self.address.peer:
            raise InvalidArgument("source", str(request.source.peer), "a group does not send blocks to itself")
        root = salted_root(self.hash_root, request.cache_salt)
        hashes = hash_chain(root, request.token_ids, self.kv.block_size)
        layout = self.kv.main.layout  # heads are cut alike in all groups
        source_layout = msgspec.structs.replace(layout, tp_size=request.source.tp_size)
        routes = {(r.source_rank, r.destination_rank) for r in copy_plan(source_layout, layout)}
        needed = [group.needed(hashes) for group in self.kv.groups]
        for i, (pool, blocks) in enumerate(zip(self.pools.pools, needed, strict=True)):
            # A sequence that waits for its blocks needs one more for its tail: leave that much to each.
            spare = 1 + len(self._adopters) + self.scheduler.num_spared(i)
            wanted = pool.num_to_hold([block.hash for block in blocks])
            if (free := pool.num_available) < wanted + spare:
                raise NoFreeBlocks(f"{self.address.peer}: {free} KV blocks available, {wanted} + {spare} wanted")
        ticket = self.inbound.expect(request, needed, self.kv.block_size, routes, self.address, now_ns)
        self._changed = True
        if ticket.missing:
            self.scheduler.passed_by_transfer()
            self._plan.opens.append(OpenLink(request.source, inbound=True))
        return ticket

    def send(self, ticket: Ticket, now_ns: int) -> None:
        """Sends what the ticket misses: sealed blocks now, others the moment they are."""
        self._changed = True
        self._plan.opens.append(OpenLink(ticket.destination, inbound=False))
        self._plan.sends += self.outbound.send(ticket, now_ns)

    def end_transfer(self, transfer_id: TransferId, attempt: int, reason: str) -> None:
        """Nothing more of it is wanted or will come, on either side. Unknown ids are ignored."""
        self._changed = True
        self.inbound.end(transfer_id, attempt, reason)
        self.outbound.end(transfer_id, attempt)
        if transfer_id not in self._adopters:
            self.inbound.release(transfer_id, attempt)

    def shorten_transfer(self, transfer_id: TransferId, attempt: int, lacking: list[BlockHash]) -> None:
        """Its source will not send these blocks; at the destination. Unknown ids are ignored."""
        self._changed = True
        self.inbound.shorten(transfer_id, attempt, lacking)

    def renew(self, transfer_ids: list[TransferId], timeout_s: float, now_ns: int) -> None:
        self.inbound.renew(transfer_ids, timeout_s, now_ns)
        self.outbound.renew(transfer_ids, timeout_s, now_ns)

    def peer_gone(self, peer: Peer) -> None:
        """That incarnation is dead: what it still owed has failed."""
        self._changed = True
        self._plan.closes.append(CloseLink(peer))
        self.inbound.link_down(peer, "the peer is gone")
        self.outbound.link_down(peer, "the peer is gone")

    def report(self, report: LinkReport) -> None:
        """What a rank says of its links."""
        self._changed = True
        if isinstance(report, Received):
            self._plan.imports += self.inbound.received(report)
        elif isinstance(report, Sent):
            self.outbound.sent(report, self.kv.tp_size)
        else:
            self.inbound.link_down(report.peer, report.reason)
            self.outbound.link_down(report.peer, report.reason)

    def _may_start(self, sequence: Sequence) -> bool:
        transfer_id = sequence.request.transfer_id
        return transfer_id is None or not self.inbound.is_waiting(transfer_id)

    def _holds_blocks(self, sequence: Sequence) -> bool:
        transfer_id = sequence.request.transfer_id
        return transfer_id in self._adopters and transfer_id is not None and self.inbound.holds_blocks(transfer_id)

    def _waits_for(self, sequence: Sequence, block_hash: BlockHash) -> bool:
        """A prefill leg waits for no transfer: that one's source may be waiting for what the leg sends."""
        num_pending = self.pools.num_pending(block_hash)
        if sequence.request.sends_transfer_id is not None:
            num_pending -= self.inbound.num_expected(block_hash)
        return num_pending > 0

    def _leave_transfer(self, sequence: Sequence) -> None:
        transfer_id = sequence.request.transfer_id
        adopters = self._adopters.get(transfer_id) if transfer_id is not None else None
        if transfer_id is None or adopters is None:
            return
        adopters.discard(sequence.key)
        if not adopters:
            del self._adopters[transfer_id]
            self.inbound.release(transfer_id)

    # ------------------------------------------------------------- stepping
    def has_work(self) -> bool:
        """Whether `step` could do something now. False also while all that waits, waits for others."""
        return self._changed or bool(self.scheduler.running)

    def next_deadline_ns(self) -> int | None:
        """When `step` must be called even if nothing happens until then."""
        deadlines = [self.inbound.next_deadline_ns(), self.outbound.next_deadline_ns()]
        deadlines += [s.request.deadline_ns for s in self.scheduler.sequences()]
        deadlines.append(None if self._stuck_since_ns is None else self._stuck_since_ns + RECLAIM_AFTER_NS)
        return _earliest(*deadlines)

    def step(self, now_ns: int, on_evicted: OnEvicted | None = None) -> StepOutput:
        """One forward pass (or none, when nothing can run). An exception from it means: this process must end.

        `on_evicted` is told what became visible and what vanished, if anything vanished, before a step with prefill:
        that one may take long, and meanwhile nobody should count on the blocks. The output tells the rest.
        """
        self._expire(now_ns)
        reclaimed = self._is_stuck_for_long(now_ns) and self._reclaim(now_ns)
        plan, self._plan = self._plan, StepPlan(step=self._plan.step + 1)
        for command in plan.imports:
            self.inbound.imported(command)
        batch = self.scheduler.plan(now_ns)
        # After all that gives blocks back: the plan that uses one again must be the one that takes it from a link.
        plan.discards = [*self.inbound.take_discards(), *self.outbound.take_discards()]
        plan.grants, plan.revokes = self.inbound.take_grants()
        if not self.scheduler.is_stuck:
            self._stuck_since_ns = None
        elif self._stuck_since_ns is None:
            self._stuck_since_ns = now_ns
        plan.rows = batch.rows
        if on_evicted is not None and batch.num_prefill_tokens and self.pools.has_evicted():
            on_evicted(*self.pools.take_events())
        begin = self._clock()
        result = self._execute(plan, batch.samples)
        end = self._clock()
        drawn = self.scheduler.commit(batch, result.sampled)
        seconds = (end - begin) / 1e9
        if self._speculator is not None and batch.num_decodes:
            if not batch.num_prefill_tokens:
                self._speculator.observe_step(batch.num_decodes, batch.num_drafted, batch.num_accepted, seconds)
            seconds += self._speculator.spent_s
        self.meters.step(batch, seconds)
        stored, removed = self.pools.take_events()
        # Before ends, which say that no more will be sealed.
        self._plan.sends += self.outbound.sealed(self.pools.take_sealed())
        for sequence, tokens in drawn:
            self._deliver(sequence, tokens, end)
        transfers = [*self.inbound.take_events(end), *self.outbound.take_events(end)]
        self.meters.transfers(transfers)
        events, self._events = self._events, []
        self._changed = bool(plan.rows or plan.imports or self._plan.sends or stored or reclaimed)
        return StepOutput(events, transfers, stored, removed)

    def _deliver(self, sequence: Sequence, tokens: list[SampledToken], end_ns: int) -> None:
        reason = sequence.finish_reason(self.max_context)
        position = sequence.num_output - len(tokens)
        for i, token in enumerate(tokens):
            first = not sequence.reported
            sequence.reported = True
            stalled_ns, sequence.stalled_ns = sequence.stalled_ns, 0
            if first:
                self.meters.first_token(sequence)
            self.meters.output_tokens += 1
            self._events.append(
                TokenEvent(
                    key=sequence.key,
                    position=position + i,
                    token_id=token.token_id,
                    finish_reason=reason if i == len(tokens) - 1 else None,
                    logprob=token.logprob,
                    num_cached_tokens=sequence.num_cached or 0,
                    begin_ns=sequence.begin_ns if first else None,
                    end_ns=end_ns if first else None,
                    stalled_ns=stalled_ns,
                )
            )
        sends = sequence.request.sends_transfer_id
        if reason is FinishReason.HANDOFF and sends is not None:
            self._handed_over.add(sends)
        if reason is not None:
            self._end(sequence)

    def _expire(self, now_ns: int) -> None:
        self.inbound.expire(now_ns)
        self.outbound.expire(now_ns)
        if self._earliest_deadline_ns is None or self._earliest_deadline_ns > now_ns:
            return
        self._earliest_deadline_ns = None
        for sequence in self.scheduler.sequences():
            deadline_ns = sequence.request.deadline_ns
            if deadline_ns is None or deadline_ns > now_ns:
                self._earliest_deadline_ns = _earliest(self._earliest_deadline_ns, deadline_ns)
                continue
            self._end(sequence)
            error = DeadlineExceeded(f"request {sequence.key.request_id}: its deadline passed")
            self._fail(sequence.key, sequence.num_output, error)

    def _reclaim(self, now_ns: int) -> bool:
        """Transfers hold the pool, and nothing has been able to run for a while: the last one lets go.

        Those that no sequence waits for yet may come to an end by themselves, unless a peer's prefill that they need
        waits for a prefill leg here.
        """
        for sequence in reversed(self.scheduler.waiting):
            transfer_id = sequence.request.transfer_id
            if transfer_id is not None and transfer_id in self._adopters:
                del self._adopters[transfer_id]
                self.inbound.release(transfer_id)
                return True
        newest = self.inbound.newest()
        if newest is None or all(s.request.sends_transfer_id is None for s in self.scheduler.waiting):
            self._stuck_since_ns = now_ns  # looks again later
            return False
        self.inbound.release(newest)
        return True

    def _is_stuck_for_long(self, now_ns: int) -> bool:
        return self._stuck_since_ns is not None and now_ns - self._stuck_since_ns >= RECLAIM_AFTER_NS

    # ------------------------------------------------------------- views
    def _waiting_tokens(self) -> int:
        return self.scheduler.num_waiting_tokens + sum(n for s in self.scheduler.running if (n := s.num_uncomputed) > 1)

    def load(self) -> EngineLoad:
        scheduler, meters = self.scheduler, self.meters
        return EngineLoad(
            num_waiting=len(scheduler.waiting),
            num_running=len(scheduler.running),
            waiting_tokens=self._waiting_tokens(),
            num_free_blocks=self.pool.num_available,
            num_cached_blocks=self.pool.num_sealed,
            num_leased_blocks=self.pools.num_leased,
            prefill_tokens_per_s=meters.prefill_tokens_per_s,
            decode_step_s=meters.decode_step_s,
            link_bytes_per_s=meters.link_bytes_per_s,
            num_preemptions=scheduler.num_preemptions,
            cached_tokens_total=meters.cached_tokens,
            prompt_tokens_total=meters.prompt_tokens,
            output_tokens_total=meters.output_tokens,
            received_bytes_total=meters.received_bytes,
            drafted_tokens_total=meters.drafted_tokens,
            accepted_tokens_total=meters.accepted_tokens,
        )

    def audit(self) -> EngineAudit:
        """Checks all invariants, the pool against everybody who holds blocks, and lists what is held."""
        broken = []
        held = Counter(b for s in self.scheduler.running for table in s.tables for b in table.held())
        held += self.inbound.references() + self.outbound.references()
        checks: list[Callable[[], None]] = [
            self.pools.check_invariants,
            self.scheduler.check_invariants,
            self.inbound.check_invariants,
            self.outbound.check_invariants,
            partial(self.pools.check_holders, held),
        ]
        for check in checks:
            try:
                check()
            except InvariantBroken as error:
                broken.append(str(error))
        return EngineAudit(
            broken=broken,
            sequences=[s.key for s in self.scheduler.sequences()],
            inbound=self.inbound.ids(),
            outbound=self.outbound.ids(),
            num_leased_blocks=self.pools.num_leased,
        )

    def cached_hashes(self) -> list[BlockHash]:
        """Of the main block group: what `step` tells of."""
        return self.pool.hashes()


def _earliest(*deadlines_ns: int | None) -> int | None:
    return min((d for d in deadlines_ns if d is not None), default=None)
