"""A request's record while it runs: the only truth about it. Its sequences, and where each of them runs.

    homeless ── placed ──▶ prefill leg ── HANDOFF ──▶ decode leg ──▶ ended
        ▲                       │                         │
        └──── its group was lost, refused it, or the decode group is not there

A decode leg may move: its blocks are sent to another group, a second leg begins there, and takes over with its first
event (see `moving.py`).

A leg is one sequence on one group at one attempt; every leg has an attempt number of its own, so whatever an earlier
leg still says is recognised and dropped, also when a client uses a request's id again. A placement is one routing
decision and the sequences that follow it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from collections.abc import Sequence as AbstractSequence

from kvferry.cluster.router import Demand
from kvferry.cluster.router_load import Booking
from kvferry.cluster.stream import RequestStream
from kvferry.cluster.transfers import Transfer, Transfers
from kvferry.runtime.ids import BlockHash, Peer, RequestId, SequenceKey, TransferId
from kvferry.runtime.request import Request, SequenceRequest, TokenEvent, Usage
from kvferry.runtime.timeline import MAX_SETBACKS, Cause, Phase, Setback, Timeline, Track
from kvferry.runtime.transfer.ticket import TransferEvent

MAX_TAIL_TOKENS = 64
"""A decode leg that finds its blocks computes only the prompt's tail; one that computes more than this prefills."""


def request_of(transfer_id: TransferId) -> RequestId:
    """The engines' name of the request whose transfer it is; the inverse of `Record.next_transfer_id`."""
    return RequestId(transfer_id.rpartition("/")[0])


class Placement:
    """One routing decision at work. `active`: indexes of the sequences that follow it."""

    def __init__(
        self,
        prefill: Peer | None,
        decode: Peer,
        booking: Booking,
        active: set[int],
        num_expected_hits: int | None = None,
    ) -> None:
        self.prefill = prefill
        self.first = prefill or decode
        """Where the prompt is computed."""
        self.decode: Peer | None = decode
        """`None`: it was lost; see `Record.without_decode`."""
        self.refused: set[Peer] = set()
        """Decode groups that did not answer."""
        self.booking = booking
        self.active = active
        self.transfer: Transfer | None = None
        self.fetch: Transfer | None = None
        """Brings a prefix to `first`."""
        self.num_expected_hits = num_expected_hits
        """Leading tokens that `first` was expected to find in its cache, with what is fetched; `None`: it has told."""

    @property
    def transfers(self) -> list[Transfer]:
        return [transfer for transfer in (self.transfer, self.fetch) if transfer is not None]


class Leg:
    """Where a sequence runs now."""

    def __init__(self, peer: Peer, attempt: int, placement: Placement) -> None:
        self.peer = peer
        self.attempt = attempt
        self.placement = placement
        self.reported = False
        """Its first event came."""
        self.stalled_ns = 0
        """How long it has waited in the engine, after it had begun, for blocks that others took."""
        self.behind = False
        """It began with fewer tokens than have been delivered since; what it draws again must be the same."""


class Move:
    """A sequence on its way to another group, while its present leg goes on."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self.leg: Leg | None = None
        """At the destination, once its blocks are there."""
        self.taken_over = False


class Sequence:
    """One continuation of the request."""

    def __init__(self, index: int, received_ns: int) -> None:
        self.index = index
        self.track = Track(received_ns)
        self.tokens: list[int] = []
        """Delivered."""
        self.leg: Leg | None = None
        self.move: Move | None = None
        self.news = asyncio.Event()
        """Set when its leg has spoken for the first time or is gone, and when its move has come further."""
        self.ended = False
        self.num_retries = 0
        self.avoid: set[Peer] = set()
        """Groups that refused or lost it; tried again only when there is nobody else, and not before `pause_until`."""
        self.pause_until_ns = 0

    @property
    def phase(self) -> Phase:
        """What it is doing, as far as the gateway knows."""
        if self.leg is None:
            return Phase.ADMISSION
        if self.leg.reported:
            return Phase.DECODE
        return Phase.PREFILL_QUEUE if self.leg.peer == self.leg.placement.first else Phase.DECODE_QUEUE


def engine_id(gateway: str, request_id: RequestId) -> RequestId:
    """A request's name in the engines, where the requests of other gateways run as well."""
    return RequestId(f"{gateway}/{request_id}" if gateway else request_id)


