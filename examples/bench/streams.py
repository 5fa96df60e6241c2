"""Answers as they come in, whoever gives them, and what a load's answers amount to."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field

from stats import percentile, token_gaps


@dataclass
class Answer:
    """One request. Instants are `time.perf_counter` seconds."""

    sent: float
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    """Instant and number of tokens of each message that brought tokens."""
    token_ids: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0
    """As the server says; of a server that does not say, 0."""
    ferried_bytes: int = 0

    def take(self, token_ids: Sequence[int]) -> None:
        """Tokens that just arrived."""
        if token_ids:
            self.arrivals.append((time.perf_counter(), len(token_ids)))
            self.token_ids += token_ids

    def complete(self, max_tokens: int) -> Answer:
        """Itself. Raises `RuntimeError` if tokens are missing."""
        if len(self.token_ids) != max_tokens:
            raise RuntimeError(f"{len(self.token_ids)} tokens came back, {max_tokens} were asked for")
        return self

    @property
    def ttft_s(self) -> float:
        return self.arrivals[0][0] - self.sent

    @property
    def decode_tokens_per_s(self) -> float:
        """After the first message."""
        (begin, first), (end, _) = self.arrivals[0], self.arrivals[-1]
        return (len(self.token_ids) - first) / (end - begin)


Ask = Callable[[list[int], int], Awaitable[Answer]]
"""Prompt and how many tokens to generate: greedy, regardless of end-of-sequence tokens."""


async def closed_loop(ask: Ask, prompts: Iterable[list[int]], concurrency: int, max_tokens: int) -> list[Answer]:
    """`concurrency` clients, each of which sends its next request when its last one is answered."""
    left = iter(prompts)
    answers: list[Answer] = []

    async def one_client() -> None:
        answers.extend([await ask(prompt, max_tokens) for prompt in left])

    async with asyncio.TaskGroup() as clients:
        for _ in range(concurrency):
            clients.create_task(one_client())
    return answers


def figures(answers: Sequence[Answer], begin: float) -> dict[str, float]:
    """Of one load that began at `begin`: seconds, and tokens a second over all."""
    end = max(answer.arrivals[-1][0] for answer in answers)
    ttft = [answer.ttft_s for answer in answers]
    gaps = [gap for answer in answers for gap in token_gaps(answer.arrivals)]
    return {
        "ttft_p50_s": percentile(ttft, 50),
        "ttft_p99_s": percentile(ttft, 99),
        "itl_p50_s": percentile(gaps, 50),
        "itl_p99_s": percentile(gaps, 99),
        "tokens_per_s": sum(len(answer.token_ids) for answer in answers) / (end - begin),
        "seconds": end - begin,
    }
