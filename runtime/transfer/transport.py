"""What a transport must do: carry bytes from one rank to another over one link. Nothing of blocks or tickets.

A link is one directed pair (source rank of a group's incarnation → destination rank of another's). Each end is used by
one thread of its own, so calls block; each has a deadline. A message is a small header and a payload; the payload's
size stands in the header, so a receiver never posts too small a buffer. Every transport passes the same suite
(`tests/contract/test_transports.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import msgspec
import torch

from kvferry.runtime.ids import Peer
from kvferry.runtime.transfer.ticket import RankAddress

MAX_HEADER_BYTES = 16 << 10
MAX_PIECES = 256
T = TypeVar("T")


class LinkClosed(Exception):
    """The link is unusable from now on: the peer died, a deadline passed in mid-message, or `close` was called."""


class LinkName(msgspec.Struct, frozen=True):
    """Names both ends with their epochs; no two links of a cluster's life share a name."""

    source: Peer
    source_rank: int
    destination: Peer
    destination_rank: int

    def __str__(self) -> str:
        return f"{self.source}.{self.source_rank}>{self.destination}.{self.destination_rank}"


@dataclass(frozen=True)
class Payload:
    """A message's bytes in memory of the transport's or its sender's, which is used again once they are given back."""

    pieces: Sequence[torch.Tensor]
    """In a row, each 1-d contiguous uint8. To be looked at by `read` only."""
    free: Callable[[], None]
    """To be called once, from any thread; nobody may read it afterwards. Never fails."""
    seconds: float = 0.0
    """How long they were on their way."""
    moved: Callable[[], Sequence[torch.Tensor] | None] = lambda: None
    """Where they lie now, if their sender could not wait any longer."""

    @property
    def num_bytes(self) -> int:
        return sum(piece.numel() for piece in self.pieces)

    def read(self, use: Callable[[Sequence[torch.Tensor]], T]) -> T:
        """What `use` makes of the pieces. It is called again if they moved while it ran: then they may have changed."""
        made = use(self.pieces)
        pieces = self.moved()
        return made if pieces is None else use(pieces)


class SendEnd(Protocol):
    @property
    def max_unfinished(self) -> int:
        """Messages that may have been begun and not waited for."""

    def send(self, header: bytes, pieces: Sequence[torch.Tensor], timeout_s: float) -> None:
        """Begins one message; at most `max_unfinished` may be unfinished.

        `header`: 1 to `MAX_HEADER_BYTES` bytes. `pieces`: the payload, at most `MAX_PIECES` in a row, each 1-d
        contiguous uint8 and not empty; must not change before `wait_sent` has returned for this message, or `close`.

        Raises `LinkClosed`; the message may or may not have arrived.
        """

    def wait_sent(self, timeout_s: float) -> bool:
        """Finishes the oldest unfinished message. Raises `LinkClosed`; it may or may not have arrived.

        False: `wake` was called, and nothing is finished.
        """

    def wake(self) -> None:
        """Ends a `wait_sent`, this one or the next, that would wait for long. Safe from any thread."""

    def close(self) -> None:
        """Safe from any thread, more than once; wakes the other end and a blocked `send` within a second."""


class ReceiveEnd(Protocol):
    @property
    def in_place(self) -> bool:
        """Whether `receive_payload` can be told where to write."""

    def receive_header(self, timeout_s: float) -> tuple[bytes, int] | None:
        """The next message's header and payload size in bytes. Raises `LinkClosed`.

        `None`: nothing came in time, ask again. Where a wait that ends would close the link, it goes on.
        """

    def receive_payload(self, timeout_s: float, into: Sequence[torch.Tensor] = ()) -> Payload:
        """Must follow each header. Outlives the end.

        `into`: where to write it, of its size, as `send`'s pieces; written until this has returned or raised, and not
        any more. Raises `LinkClosed`, also when the time is over: the stream has no borders any more.
        """

    def close(self) -> None:
        """As `SendEnd.close`."""


class Transport(Protocol):
    """Makes link ends. One per rank."""

    @property
    def device(self) -> torch.device:
        """Where payloads must lie."""

    def address(self) -> RankAddress:
        """Where peers meet this rank."""

    def connect(self, name: LinkName, destination: RankAddress, timeout_s: float) -> SendEnd:
        """Blocks until the other side accepts. Raises `LinkClosed`."""

    def accept(self, name: LinkName, source: RankAddress, timeout_s: float) -> ReceiveEnd:
        """Blocks until the other side connects. Raises `LinkClosed`."""

    def close(self) -> None:
        """Closes all ends and frees what the transport holds on this machine."""
