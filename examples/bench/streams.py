"""Answers as they come in, whoever gives them, and what a load's answers amount to."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from loads import Arriving
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


SETTLE_S = 1.0
"""For streams to begin before anything comes to disturb them."""

Ask = Callable[[list[int], int], Coroutine[Any, Any, Answer]]
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


@dataclass(frozen=True)
class Beside:
    """Streams that decoded, and what arrived meanwhile: from the instant `since` on, which is where figures begin."""

    streams: list[Answer]
    arrived: list[Answer]
    began: float
    since: float

    def figures(self) -> dict[str, float]:
        """`tokens_per_s` and ITL of the streams, TTFT and rate of what arrived."""
        late = [[one for one in answer.arrivals if one[0] >= self.since] for answer in self.streams]
        end = max(answer.arrivals[-1][0] for answer in self.streams)
        gaps = [gap for arrivals in late for gap in token_gaps(arrivals)]
        return {
            "itl_p50_s": percentile(gaps, 50),
            "itl_p99_s": percentile(gaps, 99),
            "tokens_per_s": sum(count for arrivals in late for _, count in arrivals) / (end - self.since),
            "arrived_ttft_p50_s": percentile([answer.ttft_s for answer in self.arrived], 50),
            "arrived_per_s": sum(answer.arrivals[-1][0] <= end for answer in self.arrived) / (end - self.since),
            "seconds": end - self.began,
        }


async def beside(ask: Ask, streams: Sequence[list[int]], arriving: Iterable[list[int]], load: Arriving) -> Beside:
    """Streams decode; once they do, other prompts arrive, one at a time, until the streams are done."""
    began, arrived = time.perf_counter(), list[Answer]()
    async with asyncio.TaskGroup() as tasks:
        decoding = [tasks.create_task(ask(prompt, load.stream_tokens)) for prompt in streams]
        since = due = began + SETTLE_S
        for prompt in arriving:
            await asyncio.wait(decoding, timeout=max(0.0, due - time.perf_counter()))
            if all(task.done() for task in decoding):
                break
            due = time.perf_counter() + load.every_s
            arrived.append(await ask(prompt, load.arriving_tokens))
    return Beside([task.result() for task in decoding], arrived, began, since)


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
