"""Transfers from this group: which sealed blocks are still to go out, which are being sent. States: see `ledger.py`."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field

import msgspec

from kvferry.runtime.ids import BlockHash, BlockId, Peer, TransferId
from kvferry.runtime.step import Discard, Send
from kvferry.runtime.transfer.ledger import MAX_REMEMBERED, NS, BlockStore, Counters, EndedTransfers, Key, require
from kvferry.runtime.transfer.ticket import Sent, Ticket, TicketBlock, TransferEvent, TransferState

MESSAGE_BYTES = 32 << 20
"""A rank's part of the largest message, which its destination stages whole."""
_EVICTED = "its blocks were evicted before they could be sent"
_UNWANTED = "no sequence goes on after its prompt"


@dataclass(slots=True)
class _Flight:
    """One message that ranks may be reading blocks for."""

    block_ids: list[BlockId]
    ranks: set[int] = field(default_factory=set)
    """Those that have reported."""


@dataclass(slots=True)
class _Departure:
    """One transfer at its source."""

    key: Key
    destination: Peer
    begin_ns: int
    deadline_ns: int
    unsent: dict[BlockHash, TicketBlock]
    """In the chain's order."""
    flights: dict[int, _Flight] = field(default_factory=dict)
    num_planned: int = 0
    ended: bool = False


