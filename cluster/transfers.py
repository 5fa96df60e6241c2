"""Transfers as the coordinator sees them: asked for, ticket passed on, kept alive, ended on both sides.

Two kinds: a ferry carries away what its source computes; a fetch brings a prefix that its source holds already to where
a prompt is about to be computed, and is given up when computing it would have been faster.

A transfer is open from `begin` until every sequence that may use its blocks has either been admitted at the
destination (its decode leg's first event: the engine has taken over the lease) or will never come.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from kvferry.cluster.registry import Registry
from kvferry.runtime.errors import GroupUnavailable
from kvferry.runtime.ids import Peer, TransferId
from kvferry.runtime.transfer.ticket import ExpectRequest, Ticket, TransferEvent, TransferState

MAX_REMEMBERED = 1024


class Transfer:
    """One transfer of one placement. `waiting`: indexes of the sequences that may still need it."""

    def __init__(
        self,
        transfer_id: TransferId,
        attempt: int,
        source: Peer,
        destination: Peer,
        waiting: set[int],
        prefilling: bool = True,
        fetch_until_ns: int | None = None,
    ) -> None:
        self.transfer_id = transfer_id
        self.attempt = attempt
        self.source = source
        self.destination = destination
        self.waiting = waiting
        self.prefilling = set(waiting if prefilling else ())
        """Those of them whose prompt the source may still compute."""
        self.fetch_until_ns = fetch_until_ns
        """Of a fetch: from then on it is not worth waiting for."""
        self.end_ns: int | None = None
        """When the destination had all of it, by its clock."""
        self.arrived = False
        """The destination has said that it is over, one way or another."""
        self.complete = False
        """All of it arrived."""
        self.adopted = False
        self.open = True
        self.on_change: Callable[[], None] = _nothing
        """It has arrived, or is over."""

    @property
    def is_fetch(self) -> bool:
        return self.fetch_until_ns is not None


class Transfers:
    """The open transfers of one gateway."""

    def __init__(self, registry: Registry, timeout_s: float, expect_timeout_s: float) -> None:
        self._registry = registry
        self._timeout_s = timeout_s
        self._expect_timeout_s = expect_timeout_s
        self._open: dict[TransferId, Transfer] = {}
        self.closed = asyncio.Event()
        """Set whenever a transfer is over; for one waiter, who clears it."""
        self._ended: OrderedDict[TransferId, Transfer] = OrderedDict()
        """The last that were ended from here: their destinations may still tell what had arrived."""

    def begin(self, transfer: Transfer) -> None:
        self._open[transfer.transfer_id] = transfer

    async def arrange(self, transfer: Transfer, token_ids: list[int], cache_salt: str) -> None:
        """Makes room at the destination and tells the source what to send.

        Raises `GroupUnavailable` or `GroupDied` when the destination is of no use, another `KvferryError` when it
        only has no room. The caller ends the transfer then.
        """
        await self.pass_on(transfer, self.ask(transfer, token_ids, cache_salt))

    def ask(self, transfer: Transfer, token_ids: list[int], cache_salt: str) -> Awaitable[Ticket]:
        """Asks the destination for room; what is sent there after this call arrives after it.

        Raises `GroupUnavailable`.
        """
        source, destination = self._registry.get(transfer.source), self._registry.get(transfer.destination)
        if source is None or destination is None:
            raise GroupUnavailable(f"transfer {transfer.transfer_id}: one of its groups is gone")
        return destination.port.expect(
            ExpectRequest(
                transfer_id=transfer.transfer_id,
                attempt=transfer.attempt,
                source=source.info.address,
                token_ids=token_ids,
                cache_salt=cache_salt,
                timeout_s=self._timeout_s,
                sealed_only=transfer.is_fetch,
            ),
            self._expect_timeout_s,
        )

    async def pass_on(self, transfer: Transfer, answer: Awaitable[Ticket]) -> None:
        """Tells the source what the destination has made room for. Raises what `ask` was answered with."""
        ticket = await answer
        source = self._registry.get(transfer.source)
        if not ticket.missing:
            transfer.arrived = transfer.complete = True
            transfer.on_change()
        elif transfer.open and source is not None:  # its death ends the transfer
            source.port.send_ticket(ticket)

    def settle(self, transfer: Transfer, index: int, adopted: bool) -> None:
        """Sequence `index` was admitted at the destination (`adopted`), or will not come. Idempotent."""
        transfer.waiting.discard(index)
        transfer.prefilling.discard(index)
        transfer.adopted = transfer.adopted or adopted
        if transfer.waiting or not transfer.open:
            return
        if transfer.adopted:
            self._close(transfer)
        else:
            self.end(transfer, "no sequence needs it any more")

    def end(self, transfer: Transfer, reason: str) -> None:
        """Tells both sides that nothing more is wanted or will come. Idempotent."""
        if not transfer.open:
            return
        self._close(transfer)
        self._ended[transfer.transfer_id] = transfer
        if len(self._ended) > MAX_REMEMBERED:
            self._ended.popitem(last=False)
        for peer in (transfer.destination, transfer.source):
            if member := self._registry.get(peer):
                member.port.end_transfer(transfer.transfer_id, transfer.attempt, reason)

    def _close(self, transfer: Transfer) -> None:
        transfer.open = False
        del self._open[transfer.transfer_id]
        self.closed.set()
        transfer.on_change()

    def renew(self, now_ns: int) -> None:
        """Prolongs the leases of open transfers: at the source while it computes, at the destination then and later.

        Not while blocks are on their way though nobody computes any more: what is lost there must not be waited for. A
        fetch has its own end.
        """
        by_peer: dict[Peer, list[TransferId]] = {}
        for transfer in list(self._open.values()):
            until_ns = transfer.fetch_until_ns
            if until_ns is not None and until_ns <= now_ns and not transfer.arrived:
                self.end(transfer, "computing it is faster now")
                continue
            coming = bool(transfer.prefilling) or (transfer.is_fetch and not transfer.arrived)
            if coming:
                by_peer.setdefault(transfer.source, []).append(transfer.transfer_id)
            if coming or transfer.arrived:
                by_peer.setdefault(transfer.destination, []).append(transfer.transfer_id)
        for peer, transfer_ids in by_peer.items():
            if member := self._registry.get(peer):
                member.port.renew(transfer_ids, self._timeout_s)

    def reported(self, peer: Peer, event: TransferEvent) -> Transfer | None:
        """A group's report. Returns the transfer of ours that is over, if it is news.

        A source reports only what it cannot send, all or a part of what is missing: the destination must not wait for
        it.
        """
        transfer = self._open.get(event.transfer_id)
        if transfer is None and (late := self._ended.get(event.transfer_id)) is not None:
            if (late.attempt, late.destination) != (event.attempt, peer):
                return None
            return self._ended.pop(event.transfer_id)
        if transfer is None or transfer.attempt != event.attempt:
            return None
        if event.state is TransferState.ACTIVE:
            destination = self._registry.get(transfer.destination)
            if peer == transfer.source and destination is not None:
                destination.port.shorten_transfer(transfer.transfer_id, transfer.attempt, event.lacking)
            return None
        if peer == transfer.source:
            self.end(transfer, event.reason)
        if peer == transfer.destination:
            transfer.arrived = True
            transfer.complete = event.state is TransferState.COMPLETE
            transfer.end_ns = event.end_ns
            transfer.on_change()
        return transfer if peer in (transfer.source, transfer.destination) else None

    def involving(self, peer: Peer) -> list[Transfer]:
        """Open ones that read or write blocks of `peer`."""
        return [t for t in self._open.values() if peer in (t.source, t.destination)]

    def open_ids(self) -> set[TransferId]:
        return set(self._open)


def _nothing() -> None:
    """`on_change` of a transfer that nobody watches."""
