"""Simulated links of one group: what `runtime/transfer/links.py` does with threads, done with the event loop.

Blocks are read when a message leaves, not when it is planned: a block that its group lets go too early arrives with
foreign contents.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple, Protocol

import msgspec

from kvferry.cluster.sim.model import BLOCK_BYTES, Blocks
from kvferry.cluster.sim.network import Process
from kvferry.cluster.sim.trace import Trace
from kvferry.runtime.errors import InvariantBroken
from kvferry.runtime.ids import BlockId, Peer, TransferId
from kvferry.runtime.kv.layout import KVLayout
from kvferry.runtime.step import Import, OpenLink, Send, StepPlan
from kvferry.runtime.transfer.plan import Route, copy_plan
from kvferry.runtime.transfer.ticket import GroupAddress, LinkDown, LinkReport, Received, Sent

MessageKey = tuple[Peer, TransferId, int, int]
Payload = list[list[bytes]]


class LinkNoise(msgspec.Struct, frozen=True, kw_only=True):
    """How often a message on a link meets what, and how long it travels."""

    lost: float = 0.0
    repeated: float = 0.0
    overtaken: float = 0.0
    max_delay_s: float = 0.01


class Host(Protocol):
    """A group, as its links see it."""

    process: Process
    blocks: Blocks
    layout: KVLayout
    links: Links

    @property
    def peer(self) -> Peer: ...

    def report(self, report: LinkReport) -> None: ...


Find = Callable[[Peer], Host | None]


class _Flight:
    """One `Send` on its way; reports `Sent` once per rank."""

    def __init__(self, host: Host, send: Send, routes: list[Route]) -> None:
        self.send = send
        self._host = host
        self._left = Counter(route.source_rank for route in routes)
        for rank in range(host.layout.tp_size):
            if rank not in self._left:  # another replica of the same heads sends
                self._report(rank, None)

    def done(self, rank: int) -> bool:
        """One route has delivered. Returns whether all have."""
        self._left[rank] -= 1
        if not self._left[rank]:
            del self._left[rank]
            self._report(rank, None)
        return not self._left

    def fail(self, reason: str) -> None:
        for rank in list(self._left):
            self._report(rank, reason)
        self._left.clear()

    def _report(self, rank: int, error: str | None) -> None:
        self._host.report(Sent(self.send.transfer_id, self.send.attempt, self.send.seq, rank, error))


class _Staged(NamedTuple):
    """What one route has brought of a message."""

    route: Route
    num_routes: int
    """On which the message comes."""
    block_ids: list[BlockId]
    payload: Payload | None
    """`None`: it was written when it came."""


class _OutLink:
    def __init__(self, routes: list[Route]) -> None:
        self.routes = routes
        self.flights: dict[_Flight, None] = {}
        self.free_at: dict[Route, float] = {}


class Links:
    """All links of one group, of all its ranks."""

    def __init__(
        self, host: Host, find: Find, noise: LinkNoise, timeout_s: float, trace: Trace, rng: random.Random
    ) -> None:
        self._host = host
        self._find = find
        self._noise = noise
        self._timeout_s = timeout_s
        self._trace = trace
        self._rng = rng
        self._loop = asyncio.get_running_loop()
        self._outbound: dict[Peer, _OutLink] = {}
        self._inbound: set[Peer] = set()
        self._callers: dict[Peer, list[Callable[[], None]]] = {}
        """Messages of sources that this group does not wait for yet."""
        self._staged: dict[MessageKey, dict[Route, _Staged]] = {}
        self._discarded: set[tuple[TransferId, int]] = set()
        self._granted: dict[tuple[TransferId, int, int], set[BlockId]] = {}
        """Of a transfer and a rank: blocks that links write when they arrive."""

    # ------------------------------------------------------------ a step
    def begin(self, plan: StepPlan) -> None:
        """What a step does before its rows."""
        for close in plan.closes:
            self._close(close.peer)
        for link in plan.opens:
            self._open(link)
        for message in plan.imports:
            self._import(message)
        for discard in plan.discards:
            self._take_back(discard.transfer_id, discard.attempt)
            self._discarded.add((discard.transfer_id, discard.attempt))
            for key in [k for k in self._staged if k[1:3] == (discard.transfer_id, discard.attempt)]:
                del self._staged[key]
        for revoke in plan.revokes:
            self._take_back(revoke.transfer_id, revoke.attempt, revoke.block_ids)
        for grant in plan.grants:
            for rank in range(self._host.layout.tp_size):
                self._granted[grant.transfer_id, grant.attempt, rank] = set(grant.block_ids)
        for send in plan.sends:
            self._send(send)

    def _take_back(self, transfer_id: TransferId, attempt: int, block_ids: list[BlockId] | None = None) -> None:
        for rank in range(self._host.layout.tp_size):
            granted = self._granted.get((transfer_id, attempt, rank), set())
            granted.difference_update(granted.copy() if block_ids is None else block_ids)
            if not granted:
                self._granted.pop((transfer_id, attempt, rank), None)

    def _open(self, link: OpenLink) -> None:
        peer = link.peer.peer
        if not link.inbound:
            if peer not in self._outbound:
                self._outbound[peer] = _OutLink(self._routes(link.peer))
            return
        self._inbound.add(peer)
        for call in self._callers.pop(peer, []):
            self._loop.call_soon(call)

    def _routes(self, destination: GroupAddress) -> list[Route]:
        return copy_plan(self._host.layout, msgspec.structs.replace(self._host.layout, tp_size=destination.tp_size))

    def _import(self, message: Import) -> None:
        staged = list(
            self._staged.pop((message.source, message.transfer_id, message.attempt, message.seq), {}).values()
        )
        if not staged or len(staged) != staged[0].num_routes or any(s.block_ids != message.block_ids for s in staged):
            raise InvariantBroken(f"{message} does not name a staged message; {len(staged)} payloads are here")
        self._take_back(message.transfer_id, message.attempt, message.block_ids)
        for part in staged:
            self._write(part)

    def _write(self, part: _Staged) -> None:
        if part.payload is not None:
            first = self._host.layout.heads(part.route.destination_rank)[0]
            low, high = part.route.destination_heads
            self._host.blocks.write(part.block_ids, range(first + low, first + high), part.payload)

    # ------------------------------------------------------------ sending
    def _send(self, send: Send) -> None:
        link = self._outbound.get(send.destination)
        if link is None:
            for rank in range(self._host.layout.tp_size):
                error = f"no link to {send.destination} is open"
                self._host.report(Sent(send.transfer_id, send.attempt, send.seq, rank, error))
            return
        flight = _Flight(self._host, send, link.routes)
        link.flights[flight] = None
        for route in link.routes:
            at = max(self._loop.time() + self._rng.random() * self._noise.max_delay_s, link.free_at.get(route, 0.0))
            link.free_at[route] = at + 1e-6
            self._loop.call_at(at, self._host.process.do, self._leaves(link, flight, route))

    def _leaves(self, link: _OutLink, flight: _Flight, route: Route) -> Callable[[], None]:
        def leave() -> None:
            send = flight.send
            if flight not in link.flights or self._outbound.get(send.destination) is not link:
                return
            first = self._host.layout.heads(route.source_rank)[0]
            heads = range(first + route.source_heads[0], first + route.source_heads[1])
            payload = self._host.blocks.read(send.source_block_ids, heads)
            luck = self._rng.random()
            if luck < self._noise.lost:
                self._trace.fault("link message lost", self._host.peer, send.destination)
                if luck < self._noise.lost / 2:  # not even the link notices
                    self._delivered(link, flight, route)
                    return
                self._loop.call_later(self._rng.random() * self._timeout_s, self.cut, send.destination, "lost", link)
                return
            at = max(self._loop.time() + self._rng.random() * self._noise.max_delay_s, link.free_at[route])
            if luck < self._noise.lost + self._noise.overtaken:
                self._trace.fault("link message overtaken", self._host.peer, send.destination)
                at += 4 * self._noise.max_delay_s
            else:
                link.free_at[route] = at + 1e-6
            self._loop.call_at(at, self._arrive, link, flight, route, payload)

        return leave

    def _arrive(self, link: _OutLink, flight: _Flight, route: Route, payload: Payload) -> None:
        """At the destination's door."""
        destination = self._find(flight.send.destination)
        if destination is None or flight not in link.flights:
            self.cut(flight.send.destination, "the peer is gone", link)
            return
        taken = False

        def take() -> None:
            nonlocal taken
            if taken or flight not in link.flights or self._outbound.get(flight.send.destination) is not link:
                return
            if self._host.peer not in destination.links._inbound:
                destination.links._callers.setdefault(self._host.peer, []).append(take)
                return
            taken = True
            self._trace.note("link", self._host.peer, destination.peer, flight.send.transfer_id, flight.send.seq)
            destination.links._stage(
                self._host.peer,
                flight.send,
                _Staged(route, len(link.routes), flight.send.destination_block_ids, payload),
            )
            self._host.process.do(lambda: self._delivered(link, flight, route))

        def give_up() -> None:
            if not taken:
                self.cut(flight.send.destination, "nobody reads there", link)

        destination.process.do(take)
        if not taken:
            self._loop.call_later(self._timeout_s, give_up)

    def _delivered(self, link: _OutLink, flight: _Flight, route: Route) -> None:
        if flight in link.flights and flight.done(route.source_rank):
            del link.flights[flight]

    # ------------------------------------------------------------ receiving
    def _stage(self, source: Peer, send: Send, staged: _Staged) -> None:
        key, route = (source, send.transfer_id, send.attempt, send.seq), staged.route
        if (send.transfer_id, send.attempt) in self._discarded or route in self._staged.get(key, {}):
            return
        granted = self._granted.get((send.transfer_id, send.attempt, route.destination_rank), set())
        if staged.num_routes == 1 and granted.issuperset(staged.block_ids):
            self._write(staged)
            staged = staged._replace(payload=None)
            granted.difference_update(staged.block_ids)
        self._staged.setdefault(key, {})[route] = staged
        report = Received(
            *key[1:],
            source,
            route.source_rank,
            route.destination_rank,
            send.hashes,
            staged.block_ids,
            len(send.hashes) * BLOCK_BYTES,
            0.001,
        )
        self._host.report(report)
        if self._rng.random() < self._noise.repeated:
            self._trace.fault("link message repeated", source, self._host.peer)
            self._loop.call_later(self._rng.random() * 0.05, self._host.process.do, lambda: self._host.report(report))

    # ------------------------------------------------------------ ends
    def cut(self, peer: Peer, reason: str, link: object = None) -> bool:
        """The link to `peer` goes down; both sides learn of it. `link`: only if it is still this one."""
        known = self._outbound.get(peer)
        if known is None or link not in (None, known):
            return False
        del self._outbound[peer]
        self._host.process.do(lambda: self._fail(known, peer, reason))
        if destination := self._find(peer):
            later_s = self._rng.random() * 0.1
            self._loop.call_later(later_s, destination.process.do, lambda: destination.links.lose(self._host.peer))
        return True

    def _fail(self, link: _OutLink, peer: Peer, reason: str) -> None:
        self._fail_flights(link, reason)
        for rank in sorted({route.source_rank for route in link.routes}):
            self._host.report(LinkDown(peer, rank, reason))

    def _fail_flights(self, link: _OutLink, reason: str) -> None:
        flights, link.flights = list(link.flights), {}
        for flight in flights:
            flight.fail(reason)

    def lose(self, source: Peer) -> None:
        """A link from `source` went down there."""
        if source in self._inbound:
            self._inbound.discard(source)
            self._host.report(LinkDown(source, 0, "closed by the peer"))

    def _close(self, peer: Peer) -> None:
        self._inbound.discard(peer)
        if link := self._outbound.pop(peer, None):
            self._fail_flights(link, f"{peer} is gone")
            if destination := self._find(peer):
                later_s = self._rng.random() * 0.1
                self._loop.call_later(later_s, destination.process.do, lambda: destination.links.lose(self._host.peer))

    def peer_died(self, peer: Peer) -> None:
        self.cut(peer, "the peer died")
        self.lose(peer)

    def be_quiet(self) -> None:
        """No more noise."""
        self._noise = LinkNoise()

    @property
    def num_staged(self) -> int:
        return len(self._staged)

    def peers(self) -> list[Peer]:
        """To whom a link is open."""
        return list(self._outbound)