class Outbound:
    """Called by the leader only. Every `Send` must be executed: its blocks stay pinned until all ranks report."""

    def __init__(self, store: BlockStore, blocks_per_message: int, partial: bool) -> None:
        """`partial`: of use is also what comes before blocks that are gone."""
        self._store = store
        self._blocks_per_message = blocks_per_message
        self._partial = partial
        self._departures: dict[Key, _Departure] = {}
        self._current: dict[TransferId, int] = {}
        self._waiting: dict[BlockHash, set[Key]] = {}
        self._ended = EndedTransfers()
        self._discards: dict[Key, None] = {}
        self._news: list[TransferEvent] = []
        self._prefilled: OrderedDict[TransferId, bool] = OrderedDict()
        """Transfers whose prompt is computed, and whether a sequence goes on elsewhere."""
        self.counters = Counters()

    def send(self, ticket: Ticket, now_ns: int) -> list[Send]:
        """Accepts a ticket; messages for what is sealed already. A repeated or outdated ticket changes nothing."""
        key = ticket.transfer_id, ticket.attempt
        current = self._current.get(key[0])
        if key in self._departures:
            self.counters.duplicate += 1
            return []
        if self._ended.covers(*key) or (current is not None and key[1] < current):
            self.counters.stale += 1
            return []
        if current is not None:
            self._finish(self._departures[key[0], current])
        departure = _Departure(
            key,
            ticket.destination.peer,
            now_ns,
            now_ns + int(ticket.timeout_s * NS),
            {block.hash: block for block in sorted(ticket.missing, key=lambda block: block.index)},
        )
        self._departures[key] = departure
        self._current[key[0]] = key[1]
        for block_hash in departure.unsent:
            self._waiting.setdefault(block_hash, set()).add(key)
        handed_over = self._prefilled.get(key[0])
        sends = [] if handed_over is False else self._plan(departure, list(departure.unsent))
        if handed_over is False and departure.unsent:
            self._fail(departure, _UNWANTED)
        elif ticket.sealed_only or handed_over is not None:
            self._close(departure)
        else:
            self._settle(departure)
        return sends

    def prefill_begins(self, transfer_id: TransferId) -> None:
        """The prompt that this transfer carries away is about to be computed here (again)."""
        self._prefilled.pop(transfer_id, None)

    def prefill_over(self, transfer_id: TransferId, handed_over: bool) -> None:
        """Its prompt is computed, or will not be.

        What a transfer still lacks will not come. One that no sequence needs has failed: not even what is planned goes
        out.
        """
        self._prefilled[transfer_id] = handed_over
        if len(self._prefilled) > MAX_REMEMBERED:
            self._prefilled.popitem(last=False)
        attempt = self._current.get(transfer_id)
        departure = None if attempt is None else self._departures[transfer_id, attempt]
        if departure is None:
            return
        if handed_over:
            self._close(departure)
        else:
            self._fail(departure, _UNWANTED)

    def sealed(self, hashes: list[BlockHash]) -> list[Send]:
        """Messages for blocks that have just become visible."""
        if not self._waiting:
            return []
        ready: dict[Key, list[BlockHash]] = {}
        for block_hash in hashes:
            for key in sorted(self._waiting.get(block_hash, ())):
                ready.setdefault(key, []).append(block_hash)
        sends: list[Send] = []
        for key, news in ready.items():
            departure = self._departures[key]
            news = sorted(dict.fromkeys(news), key=lambda block_hash: departure.unsent[block_hash].index)
            sends += self._plan(departure, news)
        return sends

    def _plan(self, departure: _Departure, hashes: list[BlockHash]) -> list[Send]:
        by_group: dict[int, list[tuple[BlockHash, BlockId]]] = {}
        for block_hash in hashes:
            if (block_id := self._store.lookup(block_hash)) is not None:
                by_group.setdefault(self._store.group_of(block_id), []).append((block_hash, block_id))
        size = self._blocks_per_message
        chunks = [found[i : i + size] for found in by_group.values() for i in range(0, len(found), size)]
        sends = []
        for chunk in chunks:
            source_ids = [block_id for _, block_id in chunk]
            targets = []
            for block_hash, block_id in chunk:
                self._store.acquire(block_id)
                targets.append(departure.unsent.pop(block_hash).block_id)
                self._forget_waiting(block_hash, departure.key)
            seq = departure.num_planned
            departure.num_planned += 1
            departure.flights[seq] = _Flight(source_ids)
            names = [block_hash for block_hash, _ in chunk]
            sends.append(Send(*departure.key, seq, departure.destination, names, source_ids, targets))
        return sends

    def _forget_waiting(self, block_hash: BlockHash, key: Key) -> None:
        keys = self._waiting[block_hash]
        keys.discard(key)
        if not keys:
            del self._waiting[block_hash]

    def sent(self, report: Sent, num_ranks: int) -> None:
        """One rank's report; the blocks are let go once all `num_ranks` have reported."""
        key = report.transfer_id, report.attempt
        departure = self._departures.get(key)
        flight = departure.flights.get(report.seq) if departure else None
        if departure is None or flight is None:
            known = (departure is not None and report.seq < departure.num_planned) or self._ended.covers(*key)
            if known:
                self.counters.stale += 1
            else:
                self.counters.unknown += 1
            return
        if report.rank in flight.ranks:
            self.counters.duplicate += 1
            return
        if not 0 <= report.rank < num_ranks:
            self.counters.unknown += 1
            return
        flight.ranks.add(report.rank)
        if len(flight.ranks) == num_ranks:
            for block_id in flight.block_ids:
                self._store.release(block_id)
            del departure.flights[report.seq]
        if report.error is not None:
            self._fail(departure, report.error)
        else:
            self._settle(departure)

    def end(self, transfer_id: TransferId, attempt: int) -> None:
        """Nothing more of it is wanted. Idempotent; unknown ids are ignored."""
        if departure := self._departures.get((transfer_id, attempt)):
            self._finish(departure)

    def link_down(self, peer: Peer, reason: str) -> None:
        for departure in list(self._departures.values()):
            if departure.destination == peer:
                self._fail(departure, reason)

    def expire(self, now_ns: int) -> None:
        for departure in list(self._departures.values()):
            if departure.deadline_ns <= now_ns:
                self._fail(departure, "not sent before its deadline")

    def renew(self, transfer_ids: list[TransferId], timeout_s: float, now_ns: int) -> None:
        """Prolongs leases; never shortens one."""
        for transfer_id in transfer_ids:
            if (attempt := self._current.get(transfer_id)) is not None:
                departure = self._departures[transfer_id, attempt]
                departure.deadline_ns = max(departure.deadline_ns, now_ns + int(timeout_s * NS))

    def _close(self, departure: _Departure) -> None:
        """Nothing more of it will be sealed: what was found is sent, and the destination hears what it shall not await.

        Parents outlive their children, so what was found is the beginning of the chain.
        """
        if departure.unsent and not (self._partial and departure.num_planned):
            self._fail(departure, _EVICTED)
            return
        if departure.unsent and not departure.ended:
            self._tell(departure, TransferState.ACTIVE, _EVICTED, list(departure.unsent))
            self._want_no_more(departure)
        self._settle(departure)

    def _fail(self, departure: _Departure, reason: str) -> None:
        """Ends a transfer for a reason that the destination cannot know of."""
        if not departure.ended:
            self._tell(departure, TransferState.FAILED, reason, [])
        self._finish(departure)

    def _tell(self, departure: _Departure, state: TransferState, reason: str, lacking: list[BlockHash]) -> None:
        transfer_id, attempt = departure.key
        self._news.append(
            TransferEvent(
                transfer_id=transfer_id,
                attempt=attempt,
                state=state,
                reason=reason,
                begin_ns=departure.begin_ns,
                lacking=lacking,
            )
        )

    def _want_no_more(self, departure: _Departure) -> None:
        for block_hash in departure.unsent:
            self._forget_waiting(block_hash, departure.key)
        departure.unsent.clear()

    def _finish(self, departure: _Departure) -> None:
        """Sends no more; what is in flight stays pinned until the ranks have reported it."""
        self._want_no_more(departure)
        if not departure.ended and departure.flights:
            self._discards[departure.key] = None  # ranks need not send what still queues
        departure.ended = True
        self._settle(departure)

    def _settle(self, departure: _Departure) -> None:
        if departure.unsent or departure.flights:
            return
        del self._departures[departure.key]
        if self._current.get(departure.key[0]) == departure.key[1]:
            del self._current[departure.key[0]]
        self._ended.add(*departure.key)

    def take_events(self, now_ns: int) -> list[TransferEvent]:
        """What destinations must hear of since the last call, stamped with now; the coordinator passes it on."""
        news, self._news = self._news, []
        return [msgspec.structs.replace(event, end_ns=now_ns) for event in news]

    def take_discards(self) -> list[Discard]:
        """What ranks need not send any more; goes into the next step."""
        discards, self._discards = self._discards, {}
        return [Discard(*key) for key in discards]

    def next_deadline_ns(self) -> int | None:
        """Of transfers that still do something at their deadline."""
        return min((d.deadline_ns for d in self._departures.values() if not d.ended), default=None)

    def ids(self) -> list[TransferId]:
        """Transfers that wait for blocks or hold some."""
        return sorted({transfer_id for transfer_id, _ in self._departures})

    def references(self) -> Counter[BlockId]:
        """References that this ledger holds on each block."""
        flights = [f for departure in self._departures.values() for f in departure.flights.values()]
        return Counter(block_id for flight in flights for block_id in flight.block_ids)

    def check_invariants(self) -> None:
        """Raises `InvariantBroken`."""
        waiting: dict[BlockHash, set[Key]] = {}
        for key, departure in self._departures.items():
            require(key == departure.key, f"{key} is filed under the wrong name")
            require(bool(departure.unsent or departure.flights), f"{key} is done and still here")
            require(not (departure.ended and departure.unsent), f"{key} ended and still waits for blocks")
            require(all(s < departure.num_planned for s in departure.flights), f"{key}: an unplanned message flies")
            latest = self._current.get(key[0], -1) >= key[1] or self._ended.covers(*key)
            require(latest, f"{key} is neither the latest nor superseded")
            for block_hash in departure.unsent:
                waiting.setdefault(block_hash, set()).add(key)
        require(waiting == self._waiting, "the index of wanted blocks is out of step with the transfers")
        for transfer_id, attempt in self._current.items():
            require((transfer_id, attempt) in self._departures, f"{transfer_id} attempt {attempt} is not filed")