class Record:
    """A request in flight. `numbers`: grow, and never come again in this gateway; `gateway`: nobody else's name."""

    def __init__(self, request: Request, timeline: Timeline, numbers: Iterator[int], gateway: str = "") -> None:
        self.request = request
        self.engine_id = engine_id(gateway, request.request_id)
        self._numbers = numbers
        self.order = next(numbers)
        """Of arrival at this gateway."""
        self.timeline = timeline
        self.sequences = [Sequence(i, timeline.received_ns) for i in range(request.sampling.n)]
        self.placements: list[Placement] = []
        self.num_transfers = 0
        self.over = False
        self.wake = asyncio.Event()
        """Set when there may be something to place, or somewhere to place it."""
        self.stream: RequestStream
        self.driver: asyncio.Task[None]
        self.prompt_hashes: list[BlockHash] | None = None
        """Of the prompt's full blocks; computed once."""
        self._num_cached: int | None = None
        self._num_ferried_blocks = 0
        self._ferried_bytes = 0

    # ------------------------------------------------------------ questions
    def homeless(self) -> list[Sequence]:
        """Sequences that must be placed."""
        return [s for s in self.sequences if s.leg is None and not s.ended]

    def on(self, peer: Peer, placement: Placement | None = None) -> list[Sequence]:
        """Sequences with a leg on `peer`."""
        return [
            s
            for s in self.sequences
            if s.leg is not None and s.leg.peer == peer and placement in (None, s.leg.placement)
        ]

    def without_decode(self) -> Placement | None:
        """A placement whose decode group was lost while prefill still runs."""
        for p in self.placements:
            if p.decode is None and p.prefill is not None and self.on(p.prefill, p):
                return p
        return None

    def shared_tokens(self, sequences: AbstractSequence[Sequence]) -> list[int]:
        """The tokens that all of `sequences` start with, as far as placing them together uses it."""
        if len(sequences) == 1 and sequences[0].tokens:
            return self.request.prompt_token_ids + sequences[0].tokens
        return self.request.prompt_token_ids

    def demand(self, sequences: AbstractSequence[Sequence]) -> Demand:
        left = self.request.sampling.max_tokens - min(len(s.tokens) for s in sequences)
        return Demand(len(self.shared_tokens(sequences)), len(sequences), left)

    def legs(self) -> list[tuple[Sequence, Leg]]:
        """All of them, those of moves as well."""
        legs = [(s, leg) for s in self.sequences for leg in (s.leg, s.move.leg if s.move else None)]
        return [(sequence, leg) for sequence, leg in legs if leg is not None]

    def key(self, sequence: Sequence, leg: Leg) -> SequenceKey:
        return SequenceKey(self.engine_id, sequence.index, leg.attempt)

    def usage(self) -> Usage:
        num_prompt = len(self.request.prompt_token_ids)
        return Usage(
            num_prompt_tokens=num_prompt,
            num_cached_tokens=self._num_cached or 0,
            num_output_tokens=sum(len(s.tokens) for s in self.sequences),
            num_ferried_blocks=self._num_ferried_blocks,
            ferried_bytes=self._ferried_bytes,
        )

    def owns(self, transfer_id: TransferId) -> bool:
        """Not another request's that has the same id."""
        return transfer_id.startswith(f"{self.engine_id}/{self.order}.")

    def next_transfer_id(self) -> TransferId:
        return TransferId(f"{self.engine_id}/{self.order}.{self.num_transfers}")

    # ------------------------------------------------------------ changes
    def new_leg(self, peer: Peer, placement: Placement) -> Leg:
        return Leg(peer, next(self._numbers), placement)

    def begin_leg(
        self,
        sequence: Sequence,
        peer: Peer,
        placement: Placement,
        brings: TransferId | None,
        sends: TransferId | None,
        now_ns: int,
    ) -> SequenceRequest:
        """The sequence runs on `peer` from now on; returns what the group must be told."""
        assert sequence.leg is None
        assert not sequence.ended
        sequence.track.until(now_ns, Phase.ADMISSION)
        sequence.leg = self.new_leg(peer, placement)
        return self.work(sequence, sequence.leg, brings, sends, now_ns)

    def work(
        self, sequence: Sequence, leg: Leg, brings: TransferId | None, sends: TransferId | None, now_ns: int
    ) -> SequenceRequest:
        """What the leg's group must be told.

        `brings`: the transfer that brings it blocks. `sends`: the one that carries away what it computes until its
        first token; then another group goes on.
        """
        request = self.request
        return SequenceRequest(
            key=self.key(sequence, leg),
            prompt_token_ids=request.prompt_token_ids,
            sampling=request.sampling,
            eos_token_ids=request.eos_token_ids,
            output_token_ids=list(sequence.tokens),
            cache_salt=request.cache_salt,
            priority=request.priority,
            arrival_ns=request.arrival_ns,
            deadline_ns=request.deadline_ns,
            handoff_after=len(sequence.tokens) + 1 if sends is not None else None,
            transfer_id=brings,
            sends_transfer_id=sends,
            sent_ns=now_ns,
        )

    def note_first_event(self, sequence: Sequence, leg: Leg, event: TokenEvent, now_ns: int) -> None:
        """A leg was admitted and its prompt computed: timeline and usage."""
        leg.reported = True
        sequence.news.set()
        sequence.avoid.clear()
        times, track, group = self.timeline, sequence.track, leg.peer.group
        begin_ns = min(event.begin_ns or now_ns, now_ns)  # the group's clock may be ahead of ours
        end_ns = min(event.end_ns or now_ns, now_ns)
        if leg.peer != leg.placement.first:
            times.decode_begin_ns = times.decode_begin_ns or event.begin_ns
            if leg.placement.transfer is not None and times.transfer_end_ns is not None:
                track.until(min(times.transfer_end_ns, begin_ns), Phase.TRANSFER, group)
            track.until(begin_ns, Phase.DECODE_QUEUE, group)
            leg.stalled_ns = event.stalled_ns
            num_known = len(self.request.prompt_token_ids) + len(sequence.tokens)
            again = num_known - event.num_cached_tokens > MAX_TAIL_TOKENS
            track.until(end_ns, Phase.PREFILL if again else Phase.DECODE, group)
            return
        if leg.placement.fetch is not None and leg.placement.fetch.end_ns is not None:
            track.until(min(leg.placement.fetch.end_ns, begin_ns), Phase.TRANSFER, group)
        track.until(begin_ns, Phase.PREFILL_QUEUE, group)
        track.until(end_ns - event.stalled_ns, Phase.PREFILL, group)
        track.until(end_ns, Phase.PREEMPTED, group)
        track.until(now_ns, Phase.DELIVERY, group)
        times.prefill_begin_ns = times.prefill_begin_ns or event.begin_ns
        times.prefill_end_ns = times.prefill_end_ns or event.end_ns
        if leg.placement.prefill is None:
            times.decode_begin_ns = times.decode_begin_ns or event.end_ns

    def note_cached(self, event: TokenEvent) -> None:
        """A leg has drawn a token. What any leg had to compute does not count as cached."""
        known = len(self.request.prompt_token_ids) if self._num_cached is None else self._num_cached
        self._num_cached = min(known, event.num_cached_tokens)

    def note_left(self, sequence: Sequence, leg: Leg, now_ns: int) -> None:
        """A sequence leaves its leg: at its end, or because the leg is lost."""
        track, group = sequence.track, leg.peer.group
        if leg.reported:
            track.until(now_ns - leg.stalled_ns, Phase.DECODE, group)
            track.until(now_ns, Phase.PREEMPTED, group)
        track.until(now_ns, Phase.LOST, group)

    def note_setback(self, sequence: Sequence, peer: Peer, cause: Cause, now_ns: int) -> None:
        sequence.num_retries += 1
        self.timeline.attempts = max(self.timeline.attempts, 1 + sequence.num_retries)
        if len(self.timeline.setbacks) < MAX_SETBACKS:
            self.timeline.setbacks.append(Setback(cause, peer.group, now_ns, sequence.index))

    def note_end(self, now_ns: int) -> None:
        """The request is over; no sequence has a leg any more."""
        for sequence in self.sequences:
            if not sequence.ended:
                sequence.track.until(now_ns, Phase.ADMISSION)
        self.timeline.finished_ns = now_ns
        self.timeline.spans = max((s.track for s in self.sequences), key=lambda track: track.end_ns).spans

    def facts(self) -> dict[str, str]:
        """Where the request stands, for the error that ends it."""
        alive = [s for s in self.sequences if not s.ended]
        facts = {"attempts": str(self.timeline.attempts)}
        if alive:
            facts["phase"] = alive[0].phase
        if self.timeline.setbacks:
            facts["causes"] = ",".join(dict.fromkeys(setback.cause for setback in self.timeline.setbacks))
        return facts

    def note_transfer(self, transfer: Transfer, event: TransferEvent) -> None:
        self._num_ferried_blocks += event.num_blocks
        self._ferried_bytes += event.num_bytes
        if not transfer.is_fetch and self.timeline.decode_begin_ns is None:  # later ones are moves
            self.timeline.transfer_begin_ns = self.timeline.transfer_begin_ns or event.begin_ns
            self.timeline.transfer_end_ns = event.end_ns


def leave(record: Record, sequence: Sequence, placement: Placement, transfers: Transfers) -> None:
    """The sequence does not follow the placement any more; the last one gives back what it holds."""
    placement.active.discard(sequence.index)
    placement.booking.sequence_left()
    for transfer in placement.transfers:
        transfers.settle(transfer, sequence.index, adopted=False)
    if not placement.active:
        placement.booking.release()
        record.placements.remove(placement)
