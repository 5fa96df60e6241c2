"""What both halves of a group's transfer ledger share; the halves are `inbound.py` and `outbound.py`.

    Inbound                                            Outbound
    expect ──▶ ACTIVE ──all sealed──▶ COMPLETE         send ──▶ ACTIVE ──all sent and reported──▶ forgotten
      shorten ──┘└─ fewer are missing                       lacks ─┘└─ fewer are to be sent
                 │ end, link_down ──▶ FAILED                      │ end, link_down, expire, error
                 │ expire ──────────▶ EXPIRED                     ▼
                 ▼                                             ENDED ──in-flight messages reported──▶ forgotten
      missing blocks abandoned, pins kept until
      `release` or the end of the lease ──▶ forgotten

A planned import is always finished before its transfer ends: the copy may already run. Forgotten ids are remembered for
a while, so that late and repeated messages are told from new ones. Neither class waits, and time is an argument.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Protocol

from kvferry.runtime.errors import InvariantBroken
from kvferry.runtime.ids import BlockHash, BlockId, TransferId

MAX_REMEMBERED = 1 << 14
NS = 1_000_000_000
Key = tuple[TransferId, int]
"""Transfer and attempt."""


class BlockStore(Protocol):
    """What a ledger needs of the block pool."""

    def lookup(self, block_hash: BlockHash) -> BlockId | None:
        """The sealed block of that name."""

    def is_pending(self, block_hash: BlockHash) -> bool:
        """Whether someone fills a block of that name right now."""

    def acquire(self, block_id: BlockId) -> None:
        """One more reference on a sealed block."""

    def release(self, block_id: BlockId) -> None:
        """Drops one reference."""

    def group_of(self, block_id: BlockId) -> int:
        """Which block group has it."""

    def lease(self, count: int, group: int) -> list[BlockId]:
        """Fresh blocks with one reference each. Raises `NoFreeBlocks`, then nothing has changed."""

    def begin_fill(
        self, block_id: BlockId, block_hash: BlockHash, parent: BlockHash | None, token_ids: list[int]
    ) -> None:
        """Marks a leased block as pending."""

    def seal(self, block_id: BlockId) -> BlockId | None:
        """Makes it visible; returns the block that the reference is on now (another one's, if it was faster).

        `None`: its parent is not here, so it could never be found; it is freed.
        """

    def abandon(self, block_id: BlockId) -> None:
        """Withdraws a pending block and drops the reference."""


@dataclass(slots=True)
class Counters:
    """Messages that changed nothing."""

    stale: int = 0
    """Of a transfer that ended, or of an earlier attempt."""
    duplicate: int = 0
    unknown: int = 0
    refused: int = 0
    """Named blocks that the ticket does not, or no longer, wait for. The transfer fails."""


class EndedTransfers:
    """The highest attempt that ended of each transfer, for the last `MAX_REMEMBERED` transfers."""

    def __init__(self) -> None:
        self._attempts: OrderedDict[TransferId, int] = OrderedDict()

    def add(self, transfer_id: TransferId, attempt: int) -> None:
        self._attempts[transfer_id] = max(attempt, self._attempts.get(transfer_id, attempt))
        self._attempts.move_to_end(transfer_id)
        if len(self._attempts) > MAX_REMEMBERED:
            self._attempts.popitem(last=False)

    def covers(self, transfer_id: TransferId, attempt: int) -> bool:
        ended = self._attempts.get(transfer_id)
        return ended is not None and attempt <= ended


def require(condition: bool, message: str) -> None:
    if not condition:
        raise InvariantBroken(message)
