"""One sequence inside one engine: what it has, what it still has to compute."""

from __future__ import annotations

import sys
from collections.abc import Sequence as SequenceOf

from kvferry.runtime.ids import BlockHash, BlockId, SequenceKey
from kvferry.runtime.request import FinishReason, SequenceRequest, rank_ns
from kvferry.runtime.step import SampleInput, make_table


class BlockTable:
    """What a sequence holds in one block group; see `kv/table.py`. Mutable; owned by the scheduler."""

    __slots__ = ("block_ids", "num_announced", "num_dropped", "num_sealed")

    def __init__(self) -> None:
        self.block_ids = make_table()
        self.num_dropped = 0
        """Leading entries that are `NO_BLOCK`."""
        self.num_sealed = 0
        """Leading entries that are sealed, or were when they were dropped."""
        self.num_announced = 0
        """Leading entries whose hash the pool knows."""

    @property
    def num_held(self) -> int:
        return len(self.block_ids) - self.num_dropped

    def held(self) -> SequenceOf[BlockId]:
        return self.block_ids[self.num_dropped :]


class Sequence:
    """Mutable; owned by the scheduler. `tokens` = prompt + output; KV exists for the first `num_computed`."""

    __slots__ = (
        "_handoff_length",
        "_max_length",
        "_min_tokens",
        "_penalises",
        "_plain",
        "begin_ns",
        "hashes",
        "key",
        "num_cached",
        "num_computed",
        "num_passed",
        "num_prompt",
        "order",
        "preempted_ns",
        "reported",
        "request",
        "root",
        "stalled_ns",
        "stops",
        "tables",
        "tokens",
    )

    def __init__(
        self, request: SequenceRequest, root: bytes, hashes: list[BlockHash], serial: int, priority_step_ns: int
    ) -> None:
        self.request = request
        self.key: SequenceKey = request.key
        self.order = (rank_ns(request.priority, request.arrival_ns, priority_step_ns), serial)
        """Smaller goes first."""
        self.root = root
        self.tokens = [*request.prompt_token_ids, *request.output_token_ids]
        self.num_prompt = len(request.prompt_token_ids)
        self.hashes = hashes
        """Chain over the full blocks of `tokens`; grows as blocks fill up."""
        self.tables: list[BlockTable] = []
        """One for each block group while it runs, else empty."""
        self.num_computed = 0
        self.num_cached: int | None = None
        """Leading tokens that no admission had to compute."""
        self.num_passed = 0
        """How many were admitted past it while it lacked blocks."""
        self.preempted_ns: int | None = None
        """Since when it waits again for blocks."""
        self.stalled_ns = 0
        """How long it did so, of which no event has told."""
        self.begin_ns: int | None = None
        self.reported = False
        """Whether an event has told of `num_cached` and `begin_ns`."""
        params = request.sampling
        self._penalises, self._plain, self._min_tokens = params.penalises, params.plain, params.min_tokens
        self._max_length = self.num_prompt + params.max_tokens
        handoff = request.handoff_after
        self._handoff_length = sys.maxsize if handoff is None else self.num_prompt + handoff
        self.stops = frozenset([*([] if params.ignore_eos else request.eos_token_ids), *params.stop_token_ids])

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_uncomputed(self) -> int:
        return len(self.tokens) - self.num_computed

    def num_left(self, max_context: int) -> int:
        """Tokens until it ends by its length or is handed over."""
        limit = min(self.request.sampling.max_tokens, max_context - self.num_prompt)
        if self.request.handoff_after is not None:
            limit = min(limit, self.request.handoff_after)
        return limit - self.num_output

    def banned(self, position: int) -> list[int]:
        """Tokens that may not be drawn there: ends of sequence, until `min_tokens` are there."""
        return sorted(self.stops) if position < self._min_tokens else []

    def sample_input(self, draft: list[int]) -> SampleInput:
        """For the token behind all that it has and `draft`, as if the draft had been drawn."""
        request, position = self.request, len(self.tokens) - self.num_prompt + len(draft)
        output = self.tokens[self.num_prompt :] + draft if self._penalises else []
        banned = self.banned(position)
        plain = self._plain and not banned
        return SampleInput(self.key, request.sampling, position, request.prompt_token_ids, output, banned, plain)

    def finish_reason(self, max_context: int) -> FinishReason | None:
        """Judges the sequence after its last token was appended."""
        length = len(self.tokens)
        if self.tokens[-1] in self.stops:
            return FinishReason.STOP
        if length >= self._max_length or length >= max_context:
            return FinishReason.LENGTH
        return FinishReason.HANDOFF if length >= self._handoff_length else None
