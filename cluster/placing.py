"""Finds groups for a request's sequences and has their blocks sent there. Not: what happens to them then."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from kvferry.cluster.admission import Admission, Place
from kvferry.cluster.legs import Placement, Record, Sequence
from kvferry.cluster.ports import Clock
from kvferry.cluster.prefix_index import PrefixIndex
from kvferry.cluster.registry import Member, Registry
from kvferry.cluster.router import Demand, Fetch, Router, RoutingDecision
from kvferry.cluster.transfers import Transfer, Transfers
from kvferry.runtime.errors import GroupDied, GroupUnavailable, KvferryError, NoFreeBlocks
from kvferry.runtime.ids import BlockHash, Peer
from kvferry.runtime.kv.hashing import hash_chain, salted_root
from kvferry.runtime.request import Request, rank_ns
from kvferry.runtime.transfer.ticket import Ticket

EXPECTED_BLOCKS_GRACE_S = 2.0
"""How much longer than estimated a routed request's blocks count as about to appear."""

FIRST_PAUSE_S = 0.02
"""Before a group without room for a transfer is asked again; doubles each time."""
MAX_PAUSE_S = 0.5


class Placer:
    """Called by each request's driver, one call at a time per request; the request's legs run on meanwhile."""

    def __init__(
        self,
        registry: Registry,
        router: Router,
        index: PrefixIndex,
        transfers: Transfers,
        clock: Clock,
        admission: Admission,
        *,
        unavailable_timeout_s: float,
        priority_step_s: float,
    ) -> None:
        self._registry = registry
        self._router = router
        self._index = index
        self._transfers = transfers
        self._clock = clock
        self._admission = admission
        self._unavailable_timeout_s = unavailable_timeout_s
        self._priority_step_ns = int(priority_step_s * 1e9)

    def check(self, request: Request) -> None:
        """Raises `QueueFull` for a request that should not even wait."""
        now_ns = self._clock.now_ns()
        demand = Demand(len(request.prompt_token_ids), request.sampling.n, request.sampling.max_tokens)
        self._admission.check(request, demand, self._rank_ns(request), self._registry.routable(), now_ns)

    def _rank_ns(self, request: Request) -> int:
        return rank_ns(request.priority, request.arrival_ns, self._priority_step_ns)

    async def place(self, record: Record) -> None:
        """Does the next thing that the request needs, or waits until there is one.

        Raises `GroupUnavailable` when no group lived for too long.
        """
        if record.homeless():
            await self._place_homeless(record)
        elif placement := record.without_decode():
            await self._place_decode(record, placement)
        else:
            await self._wait(record, None)

    async def _wait(self, record: Record, seconds: float | None) -> None:
        """Until something changed for the request, or `seconds` passed."""
        record.wake.clear()
        try:
            async with asyncio.timeout(seconds):
                await record.wake.wait()
        except TimeoutError:
            return

    async def _place_homeless(self, record: Record) -> None:
        """Finds a home for every homeless sequence. Raises `GroupUnavailable` when none turns up in time.

        A request that has not begun yet waits in line for it; one that has goes on in some engine's queue.
        """
        place: Place | None = None
        if record.timeline.routed_ns is None:
            demand = record.demand(record.sequences)
            place = self._admission.line.enter(self._rank_ns(record.request), demand, record.wake.set)
        try:
            await self._find_homes(record, place)
        finally:
            if place is not None:
                self._admission.line.leave(place)

    async def _find_homes(self, record: Record, place: Place | None) -> None:
        line, since_ns = self._admission.line, None
        while homeless := record.homeless():
            now_ns = self._clock.now_ns()
            members = self._registry.routable()
            if not members:
                since_ns = now_ns if since_ns is None else since_ns
                left_s = self._unavailable_timeout_s - (now_ns - since_ns) / 1e9
                if left_s <= 0:
                    raise GroupUnavailable(
                        f"no group has been reachable for {self._unavailable_timeout_s} s; see `kvferry status`"
                    )
                await self._wait(record, left_s)
                continue
            since_ns = None
            if place is not None and not line.may_try(place):
                await self._wait(record, self._unavailable_timeout_s)
                continue
            decision = self.decide(record, homeless, members, place is not None, now_ns)
            if decision is None:
                assert place is not None, "what has begun is never held back"
                line.block(place)
                await self._wait(record, self._unavailable_timeout_s)
                continue
            asked = {decision.prefill, decision.decode}
            pause_ns = max((s.pause_until_ns for s in homeless if asked & s.avoid), default=0) - now_ns
            if pause_ns > 0:
                await self._wait(record, pause_ns / 1e9)
                continue
            await self._send_off(record, homeless, decision, place, now_ns)
            return

    def decide(
        self, record: Record, sequences: list[Sequence], members: list[Member], new: bool, now_ns: int
    ) -> RoutingDecision | None:
        """`None`: there is no room."""
        demand = record.demand(sequences)
        hashes, num_window = self.hashes(record, record.shared_tokens(sequences)), self._registry.num_window
        hits, held = self._index.find(hashes, now_ns, num_window)
        avoid = {peer for s in sequences for peer in s.avoid}
        held = held.among(self._router.prices.roster(members).peers)
        closed = self._admission.closed_to(demand, members, hits, new)
        return None if closed is None else self._router.route(demand, members, hits, avoid, held, closed)

    async def _send_off(
        self,
        record: Record,
        sequences: list[Sequence],
        decision: RoutingDecision,
        place: Place | None,
        now_ns: int,
    ) -> None:
        num_hits = len(record.shared_tokens(sequences)) - decision.num_prefill_tokens
        placement = Placement(
            decision.prefill, decision.decode, self._router.book(decision), {s.index for s in sequences}, num_hits
        )
        record.placements.append(placement)
        record.timeline.routed_ns = record.timeline.routed_ns or now_ns
        if place is not None:
            self._admission.line.leave(place, admitted=True)
        tokens = record.shared_tokens(sequences)
        where = decision.prefill or decision.decode
        until_s = 2 * (decision.queue_s + decision.prefill_s) + EXPECTED_BLOCKS_GRACE_S
        for peer in {where, decision.decode}:  # a transfer's blocks are shared at its destination as well
            self._index.expect(peer, self.hashes(record, tokens), now_ns, now_ns + int(until_s * 1e9))
        ticket = self._fetch(record, placement, decision.fetch, tokens, now_ns) if decision.fetch is not None else None
        self.submit(record, sequences, where, placement, handoff=decision.prefill is not None)
        async with asyncio.TaskGroup() as tasks:
            if ticket is not None:
                name = f"request {record.request.request_id} fetch"
                tasks.create_task(self._pass_on(placement, ticket), name=name)
            if decision.prefill is not None:
                await self._ferry(record, placement, tokens)

    def _fetch(
        self, record: Record, placement: Placement, fetch: Fetch, tokens: list[int], now_ns: int
    ) -> Awaitable[Ticket] | None:
        """Asks the placement's first group for room for a prefix; what is submitted next waits for it there.

        Whatever goes wrong from now on, the group computes what it lacks.
        """
        transfer = Transfer(
            record.next_transfer_id(),
            record.num_transfers,
            fetch.source,
            placement.first,
            set(placement.active),
            prefilling=False,
            fetch_until_ns=now_ns + int(fetch.patience_s * 1e9),
        )
        record.num_transfers += 1
        placement.fetch = transfer
        self._transfers.begin(transfer)
        prefix = tokens[: fetch.num_blocks * self._registry.block_size]
        try:
            return self._transfers.ask(transfer, prefix, record.request.cache_salt)
        except GroupUnavailable as error:
            self._transfers.end(transfer, str(error))
            return None

    async def _pass_on(self, placement: Placement, ticket: Awaitable[Ticket]) -> None:
        assert placement.fetch is not None
        try:
            await self._transfers.pass_on(placement.fetch, ticket)
        except KvferryError as error:
            self._transfers.end(placement.fetch, str(error))

    async def _place_decode(self, record: Record, placement: Placement) -> None:
        """Another decode group for a prefill that runs. Without any, the hand-over leads back to being homeless."""
        prefill = self._registry.get(placement.prefill) if placement.prefill is not None else None
        if prefill is None:
            return
        sequences = record.on(prefill.peer, placement)
        tokens = record.shared_tokens(sequences)
        hits = self._index.longest_prefix(self.hashes(record, tokens), self._clock.now_ns(), self._registry.num_window)
        others = [m for m in self._registry.routable() if m.peer not in placement.refused]
        decision = self._router.route_decode(record.demand(sequences), prefill, others, hits)
        if decision is None:
            await self._wait(record, None)
            return
        placement.decode = decision.decode
        placement.booking.move_decode(decision.decode)
        await self._ferry(record, placement, tokens)

    async def _ferry(self, record: Record, placement: Placement, tokens: list[int]) -> None:
        """Has the prompt's blocks sent to the placement's decode group, if that is possible."""
        source, destination = placement.prefill, placement.decode
        if source is None or destination is None:
            return
        # Another decode group for the same prefill leg is another attempt of its transfer: the source knows by that
        # name when no more will be computed, and says at once what it cannot send.
        former = placement.transfer
        transfer_id = record.next_transfer_id() if former is None else former.transfer_id
        transfer = Transfer(transfer_id, record.num_transfers, source, destination, set(placement.active))
        record.num_transfers += 1
        placement.transfer = transfer
        self._transfers.begin(transfer)
        pause_s = FIRST_PAUSE_S
        try:
            while not await self._arrange(record, transfer, tokens):
                await self._wait(record, pause_s)
                pause_s = min(2 * pause_s, MAX_PAUSE_S)
                if not transfer.open or record.homeless() or not record.on(source, placement):
                    self._transfers.end(transfer, "there was no room for it while its prompt was computed")
                    return
        except (GroupUnavailable, GroupDied) as error:
            self._transfers.end(transfer, str(error))
            placement.refused.add(destination)
            if placement.decode == destination:
                placement.decode = None
        except KvferryError as error:  # no way: the decode group computes what it lacks
            self._transfers.end(transfer, str(error))

    async def _arrange(self, record: Record, transfer: Transfer, tokens: list[int]) -> bool:
        """False: there is no room now; there may be before the prompt is computed."""
        try:
            await self._transfers.arrange(transfer, tokens, record.request.cache_salt)
        except NoFreeBlocks:
            return False
        return True

    def submit(
        self, record: Record, sequences: list[Sequence], peer: Peer, placement: Placement, handoff: bool
    ) -> None:
        member = self._registry.get(peer)
        assert member is not None, f"{peer} was routed to but is not registered"
        brings = next((t.transfer_id for t in placement.transfers if t.open and t.destination == peer), None)
        sends = (
            record.next_transfer_id() if handoff else None
        )  # begun right after; the group learns of it with the ticket
        now_ns = self._clock.now_ns()
        member.port.submit([record.begin_leg(s, peer, placement, brings, sends, now_ns) for s in sequences])

    def hashes(self, record: Record, tokens: list[int]) -> list[BlockHash]:
        """Of the tokens' full blocks."""
        is_prompt = tokens is record.request.prompt_token_ids
        if is_prompt and record.prompt_hashes is not None:
            return record.prompt_hashes
        root = salted_root(self._registry.hash_root, record.request.cache_salt)
        hashes = hash_chain(root, tokens, self._registry.block_size)
        if is_prompt:
            record.prompt_hashes = hashes
        return hashes
