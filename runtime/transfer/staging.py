"""Payloads that have arrived and wait for a step to copy them into the pool. Bounded; shared by all links of a rank."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from dataclasses import dataclass

from kvferry.runtime.errors import InvariantBroken
from kvferry.runtime.ids import BlockId, Peer, TransferId
from kvferry.runtime.step import Discard, Import
from kvferry.runtime.transfer.group_span import GroupSpan
from kvferry.runtime.transfer.meeting import Deadline
from kvferry.runtime.transfer.transport import LinkClosed, Payload

STAGING_BYTES = 64 << 20
MAX_DISCARDS = 1 << 14
MessageKey = tuple[Peer, TransferId, int, int]
"""Source, transfer, attempt, number of the message."""


@dataclass(frozen=True)
class Staged:
    link: str
    payload: Payload
    block_ids: list[BlockId]
    span: GroupSpan
    num_routes: int
    """On which the message comes to this rank."""


class Staging:
    """A link waits for room with a deadline, but may always stage one message: the oldest message of a source must be
    able to arrive on all of its routes, or messages that came earlier on some would block the room for the others."""

    def __init__(self, budget: int = STAGING_BYTES) -> None:
        self._budget = budget
        self._changed = threading.Condition()
        self._held: Counter[str] = Counter()
        self._messages: dict[MessageKey, dict[int, Staged]] = {}
        self._discarded: OrderedDict[tuple[TransferId, int], None] = OrderedDict()
        self._closed = False

    def reserve(self, link: str, size: int, timeout_s: float) -> None:
        """Raises `LinkClosed` when there is no room in time."""
        deadline = Deadline(timeout_s, f"{link}: waiting for room to stage {size} bytes")
        with self._changed:
            while self._held[link] and self._held.total() + size > self._budget:
                if self._closed:
                    raise LinkClosed(f"{link}: closed")
                self._changed.wait(deadline.remaining())
            self._held[link] += size

    def unreserve(self, link: str, size: int) -> None:
        with self._changed:
            self._free(link, size)

    def _free(self, link: str, size: int) -> None:
        self._held[link] -= size
        if self._held[link] <= 0:
            del self._held[link]
        self._changed.notify_all()

    def _drop(self, staged: Staged) -> None:
        self._free(staged.link, staged.payload.num_bytes)
        staged.payload.free()

    def put(self, key: MessageKey, source_rank: int, staged: Staged) -> bool:
        """Keeps a payload whose room is reserved; drops it (False) if its transfer was discarded or it is here."""
        with self._changed:
            routes = self._messages.setdefault(key, {})
            if (key[1], key[2]) in self._discarded or source_rank in routes:
                self._drop(staged)
                if not routes:
                    del self._messages[key]
                return False
            routes[source_rank] = staged
            return True

    def take(self, message: Import) -> list[Staged]:
        """The caller frees the payloads. Raises `InvariantBroken` if one is missing, or they are for other blocks."""
        key = message.source, message.transfer_id, message.attempt, message.seq
        with self._changed:
            routes = list(self._messages.pop(key, {}).values())
            for staged in routes:
                self._free(staged.link, staged.payload.num_bytes)
        if not routes or len(routes) != routes[0].num_routes or any(s.block_ids != message.block_ids for s in routes):
            raise InvariantBroken(f"{message} does not name a staged message; {len(routes)} payloads are here")
        return routes

    def discard(self, discard: Discard) -> None:
        """Drops what is staged and whatever comes later of a transfer."""
        transfer = discard.transfer_id, discard.attempt
        with self._changed:
            self._discarded[transfer] = None
            self._discarded.move_to_end(transfer)
            if len(self._discarded) > MAX_DISCARDS:
                self._discarded.popitem(last=False)
            for key in [key for key in self._messages if key[1:3] == transfer]:
                for staged in self._messages.pop(key).values():
                    self._drop(staged)

    def is_discarded(self, transfer_id: TransferId, attempt: int) -> bool:
        with self._changed:
            return (transfer_id, attempt) in self._discarded

    @property
    def num_bytes(self) -> int:
        with self._changed:
            return self._held.total()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._messages.clear()
            self._held.clear()
            self._changed.notify_all()
