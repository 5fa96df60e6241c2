"""What a transport must do: carry bytes from one rank to another over one link. Nothing of blocks or tickets.

A link is one directed pair (source rank of a group's incarnation → destination rank of another's). Each end is used by
one thread of its own, so calls block; each has a deadline. A message is a small header and a payload; the payload's
size stands in the header, so a receiver never posts too small a buffer. Every transport passes the same suite
(`tests/contract/test_transports.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import torch

from kvferry.runtime.ids import Peer
from kvferry.runtime.transfer.ticket import RankAddress

MAX_HEADER_BYTES = 16 << 10
MAX_PIECES = 256
MAX_UNFINISHED = 2
"""Messages that a sending end may have begun and not waited for."""


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
    """A message's bytes in memory of the transport's, which is used again once they are given back."""

    data: torch.Tensor
    """1-d contiguous uint8."""
    free: Callable[[], None]
    """To be called once, from any thread; nobody may read `data` afterwards. Never fails."""
    seconds: float = 0.0
    """How long they were on their way."""


class SendEnd(Protocol):
    def send(self, header: bytes, pieces: Sequence[torch.Tensor], timeout_s: float) -> None:
        """Begins one message; at most `MAX_UNFINISHED` may be unfinished.

        `header`: 1 to `MAX_HEADER_BYTES` bytes. `pieces`: the payload, at most `MAX_PIECES` in a row, each 1-d
        contiguous uint8 and not empty; must not change before `wait_sent` has returned for this message.

        Raises `LinkClosed`; the message may or may not have arrived.
        """

    def wait_sent(self, timeout_s: float) -> None:
        """Finishes the oldest unfinished message. Raises `LinkClosed`; it may or may not have arrived."""

    def close(self) -> None:
        """Safe from any thread, more than once; wakes the other end and a blocked `send` within a second."""


class ReceiveEnd(Protocol):
    def receive_header(self, timeout_s: float) -> tuple[bytes, int] | None:
        """The next message's header and payload size in bytes; `None` if nothing came in time. Raises `LinkClosed`."""

    def receive_payload(self, timeout_s: float) -> Payload:
        """Must follow each header. Outlives the end.

        Raises `LinkClosed`, also when the time is over: the stream has no borders any more.
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
