"""Frames of the stream between a gateway and a group's leader: msgpack, one tagged union per direction.

The stream opens with `Hello` (the cluster's secret) and `Welcome`. After it, every frame of a group carries its epoch
and a sequence number that grows by one; what comes out of one engine step travels in one `StepFrame`.
"""

from __future__ import annotations

import msgspec

from kvferry.runtime.ids import BlockHash, Epoch, GroupId, SequenceKey, TransferId
from kvferry.runtime.kv.groups import KVGroups
from kvferry.runtime.reports import EngineLoad
from kvferry.runtime.request import SequenceRequest, TokenEvent
from kvferry.runtime.transfer.ticket import ExpectRequest, GroupAddress, Ticket, TransferEvent

PROTOCOL_VERSION = 2


# ---------------------------------------------------------------- gateway → group
class Hello(msgspec.Struct, frozen=True, tag=True, array_like=True):
    version: int
    secret: str
    gateway: str


class Submit(msgspec.Struct, frozen=True, tag=True, array_like=True):
    sequences: list[SequenceRequest]


class Cancel(msgspec.Struct, frozen=True, tag=True, array_like=True):
    keys: list[SequenceKey]


class Expect(msgspec.Struct, frozen=True, tag=True, array_like=True):
    call_id: int
    request: ExpectRequest


class SendTicket(msgspec.Struct, frozen=True, tag=True, array_like=True):
    ticket: Ticket


class EndTransfer(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Nothing more of this transfer is wanted or will come (both sides understand it). Idempotent."""

    transfer_id: TransferId
    attempt: int
    reason: str


class ShortenTransfer(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """These blocks of a transfer will not come: its source has lost them. Others will. Idempotent."""

    transfer_id: TransferId
    attempt: int
    lacking: list[BlockHash]


class Renew(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Prolongs transfers' leases by `timeout_s` from now."""

    transfer_ids: list[TransferId]
    timeout_s: float


class PeerGone(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A group's incarnation is dead: tear its links down."""

    group: GroupId
    epoch: Epoch


class Query(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Asks for `Audit` ("audit") or for `KvSnapshot` ("snapshot")."""

    call_id: int
    what: str


class Alive(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A gateway's heartbeat, sent when it has had nothing else to say for a while."""


ToGroup = (
    Hello | Alive | Submit | Cancel | Expect | SendTicket | EndTransfer | ShortenTransfer | Renew | PeerGone | Query
)


# ---------------------------------------------------------------- group → gateway
class WindowBlocks(msgspec.Struct, frozen=True, array_like=True):
    """The block group of layers with a window, beside the main one."""

    num_blocks: int
    max_held: int
    """By one sequence in the end."""
    block_bytes: int
    """Over all ranks."""


def blocks_beside(kv: KVGroups) -> WindowBlocks | None:
    """`None`: there is only the main block group."""
    if len(kv.groups) == 1:
        return None
    group = kv.groups[1]
    assert group.max_held is not None
    return WindowBlocks(group.num_blocks, group.max_held, group.layout.block_bytes * kv.tp_size)


class GroupInfo(msgspec.Struct, frozen=True, array_like=True):
    """What a group says of itself when it registers."""

    address: GroupAddress
    role: str
    hash_root: bytes
    """Groups of one cluster must agree, or their blocks mean different things."""
    block_size: int
    block_bytes: int
    """Over all ranks."""
    num_blocks: int
    max_context: int
    """Of the model and the options; and one sequence must fit the pool."""
    max_sequences: int
    max_batch_tokens: int
    model: str
    dtype: str
    pids: list[int]
    """Of the group's ranks."""
    window: int | None = None
    """Of the main block group: tokens that a later one sees; `None`: all."""
    beside: WindowBlocks | None = None

    @property
    def max_held(self) -> int | None:
        """Blocks that one sequence keeps in the end; `None`: all that it has."""
        return None if self.window is None else -(-(self.window - 1) // self.block_size) + 1


Load = EngineLoad


class KvEvents(msgspec.Struct, frozen=True, array_like=True):
    """What became visible or vanished in the group's prefix cache, in order, and a proof of the whole.

    `digest` is the XOR of all visible hashes (as a 16-byte integer, big-endian) and `count` their number, after
    these events.
    """

    stored: list[BlockHash]
    removed: list[BlockHash]
    count: int
    digest: bytes


class Welcome(msgspec.Struct, frozen=True, tag=True, array_like=True):
    version: int
    info: GroupInfo


class Refused(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """In place of `Welcome`: the stream ends."""

    error_label: str
    error_message: str


class StepFrame(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Also the heartbeat: sent at least every `heartbeat_s`, empty when nothing happened."""

    epoch: Epoch
    seq: int
    tokens: list[TokenEvent]
    transfers: list[TransferEvent]
    kv: KvEvents | None
    """`None`: nothing changed."""
    load: Load


class Reply(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Answer to a call. `error_label` is set when it failed."""

    call_id: int
    ticket: Ticket | None = None
    error_label: str | None = None
    error_message: str = ""


class Audit(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """What a group holds right now. At rest every list is empty."""

    call_id: int
    broken: list[str]
    """Violated invariants, in words."""
    sequences: list[SequenceKey]
    inbound: list[TransferId]
    outbound: list[TransferId]
    num_leased_blocks: int


class KvSnapshot(msgspec.Struct, frozen=True, tag=True, array_like=True):
    call_id: int
    seq: int
    """The last `StepFrame` that this includes."""
    hashes: list[BlockHash]


FromGroup = Welcome | Refused | StepFrame | Reply | Audit | KvSnapshot

encode = msgspec.msgpack.Encoder().encode
decode_to_group = msgspec.msgpack.Decoder(ToGroup).decode
decode_from_group = msgspec.msgpack.Decoder(FromGroup).decode
