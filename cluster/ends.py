"""How legs, sequences and requests end, and what becomes of them then. Part of the coordinator: shares its records."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from kvferry.cluster.budgets import CoordinatorConfig
from kvferry.cluster.legs import Leg, Record, Sequence, leave
from kvferry.cluster.ports import Clock
from kvferry.cluster.registry import Registry
from kvferry.cluster.transfers import Transfers
from kvferry.runtime.errors import (
    CallerError,
    Cancelled,
    CapacityError,
    EndedError,
    KvferryError,
    QueueFull,
    RetriesExhausted,
)
from kvferry.runtime.ids import Peer, RequestId, SequenceKey
from kvferry.runtime.timeline import Cause


class Ends:
    """Everything that a leg, a sequence or a request holds is given back here, once."""

    def __init__(
        self,
        records: dict[RequestId, Record],
        registry: Registry,
        transfers: Transfers,
        clock: Clock,
        config: CoordinatorConfig,
    ) -> None:
        self._records = records
        self._registry = registry
        self._transfers = transfers
        self._clock = clock
        self._config = config
        self.over = asyncio.Event()
        """Set whenever a request is; for one waiter, who clears it."""
        self.mean_request_s = 1.0
        self.num_finished = 0
        self.num_failed = 0
        self.num_cancelled = 0
        self.num_resumed = 0

    # ------------------------------------------------------------ legs
    def leave(self, record: Record, sequence: Sequence) -> Leg | None:
        """The sequence leaves its placement; the last one gives back what the placement holds."""
        leg, sequence.leg = sequence.leg, None
        if leg is not None:
            record.note_left(sequence, leg, self._clock.now_ns())
            sequence.news.set()
            leave(record, sequence, leg.placement, self._transfers)
        return leg

    def cancel(self, record: Record, legs: Iterable[tuple[Sequence, Leg | None]]) -> None:
        """Tells the legs' groups."""
        keys: dict[Peer, list[SequenceKey]] = {}
        for sequence, leg in legs:
            if leg is not None:
                keys.setdefault(leg.peer, []).append(record.key(sequence, leg))
        for peer, theirs in keys.items():
            if member := self._registry.get(peer):
                member.port.cancel(theirs)

    def drop_move(self, record: Record, sequence: Sequence) -> None:
        """The sequence stays where it is, if it still is there. Idempotent."""
        move, sequence.move = sequence.move, None
        if move is None:
            return
        self.cancel(record, [(sequence, move.leg)])
        leave(record, sequence, move.placement, self._transfers)
        sequence.news.set()

    def place_anew(self, record: Record, sequence: Sequence) -> None:
        """The sequence goes on somewhere else, as after a loss, but nobody is to blame."""
        self.drop_move(record, sequence)
        self.cancel(record, [(sequence, sequence.leg)])
        self.leave(record, sequence)
        record.wake.set()

    def fail(self, record: Record, sequence: Sequence, error: KvferryError) -> None:
        """Its group has ended the leg for this reason."""
        if isinstance(error, CallerError | EndedError):
            self.leave(record, sequence)
            self.finish(record, error)
        else:
            cause = Cause.NO_ROOM if isinstance(error, CapacityError) else Cause.REFUSED
            self.lose(record, sequence, error, cause, still_there=False)

    def lose(
        self, record: Record, sequence: Sequence, error: KvferryError, cause: Cause, still_there: bool = True
    ) -> None:
        """The leg is lost or was refused; the sequence goes on elsewhere, within the budget."""
        if record.over or sequence.leg is None:
            return
        if still_there:
            self.cancel(record, [(sequence, sequence.leg)])
        phase = sequence.phase
        leg = self.leave(record, sequence)
        assert leg is not None
        record.note_setback(sequence, leg.peer, cause, self._clock.now_ns())
        if sequence.move is not None and sequence.move.leg is not None:  # it has begun elsewhere already
            sequence.leg, sequence.move = sequence.move.leg, None
            return
        self.drop_move(record, sequence)
        wanted, budget = record.request.retry_budget, self._config.retry_budget
        budget = budget if wanted is None else min(wanted, budget)
        if sequence.num_retries > budget:
            self.finish(record, self._exhausted(record, sequence, error, budget).explained(phase=phase))
            return
        sequence.avoid.add(leg.peer)
        if isinstance(error, CapacityError):
            pause_s = self._config.pause_s(sequence.num_retries)
            sequence.pause_until_ns = self._clock.now_ns() + int(pause_s * 1e9)
        record.wake.set()

    def _exhausted(self, record: Record, sequence: Sequence, error: KvferryError, budget: int) -> KvferryError:
        what = f"request {record.request.request_id}: gave up after {budget} retries (--retry-budget); last: {error}"
        if isinstance(error, CapacityError) and not sequence.tokens:
            return QueueFull(what, retry_after_s=max(1.0, self.mean_request_s))
        return RetriesExhausted(what)

    # ------------------------------------------------------------ sequences and requests
    def end(self, record: Record, sequence: Sequence) -> None:
        """The sequence is complete."""
        sequence.ended = True
        self.leave(record, sequence)
        self.drop_move(record, sequence)
        if all(s.ended for s in record.sequences):
            self.finish(record, None)

    def stop(self, record: Record, index: int, num_unread: int) -> None:
        """Its reader has enough of sequence `index`, and has not read its last `num_unread` tokens."""
        sequence = record.sequences[index]
        del sequence.tokens[len(sequence.tokens) - num_unread :]
        if not record.over and not sequence.ended:
            self.cancel(record, [(sequence, sequence.leg)])
            self.end(record, sequence)

    def finish(self, record: Record, error: KvferryError | None) -> None:
        """The request is over, one way or another: everything it holds anywhere goes back. Idempotent."""
        if record.over:
            return
        record.over = True
        if error is not None:
            error.explained(**record.facts())
        self.cancel(record, [(sequence, sequence.leg) for sequence in record.sequences])
        for sequence in record.sequences:
            self.leave(record, sequence)
            self.drop_move(record, sequence)
        self.over.set()
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
            self.mean_request_s += 0.1 * (took_s - self.mean_request_s)
        elif isinstance(error, Cancelled):
            self.num_cancelled += 1
        else:
            self.num_failed += 1
