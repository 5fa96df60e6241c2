"""Token events of one request to deltas for its client: text, stop strings, usage. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvferry.cluster.service import Delta
from kvferry.runtime.request import FinishReason, Request, TokenEvent
from kvferry.runtime.text.detokenizer import TextStream
from kvferry.runtime.text.tokenizer import Tokenizer


class Answer:
    """All sequences of one request. `on_stop(index)` is called when a stop string ends a sequence that still runs."""

    def __init__(self, request: Request, tokenizer: Tokenizer, on_stop: Callable[[int], None]) -> None:
        sampling = request.sampling
        self._with_logprobs = sampling.logprobs is not None
        self._on_stop = on_stop
        self._texts = [TextStream(tokenizer, sampling, request.prompt_token_ids) for _ in range(sampling.n)]
        self._ended = [False] * sampling.n
        self.num_output_tokens = 0
        self.finish_reason = ""
        """Of the sequence that ended last."""

    def take(self, events: Sequence[TokenEvent]) -> list[Delta]:
        """At most one delta per sequence for however many events have piled up, in the order of their first events."""
        by_index: dict[int, list[TokenEvent]] = {}
        for event in events:
            if not self._ended[event.key.index]:
                by_index.setdefault(event.key.index, []).append(event)
        return [self._delta(index, theirs) for index, theirs in by_index.items()]

    def _delta(self, index: int, events: list[TokenEvent]) -> Delta:
        with_token = [event for event in events if event.token_id is not None]
        reason = next((event.finish_reason for event in events if event.finish_reason is not None), None)
        token_ids = [event.token_id for event in with_token if event.token_id is not None]
        piece = self._texts[index].push(token_ids, last=reason is not None)
        kept = piece.num_tokens_kept
        if piece.stopped:
            if reason is None:
                self._on_stop(index)
            reason = FinishReason.STOP
        if reason is not None:
            self._ended[index] = True
            self.finish_reason = reason.value
        self.num_output_tokens += kept
        logprobs = [event.logprob for event in with_token[:kept] if event.logprob is not None]
        return Delta(
            index=index,
            token_ids=token_ids[:kept],
            text=piece.text,
            logprobs=logprobs if self._with_logprobs else None,
            finish_reason=None if reason is None else reason.value,
        )
