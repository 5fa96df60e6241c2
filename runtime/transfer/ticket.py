"""The contract of a transfer, and the reports that ranks make about it.

    coordinator          destination group                source group
        │ expect ────────────▶ pin, lease, pending
        │ ◀──────────── Ticket │
        │ send(ticket) ──────────────────────────────────▶ pin what is sealed, send; send the rest as it is sealed
        │                      │ ◀═══════ messages ═══════ │
        │                      │ Received (each rank)      │ Sent (each rank)
        │ ◀── TransferEvent ── │ seal, COMPLETE            │ unpin

A source that has lost the end of the chain sends what is left and tells (ACTIVE, `lacking`) what will not come; the
coordinator passes it on. Terminal states: COMPLETE, FAILED, EXPIRED. After any of them the request goes on at the
destination.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from kvferry.runtime.ids import BlockHash, BlockId, Peer, TransferId


class TransferState(StrEnum):
    ACTIVE = "active"
    COMPLETE = "complete"
    FAILED = "failed"
    EXPIRED = "expired"


class RankAddress(msgspec.Struct, frozen=True, array_like=True):
    """Where one rank's links are met."""

    host: str
    store_port: int
    """TCP port of the rendezvous store that this rank hosts (0: none, the transport needs no store)."""
    machine: str
    """Names the machine (boot id); `shm` works between equal ones only."""


class GroupAddress(msgspec.Struct, frozen=True, array_like=True):
    """One group as its peers' links see it."""

    peer: Peer
    tp_size: int
    fingerprint: bytes
    """`KVLayout.fingerprint`."""
    ranks: list[RankAddress]


class ExpectRequest(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Asks a group to make room for a prompt's full blocks that `source` will send."""

    transfer_id: TransferId
    attempt: int
    source: GroupAddress
    token_ids: list[int]
    """The prompt; only full blocks travel."""
    cache_salt: str
    timeout_s: float
    sealed_only: bool = False
    """The source does not compute them: what it has not sealed when it is asked will not come."""


class TicketBlock(msgspec.Struct, frozen=True, array_like=True):
    index: int
    """Position in the prompt's chain of full blocks."""
    hash: BlockHash
    block_id: BlockId
    """At the destination; the same on all of its ranks."""


class Ticket(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What the destination still lacks and where it wants it. Nothing missing: the transfer is already complete."""

    transfer_id: TransferId
    attempt: int
    destination: GroupAddress
    missing: list[TicketBlock]
    timeout_s: float
    sealed_only: bool = False


class Received(msgspec.Struct, frozen=True, array_like=True):
    """A rank has staged one message from one source rank (checked: epochs, fingerprint, size, checksum)."""

    transfer_id: TransferId
    attempt: int
    seq: int
    source: Peer
    source_rank: int
    rank: int
    hashes: list[BlockHash]
    block_ids: list[BlockId]
    num_bytes: int
    seconds: float = 0.0
    """From its header to its last byte."""


class Sent(msgspec.Struct, frozen=True, array_like=True):
    """A rank no longer reads the blocks of one message. `error`: it did not arrive."""

    transfer_id: TransferId
    attempt: int
    seq: int
    rank: int
    error: str | None = None


class LinkDown(msgspec.Struct, frozen=True, array_like=True):
    """A rank's link to a peer is gone: nothing more will come or go through it, staged payloads stay valid."""

    peer: Peer
    rank: int
    reason: str


LinkReport = Received | Sent | LinkDown


class TransferEvent(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A transfer ended at the destination, failed at its source, or goes on from there with less (`lacking`)."""

    transfer_id: TransferId
    attempt: int
    state: TransferState
    reason: str = ""
    num_blocks: int = 0
    """Blocks that arrived."""
    num_bytes: int = 0
    """Over all ranks."""
    link_s: float = 0.0
    """While its bytes flowed, without waiting for their prefill."""
    begin_ns: int = 0
    end_ns: int = 0
    lacking: list[BlockHash] = []
    """Blocks that the source will not send any more, though it sends others."""
