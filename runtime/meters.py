"""What an engine measures of itself: the router's cost in seconds is made of these."""

from __future__ import annotations

from kvferry.runtime.scheduler import Batch
from kvferry.runtime.sequence import Sequence
from kvferry.runtime.transfer.ticket import TransferEvent

_WEIGHT = 0.2
"""Of the newest sample in the moving averages."""
_MIN_PREFILL_TOKENS = 16
"""Smaller chunks say more about a step's fixed cost than about the rate."""


def _average(old: float, new: float) -> float:
    return new if old == 0.0 else old + _WEIGHT * (new - old)


class Meters:
    """Moving averages and totals. Rates are 0 until first measured."""

    def __init__(self) -> None:
        self.prefill_tokens_per_s = 0.0
        self.decode_step_s = 0.0
        self.link_bytes_per_s = 0.0
        self.cached_tokens = 0
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.received_bytes = 0
        self.drafted_tokens = 0
        self.accepted_tokens = 0

    def step(self, batch: Batch, seconds: float) -> None:
        """One committed step. A step's decodes are charged at the measured price, the rest is prefill's."""
        self.drafted_tokens += batch.num_drafted
        self.accepted_tokens += batch.num_accepted
        if batch.num_prefill_tokens >= _MIN_PREFILL_TOKENS:
            decode = min(self.decode_step_s, seconds / 2) if batch.num_decodes else 0.0
            self.prefill_tokens_per_s = _average(
                self.prefill_tokens_per_s, batch.num_prefill_tokens / max(seconds - decode, 1e-6)
            )
        elif batch.num_decodes and not batch.num_prefill_tokens:
            tokens = 1 + batch.num_accepted / batch.num_decodes
            self.decode_step_s = _average(self.decode_step_s, seconds / tokens)

    def first_token(self, sequence: Sequence) -> None:
        self.cached_tokens += sequence.num_cached or 0
        self.prompt_tokens += sequence.num_prompt + len(sequence.request.output_token_ids)

    def transfers(self, events: list[TransferEvent]) -> None:
        for event in events:
            self.received_bytes += event.num_bytes
            if event.num_bytes and event.link_s > 0:
                self.link_bytes_per_s = _average(self.link_bytes_per_s, event.num_bytes / event.link_s)

    def seconds_to_prefill(self, num_tokens: int) -> float:
        return num_tokens / self.prefill_tokens_per_s if self.prefill_tokens_per_s else 1.0
