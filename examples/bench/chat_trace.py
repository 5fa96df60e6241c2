"""Conversations as public traces show them, drawn from a seed: what to replay against a prefix cache.

    conversation = [system prompt] + (message, answer) x 1 … 12, a pause for thinking between turns
    document     = one long prompt of its own, asked once: what sweeps a cache of least recently used blocks

Shapes follow published statistics: most conversations are short (LMSYS-Chat-1M: 2.0 turns, 70 tokens a message and 215
an answer on average); a few system prompts make most of the reuse (Alibaba's chat and API traces: a tenth of the blocks
is 77% of all reuse, 80% of it within ten minutes, an infinite cache would hit 54-62%). Lengths and pauses are
log-normal, turns geometric, the choice of a system prompt follows Zipf's law, conversations begin as a Poisson process.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

VOCAB = 32_000


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Numbers of a trace. Medians unless said otherwise; tokens and seconds."""

    num_conversations: int = 400
    num_system_prompts: int = 48
    system_tokens: tuple[int, int] = (200, 2000)
    """Lowest and highest; log-uniform between them."""
    zipf: float = 1.0
    """Exponent of the system prompts' popularity."""
    turns: tuple[int, int] = (1, 12)
    go_on: float = 0.52
    """Chance of another turn after each."""
    message_tokens: float = 45.0
    answer_tokens: float = 130.0
    spread: float = 0.8
    """Standard deviation of the logarithms of lengths."""
    max_tokens: int = 600
    """Of a message or an answer."""
    think_s: float = 25.0
    think_spread: float = 1.0
    document_share: float = 0.35
    """Of all conversations, those that are documents."""
    document_tokens: float = 1500.0
    per_s: float = 0.5
    """Conversations that begin in a second, on average."""


@dataclass(frozen=True)
class Turn:
    message: tuple[int, ...]
    """Comes after the conversation so far."""
    num_answer_tokens: int
    think_s: float
    """From the end of the answer before to this message."""


@dataclass(frozen=True)
class Conversation:
    name: str
    begin_s: float
    system: tuple[int, ...]
    """Empty for a document."""
    turns: tuple[Turn, ...]


def draw(seed: int, shape: Shape = Shape()) -> list[Conversation]:
    """In the order of their beginnings. The same seed and shape give the same conversations everywhere."""
    rng = random.Random(f"trace {seed}")
    low, high = map(math.log, shape.system_tokens)
    systems = [
        _tokens(rng, round(math.exp(low + (high - low) * rng.random()))) for _ in range(shape.num_system_prompts)
    ]
    popularity = [1 / (rank + 1) ** shape.zipf for rank in range(len(systems))]
    conversations, now_s = [], 0.0
    for number in range(shape.num_conversations):
        now_s += rng.expovariate(shape.per_s)
        if rng.random() < shape.document_share:
            turns: tuple[Turn, ...] = (_document(rng, shape),)
            system: tuple[int, ...] = ()
        else:
            system = rng.choices(systems, popularity)[0]
            turns = tuple(_turn(rng, shape, first=i == 0) for i in range(_num_turns(rng, shape)))
        conversations.append(Conversation(f"c{number}", now_s, system, turns))
    return conversations


def _num_turns(rng: random.Random, shape: Shape) -> int:
    fewest, most = shape.turns
    count = fewest
    while count < most and rng.random() < shape.go_on:
        count += 1
    return count


def _turn(rng: random.Random, shape: Shape, first: bool) -> Turn:
    return Turn(
        _tokens(rng, _length(rng, shape.message_tokens, shape)),
        _length(rng, shape.answer_tokens, shape),
        0.0 if first else rng.lognormvariate(math.log(shape.think_s), shape.think_spread),
    )


def _document(rng: random.Random, shape: Shape) -> Turn:
    length = rng.lognormvariate(math.log(shape.document_tokens), shape.spread / 2)
    return Turn(_tokens(rng, round(length)), _length(rng, shape.answer_tokens, shape), 0.0)


def _length(rng: random.Random, median: float, shape: Shape) -> int:
    return min(shape.max_tokens, max(1, round(rng.lognormvariate(math.log(median), shape.spread))))


def _tokens(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(VOCAB) for _ in range(count))
