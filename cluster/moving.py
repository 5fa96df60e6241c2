"""Empties a group while its requests run: each sequence goes on at another group, and its stream notices nothing.

    mover                 destination                 source (goes on generating)
      │ expect(tokens so far) ──▶ room
      │ ticket ─────────────────────────────────────────▶ sends the blocks that are sealed
      │ ◀── COMPLETE ──────────── │
      │ submit(tokens so far) ──▶ a second leg: computes the few tokens that were drawn meanwhile
      │ ◀── its first event ───── │  ══▶ the coordinator cancels the leg at the source

Until that event the source serves; whatever goes wrong before it, the source keeps the sequence and another try is
made, until the time is up: then the sequence is resumed elsewhere as after a death. Tokens are taken by position; a
second leg that draws another token than was delivered (float rounding) is given up, never mixed in.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping

import msgspec
import structlog

from kvferry.cluster.ends import Ends
from kvferry.cluster.legs import Move, Placement, Record, Sequence
from kvferry.cluster.placing import Placer
from kvferry.cluster.ports import Clock
from kvferry.cluster.prefix_index import PrefixIndex
from kvferry.cluster.registry import Registry
from kvferry.cluster.router import Router
from kvferry.cluster.transfers import Transfer, Transfers
from kvferry.runtime.errors import GroupUnavailable, KvferryError
from kvferry.runtime.ids import Peer, RequestId
from kvferry.runtime.request import TokenEvent

MAX_MOVES = 8
"""At a time: each holds blocks at its destination before it runs there."""
MAX_PAUSE_S = 2.0
"""Between two tries for one sequence."""

_log = structlog.get_logger(__name__)


class Emptied(msgspec.Struct, kw_only=True):
    """What was done to the sequences of a group. Those that ended by themselves are not counted."""

    num_moved: int = 0
    """Taken over by another group while they ran."""
    num_rerouted: int = 0
    """Had not begun: they begin elsewhere."""
    num_resumed: int = 0
    """Cut off when the time was up: other groups compute them again."""


def agrees(sequence: Sequence, event: TokenEvent) -> bool:
    """Whether a leg that began behind what was delivered since says the same, or the next token."""
    if event.error_label is not None or event.token_id is None or event.position > len(sequence.tokens):
        return False
    if event.position == len(sequence.tokens):
        return True
    return event.token_id == sequence.tokens[event.position] and event.finish_reason is None


class Mover:
    """Part of the coordinator: shares its records."""

    def __init__(
        self,
        records: Mapping[RequestId, Record],
        registry: Registry,
        router: Router,
        index: PrefixIndex,
        transfers: Transfers,
        placer: Placer,
        clock: Clock,
        ends: Ends,
        *,
        pause_s: float,
        timeout_s: float,
    ) -> None:
        self._records = records
        self._registry = registry
        self._router = router
        self._index = index
        self._transfers = transfers
        self._placer = placer
        self._clock = clock
        self._ends = ends
        self._pause_s = pause_s
        self._timeout_s = timeout_s
        """Of each of a move's two waits: for its blocks, and for the second leg's first event."""

        self._slots = asyncio.Semaphore(MAX_MOVES)

    # ------------------------------------------------------------ a whole group
    async def empty(self, peer: Peer, timeout_s: float) -> Emptied:
        """See `Coordinator.empty`."""
        done = Emptied()
        self._check_others(peer)
        self._registry.drain(peer)
        self._choose_other_decoders(peer)
        self._begin_elsewhere(peer, done)
        try:
            async with asyncio.timeout(timeout_s):
                async with asyncio.TaskGroup() as tasks:
                    for record, sequence in self._on(peer):
                        tasks.create_task(self._take_away(record, sequence, peer, done))
                while self._transfers.involving(peer):
                    self._transfers.closed.clear()
                    await self._transfers.closed.wait()
        except TimeoutError:
            self._cut_off(peer, done)
        return done

    def _check_others(self, peer: Peer) -> None:
        if not any(member.peer != peer for member in self._registry.routable()):
            self._registry.drain(peer, False)
            raise GroupUnavailable(f"no other group could take over what {peer} does; start one first: kvferry scale")

    def _on(self, peer: Peer) -> list[tuple[Record, Sequence]]:
        return [(record, sequence) for record in self._records.values() for sequence in record.on(peer)]

    def _choose_other_decoders(self, peer: Peer) -> None:
        """For prompts that other groups compute at this moment."""
        for record in self._records.values():
            for placement in record.placements:
                if (
                    placement.decode == peer
                    and placement.prefill is not None
                    and record.on(placement.prefill, placement)
                ):
                    if placement.transfer is not None:
                        self._transfers.end(placement.transfer, f"{peer} is being emptied")
                    placement.decode = None
                    record.wake.set()

    def _begin_elsewhere(self, peer: Peer, done: Emptied) -> None:
        """What waits there, by the group's last report: it begins in the order of priority and arrival."""
        member = self._registry.get(peer)
        begun = [sequence for _, sequence in self._on(peer) if sequence.leg and sequence.leg.reported]
        others = [(record, sequence) for record, sequence in self._on(peer) if sequence not in begun]
        others.sort(key=lambda pair: (_waits_for_blocks(pair[1], peer), pair[0].request.priority, pair[0].order))
        num_computing = max(0, (member.load.num_running if member else 0) - len(begun))
        for i, (record, sequence) in enumerate(others):
            if i >= num_computing or _waits_for_blocks(sequence, peer):
                self._ends.place_anew(record, sequence)
                done.num_rerouted += 1

    def _cut_off(self, peer: Peer, done: Emptied) -> None:
        self._check_others(peer)
        for record, sequence in self._on(peer):
            self._ends.place_anew(record, sequence)
            done.num_resumed += 1
        for transfer in self._transfers.involving(peer):
            self._transfers.end(transfer, f"{peer} leaves")

    # ------------------------------------------------------------ one sequence
    async def _take_away(self, record: Record, sequence: Sequence, peer: Peer, done: Emptied) -> None:
        """Returns once the sequence does not run on `peer` any more."""
        pause_s, avoid = self._pause_s, set[Peer]()
        while (leg := sequence.leg) is not None and leg.peer == peer:
            sequence.news.clear()
            if not leg.reported:  # its prompt is being computed
                await sequence.news.wait()
                continue
            async with self._slots:
                if await self._move(record, sequence, peer, avoid):
                    done.num_moved += 1
                    return
            sequence.news.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._until(sequence, lambda: sequence.leg is not leg)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    async def _move(self, record: Record, sequence: Sequence, peer: Peer, avoid: set[Peer]) -> bool:
        """One try. False: the sequence is where it was, or ended, or was lost. Puts who failed into `avoid`."""
        source = self._registry.get(peer)
        if source is None or sequence.leg is None or sequence.leg.peer != peer:
            return False
        tokens = [*record.request.prompt_token_ids, *sequence.tokens][:-1]  # the last one has no KV yet
        hits = self._index.longest_prefix(
            self._placer.hashes(record, tokens), self._clock.now_ns(), self._registry.num_window
        )
        decision = self._router.route_move(record.demand([sequence]), source, self._registry.routable(), hits, avoid)
        if decision is None:
            return False
        transfer = Transfer(
            record.next_transfer_id(), record.num_transfers, peer, decision.decode, {sequence.index}, prefilling=False
        )
        record.num_transfers += 1
        transfer.on_change = sequence.news.set
        placement = Placement(None, decision.decode, self._router.book(decision), {sequence.index})
        placement.transfer = transfer
        record.placements.append(placement)
        self._transfers.begin(transfer)
        move = sequence.move = Move(placement)
        try:
            async with asyncio.timeout(2 * self._timeout_s):
                await self._transfers.arrange(transfer, tokens, record.request.cache_salt)
                await self._until(sequence, lambda: sequence.move is not move or transfer.arrived or not transfer.open)
                if sequence.move is move and transfer.open and transfer.complete:
                    self._begin(record, sequence, move, decision.decode)
                    await self._until(sequence, lambda: sequence.move is not move)
        except (KvferryError, TimeoutError) as error:
            _log.info("move_failed", request_id=record.request.request_id, to=str(decision.decode), reason=str(error))
        finally:
            if sequence.move is move:
                self._ends.drop_move(record, sequence)
        if not move.taken_over:
            avoid.add(decision.decode)
        return move.taken_over

    def _begin(self, record: Record, sequence: Sequence, move: Move, peer: Peer) -> None:
        member, transfer = self._registry.get(peer), move.placement.transfer
        assert member is not None, f"{peer} is gone and the move to it was not dropped"
        assert transfer is not None
        move.leg = record.new_leg(peer, move.placement)
        move.leg.behind = True
        member.port.submit([record.work(sequence, move.leg, transfer.transfer_id, None, self._clock.now_ns())])

    async def _until(self, sequence: Sequence, holds: Callable[[], bool]) -> None:
        """For callers with a deadline."""
        while not holds():
            sequence.news.clear()
            await sequence.news.wait()


def _waits_for_blocks(sequence: Sequence, peer: Peer) -> bool:
    """Its prompt was computed elsewhere, and is on its way, or what it begins with is."""
    if sequence.leg is None:
        return False
    transfer, fetch = sequence.leg.placement.transfer, sequence.leg.placement.fetch
    fetching = fetch is not None and fetch.open and not fetch.arrived and fetch.destination == peer
    return fetching or (transfer is not None and transfer.destination == peer)
