"""What a transport must do: carry bytes from one rank to another over one link. Nothing of blocks or tickets.

A link is one directed pair (source rank of a group's incarnation → destination rank of another's). Each end is used by
one thread of its own, so calls block; each has a deadline. A message is a small header and a payload; the payload's
size stands in the header, so a receiver never posts too small a buffer. Every transport passes the same suite
(`tests/contract/test_transports.py`).
"""

from __future__ import annotations

from typing import Protocol

import msgspec
import torch

from kvferry.runtime.ids import Peer
from kvferry.runtime.transfer.ticket import RankAddress

MAX_HEADER_BYTES = 16 << 10


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


class SendEnd(Protocol):
    def send(self, header: bytes, payload: torch.Tensor, timeout_s: float) -> None:
        """Sends one message.

        `header`: 1 to `MAX_HEADER_BYTES` bytes. `payload`: 1-d contiguous uint8, may be empty; free to change once
        this returns.

        Raises `LinkClosed`; the message may or may not have arrived.
        """

    def close(self) -> None:
        """Safe from any thread, more than once; wakes the other end and a blocked `send` within a second."""


class ReceiveEnd(Protocol):
    def receive_header(self, timeout_s: float) -> tuple[bytes, int] | None:
        """The next message's header and payload size in bytes; `None` if nothing came in time. Raises `LinkClosed`."""

    def receive_payload(self, into: torch.Tensor, timeout_s: float) -> None:
        """Fills `into` (1-d contiguous uint8 of exactly the announced size). Must follow each header.

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
