"""Owns the life of every request of one gateway: has it placed, follows its legs, replaces what was lost, ends it.

Events are handled at once, in `on_frame` and when membership changes; only what must wait (for a group to live, for a
ticket, for a pause to pass) runs in the request's driver, one task per request in the coordinator's task group.
Deadlines and bounded waits use the event loop's time, instants use the injected clock.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable
from types import TracebackType

import msgspec

from kvferry.cluster.admission import Admission
from kvferry.cluster.budgets import CoordinatorConfig
from kvferry.cluster.findings import audit, check_invariants
from kvferry.cluster.legs import Leg, Record, Sequence, engine_id, leave, request_of
from kvferry.cluster.messages import Audit, StepFrame
from kvferry.cluster.moving import Emptied, Mover, agrees
from kvferry.cluster.placing import Placer
from kvferry.cluster.ports import Clock
from kvferry.cluster.prefix_index import PrefixIndex
from kvferry.cluster.registry import Change, Registry
from kvferry.cluster.router import Router
from kvferry.cluster.stream import RequestStream
from kvferry.cluster.transfers import Transfers
from kvferry.runtime.errors import (
    CallerError,
    Cancelled,
    CapacityError,
    DeadlineExceeded,
    EndedError,
    GroupDied,
    GroupUnavailable,
    InvalidArgument,
    KvferryError,
    QueueFull,
    RetriesExhausted,
    error_of,
)
from kvferry.runtime.ids import Peer, RequestId, SequenceKey, TransferId
from kvferry.runtime.request import FinishReason, Request, TokenEvent
from kvferry.runtime.timeline import Cause, Phase, Timeline


class Coordinator:
    """Use as an async context manager; leaving it cancels what is in flight.

    `on_frame` and `on_group_down` never block and may be called in any order with anything: stale, repeated and
    unknown messages are dropped.
    """

    def __init__(
        self, registry: Registry, router: Router, index: PrefixIndex, clock: Clock, config: CoordinatorConfig
    ) -> None:
        self._registry = registry
        self._router = router
        self._index = index
        self._clock = clock
        self._config = config
        self._records: dict[RequestId, Record] = {}
        self._numbers = itertools.count()
        self._transfers = Transfers(registry, config.transfer_timeout_s, config.expect_timeout_s)
        self._admission = Admission(router, config.max_queue_s, config.max_bypass)
        self._placer = Placer(
            registry,
            router,
            index,
            self._transfers,
            clock,
            self._admission,
            unavailable_timeout_s=config.unavailable_timeout_s,
            priority_step_s=config.priority_step_s,
        )
        self._mover = Mover(
            self._records,
            registry,
            router,
            index,
            self._transfers,
            self._placer,
            clock,
            self._place_anew,
            pause_s=config.retry_pause_s,
            timeout_s=config.transfer_timeout_s,
        )
        self._tasks = asyncio.TaskGroup()
        self._closing = False
        self._idle = asyncio.Event()
        self._mean_request_s = 1.0
        self.num_finished = 0
        self.num_failed = 0
        self.num_cancelled = 0
        self.num_resumed = 0
        """Finished requests that outlived a loss."""
        self.num_moved = 0
        """Sequences that another group took over while they ran."""
        registry.listen(self._on_change)

    async def __aenter__(self) -> Coordinator:
        await self._tasks.__aenter__()
        self._maintenance = self._tasks.create_task(self._maintain(), name="coordinator maintenance")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing = True
        for record in list(self._records.values()):
            self._finish(record, Cancelled(f"request {record.request.request_id}: the gateway is shutting down"))
        self._maintenance.cancel()
        if isinstance(error, Exception):
            kind = error = trace = None  # the body's own error goes on as it is, not wrapped in a group
        await self._tasks.__aexit__(kind, error, trace)

    # ------------------------------------------------------------ API
    @property
    def in_flight(self) -> int:
        return len(self._records)

    @property
    def num_waiting(self) -> int:
        """Requests that wait here for room in some group."""
        return len(self._admission.line.places)

    def open_transfers(self) -> set[TransferId]:
        return self._transfers.open_ids()

    def check_door(self, num_coming: int = 0) -> None:
        """Raises `QueueFull` when `num_coming` and those in flight are too many, `GroupUnavailable` when closed."""
        if self._closing:
            raise GroupUnavailable("the gateway is shutting down; ask another one")
        num, limit = len(self._records) + num_coming, self._config.max_in_flight
        if num >= limit:
            raise QueueFull(
                f"requests in flight={num}: at most {limit} (--max-requests); retry later",
                retry_after_s=max(0.1, self._mean_request_s / limit),
            ).explained(limit="requests")

    def start(self, request: Request) -> RequestStream:
        """Takes a request in.

        Raises `QueueFull` above `max_in_flight`, `max_queue_s` or for a deadline that cannot be met, `InvalidArgument`
        for an id in flight, `GroupUnavailable` when shutting down.
        """
        self.check_door()
        name = engine_id(self._config.gateway, request.request_id)
        if name in self._records:
            raise InvalidArgument("request_id", request.request_id, "is in flight already", "use a new id")
        self._placer.check(request)
        timeline = Timeline(received_ns=request.arrival_ns or self._clock.now_ns())
        record = Record(request, timeline, self._numbers, self._config.gateway)
        for sequence in record.sequences:
            sequence.track.until(self._clock.now_ns(), Phase.GATEWAY)
        record.stream = RequestStream(
            record.timeline,
            record.usage,
            lambda index, num_unread: self._stop(record, index, num_unread),
            lambda error: self._finish(record, error),
            self._clock.now_ns,
            self._config.max_unread_bytes,
        )
        self._records[name] = record
        record.driver = self._tasks.create_task(self._drive(record), name=f"request {request.request_id}")
        return record.stream

    def close_door(self) -> None:
        """From now on `start` refuses; what runs goes on."""
        self._closing = True

    async def idle(self) -> None:
        """Returns once no request is in flight. For one waiter."""
        while self._records:
            self._idle.clear()
            await self._idle.wait()

    async def empty(self, peer: Peer, timeout_s: float) -> Emptied:
        """Has all that runs on a live group go on elsewhere, without a pause where that is possible within `timeout_s`.

        The group gets nothing new from then on. Raises `GroupUnavailable` when no other group could take over; then
        nothing has changed.
        """
        return await self._mover.empty(peer, timeout_s)

    def on_frame(self, peer: Peer, frame: StepFrame) -> None:
        """What one engine step brought. Call it after the registry and the index have seen the frame."""
        if frame.epoch != peer.epoch or self._registry.get(peer) is None:
            return
        self._router.observe(peer, frame.load)
        for report in frame.transfers:
            record = self._records.get(request_of(report.transfer_id))
            if self._transfers.reported(peer, report) and record is not None and record.owns(report.transfer_id):
                record.note_transfer(report)
        for event in frame.tokens:
            record = self._records.get(event.key.request_id)
            if record is not None and 0 <= event.key.index < len(record.sequences):
                self._on_event(record, record.sequences[event.key.index], peer, event)

    def on_group_down(self, peer: Peer, reason: str) -> None:
        """The incarnation is dead: registry, index and router forget it, its peers hear of it, its legs go elsewhere.

        Idempotent; it is `Registry.down`, to which the coordinator listens.
        """
        self._registry.down(peer, reason)

    # ------------------------------------------------------------ membership
    def _on_change(self, change: Change, peer: Peer, reason: str) -> None:
        if change in (Change.UP, Change.BACK):
            for record in self._records.values():
                record.wake.set()
        elif change is Change.ABANDONED:
            self._lose_group(peer, Cause.GROUP_SILENT, f"group {peer} does not answer: {reason}")
        elif change is Change.DOWN:
            self._index.forget(peer)
            self._router.forget(peer)
            for member in self._registry.members():
                member.port.peer_gone(peer)
            self._lose_group(peer, Cause.GROUP_DIED, f"group {peer} died: {reason}")

    def _lose_group(self, peer: Peer, cause: Cause, reason: str) -> None:
        for record in list(self._records.values()):
            for sequence in record.sequences:
                if sequence.move is not None and sequence.move.placement.decode == peer:
                    self._mover.drop(record, sequence)
            for placement in list(record.placements):
                transfer = placement.transfer
                if transfer is not None and peer in (transfer.source, transfer.destination):
                    self._transfers.end(transfer, reason)
                if placement.decode == peer:
                    placement.decode = None
                    record.wake.set()
                for sequence in record.on(peer, placement):
                    self._lose(record, sequence, GroupDied(reason), cause)

    # ------------------------------------------------------------ the driver
    async def _drive(self, record: Record) -> None:
        deadline_ns = record.request.deadline_ns
        left_s = None if deadline_ns is None else (deadline_ns - self._clock.now_ns()) / 1e9
        try:
            async with asyncio.timeout(left_s):
                while not record.over:
                    await self._placer.place(record)
        except TimeoutError:
            where = next((s.phase for s in record.sequences if not s.ended), Phase.DECODE)
            message = (
                f"request {record.request.request_id}: its deadline passed (phase: {where}); "
                "allow more time or fewer max_tokens"
            )
            self._finish(record, DeadlineExceeded(message))
        except KvferryError as error:
            self._finish(record, error)

    # ------------------------------------------------------------ events
    def _on_event(self, record: Record, sequence: Sequence, peer: Peer, event: TokenEvent) -> None:
        move = sequence.move
        if move is not None and move.leg is not None and move.leg.attempt == event.key.attempt:
            if agrees(sequence, event):
                self._take_over(record, sequence)
            else:
                self._mover.drop(record, sequence)
        leg = sequence.leg
        if leg is None or leg.peer != peer or leg.attempt != event.key.attempt:
            return
        if event.error_label is not None:
            self._on_error(record, sequence, error_of(event.error_label, event.error_message or event.error_label))
            return
        if event.position > len(sequence.tokens):
            reason = f"group {peer} skipped from token {len(sequence.tokens)} to {event.position}"
            self._lose(record, sequence, GroupDied(reason), Cause.EVENT_GAP)
            return
        if not leg.reported:
            self._on_first_event(record, sequence, leg, event)
        else:
            leg.stalled_ns += event.stalled_ns
        if event.token_id is not None and event.position < len(sequence.tokens):
            if leg.behind and not agrees(sequence, event):  # float rounding
                self._place_anew(record, sequence)
            return
        handoff = event.finish_reason is FinishReason.HANDOFF
        if event.token_id is not None:
            record.timeline.first_token_ns = record.timeline.first_token_ns or self._clock.now_ns()
            sequence.tokens.append(event.token_id)
        if event.token_id is not None or not handoff:
            record.stream.push(msgspec.structs.replace(event, finish_reason=None) if handoff else event)
        if record.over:  # the stream was full
            return
        if handoff:
            self._hand_over(record, sequence, leg)
        elif event.finish_reason is not None:
            self._router.observe_output(len(sequence.tokens))
            self._end(record, sequence)

    def _on_first_event(self, record: Record, sequence: Sequence, leg: Leg, event: TokenEvent) -> None:
        record.note_first_event(sequence, leg, event, self._clock.now_ns())
        placement = leg.placement
        placement.booking.prefilled()
        if placement.transfer is not None and leg.peer == placement.transfer.destination:
            self._transfers.settle(placement.transfer, sequence.index, adopted=True)

    def _take_over(self, record: Record, sequence: Sequence) -> None:
        """The leg at the move's destination speaks: it goes on, the other one ends."""
        move = sequence.move
        assert move is not None
        self._cancel(record, [(sequence, sequence.leg)])
        self._leave(record, sequence)
        sequence.leg, sequence.move = move.leg, None
        move.taken_over = True
        self.num_moved += 1

    def _on_error(self, record: Record, sequence: Sequence, error: KvferryError) -> None:
        if isinstance(error, CallerError | EndedError):
            self._leave(record, sequence)
            self._finish(record, error)
        else:
            cause = Cause.NO_ROOM if isinstance(error, CapacityError) else Cause.REFUSED
            self._lose(record, sequence, error, cause, still_there=False)

    def _hand_over(self, record: Record, sequence: Sequence, leg: Leg) -> None:
        placement = leg.placement
        if placement.transfer is not None:
            placement.transfer.prefilling.discard(sequence.index)
        decode = self._registry.get(placement.decode) if placement.decode is not None else None
        if decode is None or not decode.routable:
            self._leave(record, sequence)
            sequence.avoid |= placement.refused
            record.wake.set()
            return
        sequence.leg = None
        self._placer.submit(record, [sequence], decode.peer, placement, handoff=False)

    # ------------------------------------------------------------ ends
    def _leave(self, record: Record, sequence: Sequence) -> Leg | None:
        """The sequence leaves its placement; the last one gives back what the placement holds."""
        leg, sequence.leg = sequence.leg, None
        if leg is not None:
            record.note_left(sequence, leg, self._clock.now_ns())
            sequence.news.set()
            leave(record, sequence, leg.placement, self._transfers)
        return leg

    def _lose(
        self, record: Record, sequence: Sequence, error: KvferryError, cause: Cause, still_there: bool = True
    ) -> None:
        """The leg is lost or was refused; the sequence goes on elsewhere, within the budget."""
        if record.over or sequence.leg is None:
            return
        if still_there:
            self._cancel(record, [(sequence, sequence.leg)])
        phase = sequence.phase
        leg = self._leave(record, sequence)
        assert leg is not None
        record.note_setback(sequence, leg.peer, cause, self._clock.now_ns())
        if sequence.move is not None and sequence.move.leg is not None:  # it has begun elsewhere already
            sequence.leg, sequence.move = sequence.move.leg, None
            return
        self._mover.drop(record, sequence)
        wanted, budget = record.request.retry_budget, self._config.retry_budget
        budget = budget if wanted is None else min(wanted, budget)
        if sequence.num_retries > budget:
            self._finish(record, self._exhausted(record, sequence, error, budget).explained(phase=phase))
            return
        sequence.avoid.add(leg.peer)
        if isinstance(error, CapacityError):
            pause_s = self._config.pause_s(sequence.num_retries)
            sequence.pause_until_ns = self._clock.now_ns() + int(pause_s * 1e9)
        record.wake.set()

    def _place_anew(self, record: Record, sequence: Sequence) -> None:
        """The sequence goes on somewhere else, as after a loss, but nobody is to blame."""
        self._mover.drop(record, sequence)
        self._cancel(record, [(sequence, sequence.leg)])
        self._leave(record, sequence)
        record.wake.set()

    def _exhausted(self, record: Record, sequence: Sequence, error: KvferryError, budget: int) -> KvferryError:
        what = f"request {record.request.request_id}: gave up after {budget} retries (--retry-budget); last: {error}"
        if isinstance(error, CapacityError) and not sequence.tokens:
            return QueueFull(what, retry_after_s=max(1.0, self._mean_request_s))
        return RetriesExhausted(what)

    def _end(self, record: Record, sequence: Sequence) -> None:
        """The sequence is complete."""
        sequence.ended = True
        self._leave(record, sequence)
        self._mover.drop(record, sequence)
        if all(s.ended for s in record.sequences):
            self._finish(record, None)

    def _stop(self, record: Record, index: int, num_unread: int) -> None:
        sequence = record.sequences[index]
        del sequence.tokens[len(sequence.tokens) - num_unread :]
        if not record.over and not sequence.ended:
            self._cancel(record, [(sequence, sequence.leg)])
            self._end(record, sequence)

    def _cancel(self, record: Record, legs: Iterable[tuple[Sequence, Leg | None]]) -> None:
        keys: dict[Peer, list[SequenceKey]] = {}
        for sequence, leg in legs:
            if leg is not None:
                keys.setdefault(leg.peer, []).append(record.key(sequence, leg))
        for peer, theirs in keys.items():
            if member := self._registry.get(peer):
                member.port.cancel(theirs)

    def _finish(self, record: Record, error: KvferryError | None) -> None:
        """The request is over, one way or another: everything it holds anywhere goes back. Idempotent."""
        if record.over:
            return
        record.over = True
        if error is not None:
            error.explained(**record.facts())
        self._cancel(record, [(sequence, sequence.leg) for sequence in record.sequences])
        for sequence in record.sequences:
            self._leave(record, sequence)
            self._mover.drop(record, sequence)
        self._idle.set()
        del self._records[record.engine_id]
        record.note_end(self._clock.now_ns())
        self._count(record, error)
        record.stream.end(error)
        if record.driver is not asyncio.current_task():
            record.driver.cancel()

    def _count(self, record: Record, error: KvferryError | None) -> None:
        if error is None:
            self.num_finished += 1
            self.num_resumed += record.timeline.attempts > 1
            took_s = (self._clock.now_ns() - record.timeline.received_ns) / 1e9
            self._mean_request_s += 0.1 * (took_s - self._mean_request_s)
        elif isinstance(error, Cancelled):
            self.num_cancelled += 1
        else:
            self.num_failed += 1

    # ------------------------------------------------------------ upkeep
    async def _maintain(self) -> None:
        period_s = min(self._config.transfer_timeout_s / 3, self._registry.config.unreachable_after_s / 2)
        while True:
            due_ns = self._clock.now_ns() + int(period_s * 1e9)
            await self._clock.sleep(period_s)
            now_ns = self._clock.now_ns()
            self._registry.check(now_ns, now_ns - due_ns)
            self._transfers.renew()

    def check_invariants(self) -> None:
        """Recomputes what is derived. For tests and audits."""
        self._router.check_invariants()
        self._index.check_invariants()
        check_invariants(self._records.values(), self._transfers.open_ids(), self._router.num_bookings)

    def audit(self, groups: dict[Peer, Audit]) -> list[str]:
        """What groups hold that no request here owns, in words; at rest, and with one gateway, empty."""
        return audit(self._records.values(), self._transfers.open_ids(), self._router.num_bookings, groups)
