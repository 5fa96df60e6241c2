"""What an engine says of itself to whoever drives it."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from kvferry.runtime.ids import BlockHash, SequenceKey, TransferId
from kvferry.runtime.request import TokenEvent
from kvferry.runtime.transfer.ticket import TransferEvent

OnEvicted = Callable[[list[BlockHash], list[BlockHash]], None]
"""Told of blocks that became visible, and of others that vanished."""


class StepOutput(msgspec.Struct):
    """What one step brought about."""

    tokens: list[TokenEvent]
    transfers: list[TransferEvent]
    stored: list[BlockHash]
    """Blocks that became visible in the prefix cache; disjoint from `removed`."""
    removed: list[BlockHash]


class EngineLoad(msgspec.Struct, frozen=True, array_like=True):
    """An engine's state after a step. Rates are measured; 0 means: not measured yet."""

    num_waiting: int = 0
    num_running: int = 0
    waiting_tokens: int = 0
    """Tokens still to prefill, of waiting and running sequences."""
    num_free_blocks: int = 0
    """Free or evictable."""
    num_cached_blocks: int = 0
    """Sealed, in use or not."""
    num_leased_blocks: int = 0
    prefill_tokens_per_s: float = 0.0
    decode_step_s: float = 0.0
    """Of a step without prefill, at the present batch, for each token that it brings a sequence."""
    link_bytes_per_s: float = 0.0
    """Of received transfers."""
    num_preemptions: int = 0
    cached_tokens_total: int = 0
    prompt_tokens_total: int = 0
    output_tokens_total: int = 0
    received_bytes_total: int = 0
    drafted_tokens_total: int = 0
    """By speculation; `accepted_tokens_total` of them were what the model draws."""
    accepted_tokens_total: int = 0


class EngineAudit(msgspec.Struct, frozen=True):
    """What an engine holds right now. At rest every list is empty."""

    broken: list[str]
    sequences: list[SequenceKey]
    inbound: list[TransferId]
    outbound: list[TransferId]
    num_leased_blocks: int
