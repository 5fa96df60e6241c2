"""Owns the life of every request of one gateway: has it placed (`placing.py`), follows its legs, ends it (`ends.py`).

Events are handled at once, in `on_frame` and when membership changes; only what must wait (for a group to live, for a
ticket, for a pause to pass) runs in the request's driver, one task per request in the coordinator's task group.
Deadlines and bounded waits use the event loop's time, instants use the injected clock.
"""

from __future__ import annotations

import asyncio
import itertools
from types import TracebackType

import msgspec

from kvferry.cluster.admission import Admission
from kvferry.cluster.budgets import CoordinatorConfig
from kvferry.cluster.ends import Ends
from kvferry.cluster.findings import audit, check_invariants
from kvferry.cluster.legs import Leg, Record, Sequence, engine_id, request_of
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
    Cancelled,
    DeadlineExceeded,
    GroupDied,
    GroupUnavailable,
    InvalidArgument,
    KvferryError,
    QueueFull,
    error_of,
)
from kvferry.runtime.ids import Peer, RequestId, TransferId
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
        self._ends = Ends(self._records, registry, self._transfers, clock, config)
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
            self._ends,
            pause_s=config.retry_pause_s,
            timeout_s=config.transfer_timeout_s,
        )
        self._tasks = asyncio.TaskGroup()
        self._entered = self._closing = False
        self.num_moved = 0
        """Sequences that another group took over while they ran."""
        self.num_fetched_blocks = 0
        """Of prefixes, from peers that held them."""
        self.num_expected_hit_tokens = 0
        """That the router thought the groups that began sequences would find in their caches."""
        self.num_hit_tokens = 0
        """That they did find."""
        registry.listen(self._on_change)

    async def __aenter__(self) -> Coordinator:
        await self._tasks.__aenter__()
        self._maintenance = self._tasks.create_task(self._maintain(), name="coordinator maintenance")
        self._entered = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing = True
        for record in list(self._records.values()):
            self._ends.finish(record, Cancelled(f"request {record.request.request_id}: the gateway is shutting down"))
        self._maintenance.cancel()
        if isinstance(error, Exception):
            kind = error = trace = None  # the body's own error goes on as it is, not wrapped in a group
        await self._tasks.__aexit__(kind, error, trace)

    # ------------------------------------------------------------ API
    @property
    def in_flight(self) -> int:
        return len(self._records)

    @property
    def num_finished(self) -> int:
        return self._ends.num_finished

    @property
    def num_failed(self) -> int:
        return self._ends.num_failed

    @property
    def num_cancelled(self) -> int:
        return self._ends.num_cancelled

    @property
    def num_resumed(self) -> int:
        """Finished requests that outlived a loss."""
        return self._ends.num_resumed

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
                retry_after_s=max(0.1, self._ends.mean_request_s / limit),
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
        if not self._entered:
            raise GroupUnavailable("the gateway is starting; ask again, or another one")
        timeline = Timeline(received_ns=request.arrival_ns or self._clock.now_ns())
        record = Record(request, timeline, self._numbers, self._config.gateway)
        for sequence in record.sequences:
            sequence.track.until(self._clock.now_ns(), Phase.GATEWAY)
        record.stream = RequestStream(
            record.timeline,
            record.usage,
            lambda index, num_unread: self._ends.stop(record, index, num_unread),
            lambda error: self._ends.finish(record, error),
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
            self._ends.over.clear()
            await self._ends.over.wait()

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
            transfer = self._transfers.reported(peer, report)
            if transfer is not None and record is not None and record.owns(report.transfer_id):
                record.note_transfer(transfer, report)
                if transfer.is_fetch:
                    self.num_fetched_blocks += report.num_blocks
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
                    self._ends.drop_move(record, sequence)
            for placement in list(record.placements):
                for transfer in placement.transfers:
                    if peer in (transfer.source, transfer.destination):
                        self._transfers.end(transfer, reason)
                if placement.decode == peer:
                    placement.decode = None
                    record.wake.set()
                for sequence in record.on(peer, placement):
                    self._ends.lose(record, sequence, GroupDied(reason), cause)

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
            self._ends.finish(record, DeadlineExceeded(message))
        except KvferryError as error:
            self._ends.finish(record, error)

    # ------------------------------------------------------------ events
    def _on_event(self, record: Record, sequence: Sequence, peer: Peer, event: TokenEvent) -> None:
        move = sequence.move
        if move is not None and move.leg is not None and move.leg.attempt == event.key.attempt:
            if agrees(sequence, event):
                self._take_over(record, sequence)
            else:
                self._ends.drop_move(record, sequence)
        leg = sequence.leg
        if leg is None or leg.peer != peer or leg.attempt != event.key.attempt:
            return
        if event.error_label is not None:
            self._ends.fail(record, sequence, error_of(event.error_label, event.error_message or event.error_label))
            return
        if event.position > len(sequence.tokens):
            reason = f"group {peer} skipped from token {len(sequence.tokens)} to {event.position}"
            self._ends.lose(record, sequence, GroupDied(reason), Cause.EVENT_GAP)
            return
        if not leg.reported:
            self._on_first_event(record, sequence, leg, event)
        else:
            leg.stalled_ns += event.stalled_ns
        if event.token_id is not None:
            record.note_cached(event)
        if event.token_id is not None and event.position < len(sequence.tokens):
            if leg.behind and not agrees(sequence, event):  # float rounding
                self._ends.place_anew(record, sequence)
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
            self._ends.end(record, sequence)

    def _on_first_event(self, record: Record, sequence: Sequence, leg: Leg, event: TokenEvent) -> None:
        record.note_first_event(sequence, leg, event, self._clock.now_ns())
        placement = leg.placement
        if leg.peer == placement.first and placement.num_expected_hits is not None:
            self.num_expected_hit_tokens += placement.num_expected_hits
            self.num_hit_tokens += event.num_cached_tokens
            placement.num_expected_hits = None
        placement.booking.prefilled()
        for transfer in placement.transfers:
            if leg.peer == transfer.destination:
                self._transfers.settle(transfer, sequence.index, adopted=True)

    def _take_over(self, record: Record, sequence: Sequence) -> None:
        """The leg at the move's destination speaks: it goes on, the other one ends."""
        move = sequence.move
        assert move is not None
        self._ends.cancel(record, [(sequence, sequence.leg)])
        self._ends.leave(record, sequence)
        sequence.leg, sequence.move = move.leg, None
        move.taken_over = True
        self.num_moved += 1

    def _hand_over(self, record: Record, sequence: Sequence, leg: Leg) -> None:
        placement = leg.placement
        if placement.transfer is not None:
            placement.transfer.prefilling.discard(sequence.index)
        decode = self._registry.get(placement.decode) if placement.decode is not None else None
        if decode is None or not decode.routable:
            self._ends.leave(record, sequence)
            sequence.avoid |= placement.refused
            record.wake.set()
            return
        sequence.leg = None
        self._placer.submit(record, [sequence], decode.peer, placement, handoff=False)

    # ------------------------------------------------------------ upkeep
    async def _maintain(self) -> None:
        period_s = min(self._config.transfer_timeout_s / 3, self._registry.config.unreachable_after_s / 2)
        while True:
            due_ns = self._clock.now_ns() + int(period_s * 1e9)
            await self._clock.sleep(period_s)
            now_ns = self._clock.now_ns()
            self._registry.check(now_ns, now_ns - due_ns)
            self._transfers.renew(now_ns)

    def check_invariants(self) -> None:
        """Recomputes what is derived. For tests and audits."""
        self._router.check_invariants()
        self._index.check_invariants()
        check_invariants(self._records.values(), self._transfers.open_ids(), self._router.num_bookings)

    def audit(self, groups: dict[Peer, Audit]) -> list[str]:
        """What groups hold that no request here owns, in words; at rest, and with one gateway, empty."""
        return audit(self._records.values(), self._transfers.open_ids(), self._router.num_bookings, groups)
