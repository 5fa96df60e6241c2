"""Transfers to this group: what is expected, what has arrived, what it is pinned for. States: see `ledger.py`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import msgspec

from kvferry.runtime.errors import IncompatiblePeer, StaleAttempt
from kvferry.runtime.ids import BlockHash, BlockId, Peer, TransferId
from kvferry.runtime.kv.groups import Named
from kvferry.runtime.step import Discard, Grant, Import, Revoke
from kvferry.runtime.transfer.ledger import NS, BlockStore, Counters, EndedTransfers, Key, require
from kvferry.runtime.transfer.ticket import (
    ExpectRequest,
    GroupAddress,
    Received,
    Ticket,
    TicketBlock,
    TransferEvent,
    TransferState,
)


@dataclass(slots=True)
class _Message:
    hashes: list[BlockHash]
    block_ids: list[BlockId]
    routes: set[tuple[int, int]] = field(default_factory=set)
    num_bytes: int = 0
    seconds: float = 0.0
    """On its slowest route."""


@dataclass(slots=True)
class _Arrival:
    """One transfer at its destination."""

    source: Peer
    ticket: Ticket
    routes: frozenset[tuple[int, int]]
    begin_ns: int
    deadline_ns: int
    missing: dict[BlockHash, BlockId]
    """Leased and pending; no import planned yet."""
    pins: list[BlockId]
    """Sealed; held for the sequence that waits."""
    partial: dict[int, _Message] = field(default_factory=dict)
    importing: dict[int, _Message] = field(default_factory=dict)
    imported: set[int] = field(default_factory=set)
    state: TransferState = TransferState.ACTIVE
    ending: tuple[TransferState, str] | None = None
    """Decided; waits for planned imports."""
    released: bool = False
    dirty: bool = False
    """Ranks may hold staged bytes that no import will fetch."""
    num_blocks: int = 0
    num_bytes: int = 0
    link_s: float = 0.0

    @property
    def key(self) -> Key:
        return self.ticket.transfer_id, self.ticket.attempt


class Inbound:
    """Transfers to this group. Called by the leader only."""

    def __init__(self, store: BlockStore) -> None:
        self._store = store
        self._arrivals: dict[Key, _Arrival] = {}
        self._current: dict[TransferId, int] = {}
        self._ended = EndedTransfers()
        self._events: list[TransferEvent] = []
        self._discards: dict[Key, None] = {}
        self._fresh: list[Key] = []
        """Since the last step; ranks do not know yet where their blocks go."""
        self._revokes: list[Revoke] = []
        self.counters = Counters()

    def expect(
        self,
        request: ExpectRequest,
        needed: list[list[Named]],
        block_size: int,
        routes_per_message: set[tuple[int, int]],
        own: GroupAddress,
        now_ns: int,
    ) -> Ticket:
        """Pins what is here, leases room for the rest; blocks that someone is just computing are left to him.

        `needed`: by block group, of the prompt's full blocks. `routes_per_message`: the (source rank, rank) pairs on
        which every message travels. A repeated call returns the same ticket; a newer attempt ends the older one.
        Raises `NoFreeBlocks`, `IncompatiblePeer`, `StaleAttempt`; then nothing is held for this attempt.
        """
        key = request.transfer_id, request.attempt
        if known := self._arrivals.get(key):
            if known.state in (TransferState.ACTIVE, TransferState.COMPLETE):
                return known.ticket
            raise StaleAttempt(f"transfer {key[0]} attempt {key[1]} has {known.state}; use a new attempt number")
        current = self._current.get(key[0])
        if self._ended.covers(*key) or (current is not None and key[1] < current):
            raise StaleAttempt(f"transfer {key[0]} attempt {key[1]} is over; use a new attempt number")
        if request.source.fingerprint != own.fingerprint:
            raise IncompatiblePeer(
                f"{request.source.peer} and {own.peer} cannot share blocks: model, KV dtype or block size differ"
            )
        if current is not None:
            self._finish(self._arrivals[key[0], current], TransferState.FAILED, "a newer attempt began", release=True)
        sealed, missing = self._take(needed)
        for block, block_id in missing:
            tokens = request.token_ids[block.index * block_size : (block.index + 1) * block_size]
            self._store.begin_fill(block_id, block.hash, block.parent, tokens)
        ticket = Ticket(
            transfer_id=key[0],
            attempt=key[1],
            destination=own,
            missing=[TicketBlock(block.index, block.hash, block_id) for block, block_id in missing],
            timeout_s=request.timeout_s,
            sealed_only=request.sealed_only,
        )
        arrival = _Arrival(
            source=request.source.peer,
            ticket=ticket,
            routes=frozenset(routes_per_message),
            begin_ns=now_ns,
            deadline_ns=now_ns + int(request.timeout_s * NS),
            missing={block.hash: block.block_id for block in ticket.missing},
            pins=sealed,
        )
        self._arrivals[key] = arrival
        self._current[key[0]] = key[1]
        self._fresh.append(key)
        self._settle(arrival)
        return ticket

    def _take(self, needed: list[list[Named]]) -> tuple[list[BlockId], list[tuple[Named, BlockId]]]:
        """References on what is here, leases for what nobody fills. Raises `NoFreeBlocks`, then nothing is held."""
        sealed: list[BlockId] = []
        wanted: list[list[Named]] = []
        for blocks in needed:
            wanted.append([])
            for block in blocks:
                block_id = self._store.lookup(block.hash)
                if block_id is not None:
                    sealed.append(block_id)
                elif not self._store.is_pending(block.hash):
                    wanted[-1].append(block)
        for block_id in sealed:  # before the lease, which may evict what nobody holds
            self._store.acquire(block_id)
        missing: list[tuple[Named, BlockId]] = []
        try:
            for group, blocks in enumerate(wanted):
                missing += zip(blocks, self._store.lease(len(blocks), group), strict=True)
        except BaseException:
            for block_id in [*sealed, *(block_id for _, block_id in missing)]:
                self._store.release(block_id)
            raise
        return sealed, missing

    def received(self, report: Received) -> list[Import]:
        """Notes one rank's report; the import of the message once all of its routes have arrived."""
        key = report.transfer_id, report.attempt
        arrival = self._arrivals.get(key)
        if arrival is None or arrival.state is not TransferState.ACTIVE or arrival.ending:
            return self._late(key, arrival)
        route = report.source_rank, report.rank
        seen = arrival.partial.get(report.seq)
        if report.seq in arrival.importing or report.seq in arrival.imported or (seen and route in seen.routes):
            self.counters.duplicate += 1
            arrival.dirty = True
            return []
        message = seen or _Message(report.hashes, report.block_ids)
        blocks = list(zip(report.hashes, report.block_ids, strict=False))
        if (
            report.source != arrival.source
            or route not in arrival.routes
            or not blocks
            or len(set(report.hashes)) != len(report.hashes)
            or len(report.hashes) != len(report.block_ids)
            or (report.hashes, report.block_ids) != (message.hashes, message.block_ids)
            or any(arrival.missing.get(block_hash) != block_id for block_hash, block_id in blocks)
        ):
            self.counters.refused += 1
            self._finish(arrival, TransferState.FAILED, f"message {report.seq} does not match the ticket")
            return []
        arrival.partial[report.seq] = message
        message.routes.add(route)
        message.num_bytes += report.num_bytes
        message.seconds = max(message.seconds, report.seconds)
        if message.routes != arrival.routes:
            return []
        del arrival.partial[report.seq]
        for block_hash in message.hashes:
            del arrival.missing[block_hash]
        arrival.importing[report.seq] = message
        return [Import(*key, report.seq, arrival.source, message.block_ids)]

    def _late(self, key: Key, arrival: _Arrival | None) -> list[Import]:
        current = self._current.get(key[0])
        if arrival or self._ended.covers(*key) or (current is not None and key[1] < current):
            self.counters.stale += 1
        else:
            self.counters.unknown += 1
        if arrival and arrival.importing:
            arrival.dirty = True  # a discard now would take the bytes of the planned imports with it
        else:
            self._discards[key] = None
        return []

    def imported(self, done: Import) -> None:
        """A step has copied the message into the pool: its blocks become visible."""
        arrival = self._arrivals.get((done.transfer_id, done.attempt))
        message = arrival.importing.pop(done.seq, None) if arrival else None
        if arrival is None or message is None:
            self.counters.unknown += 1
            return
        arrival.imported.add(done.seq)
        sealed = [self._store.seal(block_id) for block_id in message.block_ids]
        arrival.pins.extend(block_id for block_id in sealed if block_id is not None)
        arrival.num_blocks += len(message.block_ids)
        arrival.num_bytes += message.num_bytes
        arrival.link_s += message.seconds
        self._settle(arrival)

    def shorten(self, transfer_id: TransferId, attempt: int, lacking: list[BlockHash]) -> None:
        """These will not come; the transfer is complete without them. Idempotent; the unknown is ignored."""
        arrival = self._arrivals.get((transfer_id, attempt))
        if arrival is None or arrival.state is not TransferState.ACTIVE or arrival.ending:
            return
        gone = [block_id for h in lacking if (block_id := arrival.missing.pop(h, None)) is not None]
        for block_id in gone:
            self._store.abandon(block_id)
        if gone:
            self._revokes.append(Revoke(transfer_id, attempt, gone))
        arrival.dirty |= bool(arrival.partial)  # of what was named wrongly some ranks may have staged a part
        self._settle(arrival)

    def end(self, transfer_id: TransferId, attempt: int, reason: str) -> None:
        """The coordinator wants nothing more of it. Idempotent; unknown ids are ignored."""
        if arrival := self._arrivals.get((transfer_id, attempt)):
            self._finish(arrival, TransferState.FAILED, reason)

    def link_down(self, peer: Peer, reason: str) -> None:
        """Fails what still waits for blocks of `peer`; messages that are complete are imported all the same."""
        for arrival in list(self._arrivals.values()):
            if arrival.source == peer and arrival.missing:
                self._finish(arrival, TransferState.FAILED, reason)

    def expire(self, now_ns: int) -> None:
        """Ends every lease that has lapsed, whatever its transfer's state."""
        for arrival in list(self._arrivals.values()):
            if arrival.deadline_ns <= now_ns:
                self._finish(arrival, TransferState.EXPIRED, "the lease lapsed", release=True)

    def renew(self, transfer_ids: list[TransferId], timeout_s: float, now_ns: int) -> None:
        """Prolongs leases; never shortens one."""
        for transfer_id in transfer_ids:
            if (attempt := self._current.get(transfer_id)) is not None:
                arrival = self._arrivals[transfer_id, attempt]
                arrival.deadline_ns = max(arrival.deadline_ns, now_ns + int(timeout_s * NS))

    def release(self, transfer_id: TransferId, attempt: int | None = None) -> None:
        """The waiting sequence has its own references now, or is gone. Idempotent; an active transfer fails.

        With `attempt`: only that one.
        """
        if (current := self._current.get(transfer_id)) is not None and attempt in (None, current):
            self._finish(
                self._arrivals[transfer_id, current], TransferState.FAILED, "nobody waits for it", release=True
            )

    def _finish(self, arrival: _Arrival, state: TransferState, reason: str, release: bool = False) -> None:
        arrival.ending = arrival.ending or (state, reason)
        arrival.released |= release
        self._settle(arrival)

    def _settle(self, arrival: _Arrival) -> None:
        """Moves on as far as planned imports allow."""
        if arrival.importing:
            return
        if arrival.state is TransferState.ACTIVE:
            if arrival.missing and not arrival.ending:
                return
            state, reason = arrival.ending if arrival.ending and arrival.missing else (TransferState.COMPLETE, "")
            for block_id in arrival.missing.values():
                self._store.abandon(block_id)
            arrival.missing.clear()
            arrival.partial.clear()
            arrival.state = state
            if arrival.dirty or state is not TransferState.COMPLETE:
                self._discards[arrival.key] = None
            self._events.append(
                TransferEvent(
                    transfer_id=arrival.ticket.transfer_id,
                    attempt=arrival.ticket.attempt,
                    state=state,
                    reason=reason,
                    num_blocks=arrival.num_blocks,
                    num_bytes=arrival.num_bytes,
                    link_s=arrival.link_s,
                    begin_ns=arrival.begin_ns,
                )
            )
        if arrival.released:
            for block_id in arrival.pins:
                self._store.release(block_id)
            del self._arrivals[arrival.key]
            if self._current.get(arrival.key[0]) == arrival.key[1]:
                del self._current[arrival.key[0]]
            self._ended.add(*arrival.key)

    def is_waiting(self, transfer_id: TransferId) -> bool:
        """Whether blocks may still come."""
        attempt = self._current.get(transfer_id)
        return attempt is not None and self._arrivals[transfer_id, attempt].state is TransferState.ACTIVE

    def holds_blocks(self, transfer_id: TransferId) -> bool:
        """Whether any block is held, or leased, for whoever waits for it."""
        attempt = self._current.get(transfer_id)
        if attempt is None:
            return False
        arrival = self._arrivals[transfer_id, attempt]
        return bool(arrival.pins or arrival.missing or arrival.importing)

    def num_expected(self, block_hash: BlockHash) -> int:
        """How many transfers fill a block of that name whose source may still have to compute it."""
        arrivals = [arrival for arrival in self._arrivals.values() if not arrival.ticket.sealed_only]
        planned = sum(block_hash in m.hashes for arrival in arrivals for m in arrival.importing.values())
        return planned + sum(block_hash in arrival.missing for arrival in arrivals)

    def newest(self) -> TransferId | None:
        return next(reversed(self._current), None)

    def take_events(self, now_ns: int) -> list[TransferEvent]:
        """Transfers that ended since the last call, stamped with now."""
        events, self._events = self._events, []
        return [msgspec.structs.replace(event, end_ns=now_ns) for event in events]

    def take_discards(self) -> list[Discard]:
        """What ranks may forget; goes into the next step."""
        discards, self._discards = self._discards, {}
        return [Discard(*key) for key in discards]

    def take_grants(self) -> tuple[list[Grant], list[Revoke]]:
        """Which blocks links may write from the next step on, and which no longer. To be taken with the discards."""
        fresh, self._fresh = self._fresh, []
        revokes, self._revokes = self._revokes, []
        arrivals = [arrival for key in fresh if (arrival := self._arrivals.get(key))]
        return [Grant(*a.key, list(a.missing.values())) for a in arrivals if a.missing], revokes

    def next_deadline_ns(self) -> int | None:
        return min((arrival.deadline_ns for arrival in self._arrivals.values()), default=None)

    def ids(self) -> list[TransferId]:
        """Transfers that hold anything."""
        return sorted({transfer_id for transfer_id, _ in self._arrivals})

    def references(self) -> Counter[BlockId]:
        """References that this ledger holds on each block."""
        held: Counter[BlockId] = Counter()
        for arrival in self._arrivals.values():
            held.update(arrival.pins)
            held.update(arrival.missing.values())
            for message in arrival.importing.values():
                held.update(message.block_ids)
        return held

    def check_invariants(self) -> None:
        """Raises `InvariantBroken`."""
        for key, arrival in self._arrivals.items():
            flying = [b for message in arrival.importing.values() for b in message.block_ids]
            require(key == arrival.key, f"{key} is filed under the wrong name")
            require(not set(flying) & set(arrival.missing.values()), f"{key}: a block is both missing and planned")
            require(all(self._store.is_pending(h) for h in arrival.missing), f"{key}: a missing block is not pending")
            require(all(m.routes < arrival.routes for m in arrival.partial.values()), f"{key}: a whole message waits")
            if arrival.state is TransferState.ACTIVE:
                require(bool(arrival.missing or flying), f"{key} is active and waits for nothing")
                require(not arrival.ending or bool(flying), f"{key} should have ended")
            else:
                require(not (arrival.missing or flying or arrival.partial), f"{key} ended and still waits")
                require(not arrival.released, f"{key} ended, was released and is still here")
            latest = self._current.get(key[0], -1) >= key[1] or self._ended.covers(*key)
            require(latest, f"{key} is neither the latest nor superseded")
        for transfer_id, attempt in self._current.items():
            require((transfer_id, attempt) in self._arrivals, f"{transfer_id} attempt {attempt} is not filed")
