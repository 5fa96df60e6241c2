"""Prompts and loads of the benchmark. The same names give the same token ids, in every run and on every machine.

Texts are English sentences drawn from a small grammar. Prompts of different names differ from their first block on;
prompts of one load that share a prefix share exactly its tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

Encode = Callable[[str], list[int]]

PROMPT_TOKENS, SHARED_TOKENS, NEW_TOKENS = 256, 192, 64
LONG_PROMPT_TOKENS, LONG_SHARED_TOKENS = 1024, 960
SHORT_PROMPT_TOKENS, MAX_ARRIVING = 64, 64

_PLACES = ("harbour", "station", "valley", "market", "library", "workshop", "lighthouse", "orchard", "canal", "archive")
_PEOPLE = ("the captain", "an old baker", "my sister", "the clerk", "a young surveyor", "our neighbour", "the pilot")
_VERBS = ("measured", "repaired", "remembered", "painted", "carried", "described", "counted", "sold", "found")
_THINGS = ("the broken clock", "a letter from the north", "seven wooden boats", "the coast's map", "a copper bell")
_TIMES = ("before the rain came", "in the first week of March", "while the others slept", "after sunset", "at noon")
_ENDS = (
    "and nobody asked why.",
    "because the price of salt had doubled.",
    "although the road was closed to carts.",
    "so the children could see it from the window.",
    "which surprised even the mayor.",
    "and wrote the numbers down with great care.",
)


@dataclass(frozen=True)
class Load:
    """Requests of `NEW_TOKENS` greedy tokens each, of which at most `concurrency` are in flight (a closed loop)."""

    name: str
    shared: bool
    num_requests: int
    concurrency: int


SHARED_64 = Load("64 at once, shared", True, 64, 64)
SHARED_16 = Load("16 at once, shared", True, 16, 16)
UNSHARED_16 = Load("16 at once, unshared", False, 16, 16)
SHARED_8 = Load("8 clients, shared", True, 32, 8)
UNSHARED_8 = Load("8 clients, unshared", False, 32, 8)


@dataclass(frozen=True)
class Arriving:
    """Streams that decode while long prompts arrive, at most one at a time and one in `every_s` seconds."""

    num_streams: int = 4
    stream_tokens: int = 384
    arriving_tokens: int = 8
    """Of each long prompt's answer."""
    every_s: float = 2.0

    def prompts(self, encode: Encode, name: str) -> tuple[list[list[int]], list[list[int]]]:
        """Of the streams, and more long ones than can arrive."""
        streams = prompts(encode, f"decoding {name}", self.num_streams, num_tokens=SHORT_PROMPT_TOKENS)
        return streams, prompts(encode, f"arriving {name}", MAX_ARRIVING, num_tokens=LONG_PROMPT_TOKENS)


def sentences(rng: random.Random, count: int) -> str:
    return " ".join(
        f"In the {rng.choice(_PLACES)}, {rng.choice(_PEOPLE)} {rng.choice(_VERBS)} {rng.choice(_THINGS)} "
        f"{rng.choice(_TIMES)}, {rng.choice(_ENDS)}"
        for _ in range(count)
    )


def text_tokens(encode: Encode, name: str, count: int) -> list[int]:
    """`count` tokens of a text that begins with a number drawn for `name`."""
    rng = random.Random(name)
    text = f"{rng.randrange(10**9):09d}. {sentences(rng, 2 + count // 16)}"
    tokens = encode(text)
    if len(tokens) < count:
        raise ValueError(f"{len(tokens)} tokens of text, {count} wanted: fewer than 16 tokens make a sentence")
    return tokens[:count]


def prompts(
    encode: Encode, name: str, num_prompts: int, *, num_tokens: int = PROMPT_TOKENS, num_shared: int = 0
) -> list[list[int]]:
    """Prompts of `num_tokens` token ids; the first `num_shared` are the same in all of them, the next one never is."""
    prefix = text_tokens(encode, f"{name} prefix", num_shared) if num_shared else []
    rests = [text_tokens(encode, f"{name} {i}", num_tokens - num_shared) for i in range(num_prompts)]
    return [prefix + rest for rest in rests]


def prompts_of(encode: Encode, load: Load, run: int) -> list[list[int]]:
    """Fresh ones for every run: nothing of an earlier run's cache fits."""
    shared = SHARED_TOKENS if load.shared else 0
    return prompts(encode, f"{load.name} run {run}", load.num_requests, num_shared=shared)
