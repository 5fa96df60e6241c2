"""Blocks that messages may be received straight into. The leader grants them and takes them back, plan by plan.

Taking back waits until nobody writes them any more: for a moment, in which a message usually ends by itself; then the
link that writes is cut, and a link that is down writes nothing (ADR 16).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from kvferry.runtime.errors import InvariantBroken
from kvferry.runtime.ids import BlockId, TransferId

PATIENCE_S = 0.1
"""A step waits at most that long for a message in the middle; other transfers of the link fail if it is cut."""
CUT_S = 5.0
TransferKey = tuple[TransferId, int]
"""Transfer and attempt."""


@dataclass(frozen=True, eq=False)
class Flight:
    """A message that is being written into blocks right now."""

    transfer: TransferKey
    block_ids: Collection[BlockId]
    cut: Callable[[str], None]
    """Makes its link go down."""


class Landing:
    """Of one rank. Links begin and end flights; the thread that executes plans does the rest."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._granted: dict[TransferKey, set[BlockId]] = {}
        """Nobody has written them yet."""
        self._flights: list[Flight] = []

    def grant(self, transfer: TransferKey, block_ids: Sequence[BlockId]) -> None:
        with self._changed:
            self._granted.setdefault(transfer, set()).update(block_ids)

    def begin(self, transfer: TransferKey, block_ids: Sequence[BlockId], cut: Callable[[str], None]) -> Flight | None:
        """To be given to `end` once nothing writes any more. `None`: they are not granted, or were written before."""
        with self._changed:
            granted = self._granted.get(transfer, set())
            if not granted.issuperset(block_ids):
                return None
            self._take(transfer, block_ids)
            flight = Flight(transfer, block_ids, cut)
            self._flights.append(flight)
            return flight

    def end(self, flight: Flight) -> None:
        with self._changed:
            self._flights.remove(flight)
            self._changed.notify_all()

    def take_back(self, transfer: TransferKey, block_ids: Sequence[BlockId] | None = None) -> None:
        """These blocks, or all of the transfer's, are not written once this returns."""
        with self._changed:
            self._take(transfer, block_ids)
            if self._changed.wait_for(lambda: not self._writing(transfer, block_ids), PATIENCE_S):
                return
            flights = self._writing(transfer, block_ids)
        for flight in flights:
            flight.cut(f"transfer {transfer[0]} is over and its message was not")
        with self._changed:
            if not self._changed.wait_for(lambda: not self._writing(transfer, block_ids), CUT_S):
                raise InvariantBroken(
                    f"transfer {transfer[0]}: its link was cut {CUT_S:g} s ago and still writes blocks"
                )

    def _take(self, transfer: TransferKey, block_ids: Sequence[BlockId] | None) -> None:
        if (granted := self._granted.get(transfer)) is not None:
            granted.difference_update(granted.copy() if block_ids is None else block_ids)
            if not granted:
                del self._granted[transfer]

    def _writing(self, transfer: TransferKey, block_ids: Sequence[BlockId] | None) -> list[Flight]:
        ours = [flight for flight in self._flights if flight.transfer == transfer]
        return ours if block_ids is None else [f for f in ours if not set(f.block_ids).isdisjoint(block_ids)]

    @property
    def num_transfers(self) -> int:
        """That have blocks granted or are being received."""
        with self._changed:
            return len({*self._granted, *(flight.transfer for flight in self._flights)})
