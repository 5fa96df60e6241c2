"""Names of things. Opaque to everyone but their maker; never reused."""

from __future__ import annotations

from typing import NewType

import msgspec

RequestId = NewType("RequestId", str)
GroupId = NewType("GroupId", str)
"""A place in the deployment (`prefill-0`). Its successive incarnations differ by epoch."""
Epoch = NewType("Epoch", int)
"""One incarnation of a group; grows over the whole cluster and is never reused."""
TransferId = NewType("TransferId", str)
BlockId = NewType("BlockId", int)
"""Index of a block in one group's pool; the same on every rank of the group."""
NO_BLOCK = BlockId(-1)
"""In a block table before every window that still counts: the block was given back. Nothing may read it."""
BlockHash = NewType("BlockHash", bytes)
"""16 bytes that name a block's content; see `kv/hashing.py`."""


class SequenceKey(msgspec.Struct, frozen=True, array_like=True):
    """One sampled continuation of a request, at one attempt. Calls are idempotent by it."""

    request_id: RequestId
    index: int
    attempt: int


class Peer(msgspec.Struct, frozen=True, array_like=True, cache_hash=True):
    """One incarnation of a group."""

    group: GroupId
    epoch: Epoch

    def __str__(self) -> str:
        return f"{self.group}@{self.epoch}"
