"""All links of one rank, as the thread that executes plans sees them. No call waits for a peer.

Each route to or from a peer has a link of its own. A link that goes down is reported and forgotten; the next `open`
for that peer makes a new one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import TypeVar

import msgspec
import torch

from kvferry.runtime.config import TransferConfig
from kvferry.runtime.errors import IncompatiblePeer, InvalidArgument
from kvferry.runtime.ids import Peer
from kvferry.runtime.kv.groups import KVGroups
from kvferry.runtime.step import CloseLink, Discard, Grant, Import, OpenLink, Revoke, Send, StepPlan
from kvferry.runtime.transfer.group_span import GroupSpan
from kvferry.runtime.transfer.landing import Landing
from kvferry.runtime.transfer.link import (
    LinkContext,
    LinkStats,
    LinkThread,
    Outgoing,
    ReceiveLink,
    Report,
    SendLink,
)
from kvferry.runtime.transfer.plan import Route, copy_plan
from kvferry.runtime.transfer.secret import NO_SECRET
from kvferry.runtime.transfer.staging import Staging
from kvferry.runtime.transfer.ticket import GroupAddress, LinkDown, RankAddress, Sent
from kvferry.runtime.transfer.transport import LinkName, Transport

CLOSE_S = 5.0
AnyLink = TypeVar("AnyLink", SendLink, ReceiveLink)


class Links:
    """`blocks`: this rank's storage of each block group, `[num_blocks, *layout.block_shape]`.

    Owns `transport`. `report` is called from many threads; it gets every `Sent` exactly once and within the configured
    timeout of its turn.
    """

    def __init__(
        self,
        transport: Transport,
        kv: KVGroups,
        rank: int,
        own: Peer,
        blocks: Sequence[torch.Tensor],
        config: TransferConfig,
        report: Report,
        secret: bytes = NO_SECRET,
    ) -> None:
        self._transport = transport
        self._kv = kv
        self._layout = kv.main.layout
        """Heads are cut alike in all block groups."""
        self._rank = rank
        self._own = own
        self._blocks = blocks
        self._report = report
        self._staging = Staging()
        self._landing = Landing()
        self._stats = LinkStats()
        self._context = LinkContext(
            transport=transport,
            staging=self._staging,
            landing=self._landing,
            stats=self._stats,
            report=report,
            timeout_s=config.timeout_s,
            checksum=config.checksum,
            fingerprint=kv.fingerprint,
            secret=secret,
        )
        self._lock = threading.Lock()
        self._outbound: dict[Peer, dict[int, SendLink]] = {}
        self._inbound: dict[Peer, dict[int, ReceiveLink]] = {}
        self._routes: dict[tuple[Peer, bool], list[Route]] = {}
        """This rank's, by peer and whether they lead here."""
        self._threads: list[LinkThread] = []

    def address(self) -> RankAddress:
        return self._transport.address()

    def begin(self, plan: StepPlan) -> None:
        """What a step does before its rows."""
        for close in plan.closes:
            self.close_peer(close)
        for link in plan.opens:
            self.open(link)
        for message in plan.imports:  # before discards: a transfer may end with the import of its last message
            self.import_(message)
        for discard in plan.discards:
            self.discard(discard)
        for revoke in plan.revokes:
            self.revoke(revoke)
        for grant in plan.grants:  # after discards: of blocks that change hands
            self.grant(grant)
        for send in plan.sends:  # of what earlier steps, or these imports, have written
            self.send(send)

    def open(self, link: OpenLink) -> None:
        """Makes those of the peer's links that do not exist (any more). A peer that can never match is reported."""
        address, peer = link.peer, link.peer.peer
        try:
            routes = self._make_routes(address, link.inbound)
        except (IncompatiblePeer, InvalidArgument) as error:
            self._report(LinkDown(peer, self._rank, str(error)))
            return
        with self._lock:
            self._routes[peer, link.inbound] = routes
            for route in routes:
                if link.inbound:
                    self._open_inbound(address, route, len(routes))
                else:
                    self._open_outbound(address, route)

    def _make_routes(self, address: GroupAddress, inbound: bool) -> list[Route]:
        if address.fingerprint != self._kv.fingerprint or len(address.ranks) != address.tp_size:
            raise IncompatiblePeer(f"{address.peer} has another KV layout than {self._own}; they cannot share blocks")
        theirs = msgspec.structs.replace(self._layout, tp_size=address.tp_size)
        if inbound:
            return [r for r in copy_plan(theirs, self._layout) if r.destination_rank == self._rank]
        return [r for r in copy_plan(self._layout, theirs) if r.source_rank == self._rank]

    def _open_inbound(self, address: GroupAddress, route: Route, num_routes: int) -> None:
        links = self._inbound.setdefault(address.peer, {})
        if known := links.get(route.source_rank):
            known.touch()
            return
        link = ReceiveLink(
            self._context,
            LinkName(address.peer, route.source_rank, self._own, self._rank),
            address.ranks[route.source_rank],
            GroupSpan(self._kv, self._blocks, route.destination_heads),
            num_routes,
            lambda reason: self._down(links, route.source_rank, link, address.peer, reason),
        )
        links[route.source_rank] = link
        self._start(link.life)

    def _open_outbound(self, address: GroupAddress, route: Route) -> None:
        links = self._outbound.setdefault(address.peer, {})
        if route.destination_rank in links:
            return
        link = SendLink(
            self._context,
            LinkName(self._own, self._rank, address.peer, route.destination_rank),
            address.ranks[route.destination_rank],
            GroupSpan(self._kv, self._blocks, route.source_heads),
            lambda reason: self._down(links, route.destination_rank, link, address.peer, reason),
        )
        links[route.destination_rank] = link
        self._start(link.life)

    def _start(self, thread: LinkThread) -> None:
        self._threads = [t for t in self._threads if not t.join(0)]
        self._threads.append(thread)
        thread.start()

    def _down(self, links: dict[int, AnyLink], rank: int, link: AnyLink, peer: Peer, reason: str) -> None:
        with self._lock:
            known = links.get(rank) is link
            if known:
                del links[rank]
        if known:  # otherwise this side has closed it on purpose
            self._report(LinkDown(peer, self._rank, reason))

    def send(self, send: Send) -> None:
        """Queues a message on all of this rank's routes. Reports `Sent` at once where it has none to take."""
        with self._lock:
            routes = self._routes.get((send.destination, False))
            links = dict(self._outbound.get(send.destination, {}))
        if not routes:  # another replica of the same heads sends; or no link was ever opened
            error = None if routes is not None else f"no link to {send.destination} is open"
            self._report(Sent(send.transfer_id, send.attempt, send.seq, self._rank, error))
            return
        ready = torch.cuda.Event() if self._blocks[0].is_cuda else None  # type: ignore[no-untyped-call]
        if ready is not None:
            ready.record()
        outgoing = Outgoing(send, len(routes), self._rank, self._report, ready)
        for route in routes:
            if link := links.get(route.destination_rank):
                link.put(outgoing)
            else:
                outgoing.done(f"the link to rank {route.destination_rank} of {send.destination} is down")

    def import_(self, message: Import) -> None:
        """Copies a message's payloads into the storage. Raises `InvariantBroken` if one is not here."""
        self._landing.take_back((message.transfer_id, message.attempt), message.block_ids)
        for staged in self._staging.take(message):
            staged.payload.read(partial(staged.span.write, staged.block_ids))
            staged.payload.free()

    def grant(self, grant: Grant) -> None:
        """From now on links write what arrives for these blocks themselves. On a GPU only its stream writes."""
        if not self._blocks[0].is_cuda:
            self._landing.grant((grant.transfer_id, grant.attempt), grant.block_ids)

    def revoke(self, revoke: Revoke) -> None:
        """Waits until no link writes these blocks: not for long, and not for the peer."""
        self._landing.take_back((revoke.transfer_id, revoke.attempt), revoke.block_ids)

    def discard(self, discard: Discard) -> None:
        """Drops what is staged, queued or still to come of a transfer. Waits as `revoke` does."""
        self._staging.discard(discard)
        self._landing.take_back((discard.transfer_id, discard.attempt))

    def close_peer(self, close: CloseLink) -> None:
        """Tears down all links with a peer; what they staged stays until it is imported or discarded."""
        with self._lock:
            lives: list[LinkThread] = []
            for links in (self._outbound.pop(close.peer, {}), self._inbound.pop(close.peer, {})):
                lives += [link.life for link in links.values()]
                links.clear()  # so that their end is not reported
            for inbound in (True, False):
                self._routes.pop((close.peer, inbound), None)
        for life in lives:
            life.close(f"{close.peer} is gone")

    @property
    def stats(self) -> LinkStats:
        """Lives on; reading a number needs no lock."""
        return self._stats

    @property
    def staged_bytes(self) -> int:
        return self._staging.num_bytes

    def close(self) -> list[str]:
        """Ends all links and the transport. Returns the names of threads that did not end within `CLOSE_S`."""
        with self._lock:
            peers = {*self._outbound, *self._inbound}
        for peer in peers:
            self.close_peer(CloseLink(peer))
        self._staging.close()
        self._transport.close()
        until = time.monotonic() + CLOSE_S
        return [t.name for t in self._threads if not t.join(max(0.0, until - time.monotonic()))]
