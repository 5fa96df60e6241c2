"""What is going to be done, from a seed: the questions to ask, and the faults with their instants. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence
from enum import StrEnum
from typing import TypeVar

import msgspec

from kvferry.runtime.config import check_range
from kvferry.runtime.errors import InvalidArgument
from kvferry.runtime.request import SamplingParams

T = TypeVar("T")
HOLD_S = (3.0, 6.0)
"""Of a stop: longer than a group may be silent and still be routed to (2 s), shorter than it may be silent and live."""
PROMPT_TOKENS = (8, 160)
MIN_CONTEXT = 64


class FaultKind(StrEnum):
    KILL = "kill"
    """SIGKILL to one rank of a group."""
    STOP = "stop"
    """SIGSTOP to one rank of a group, SIGCONT some seconds later."""
    CUT = "cut"
    """A client's connection breaks."""
    CANCEL = "cancel"
    """A client leaves in the middle of its answer."""


ALL_FAULTS = tuple(FaultKind)
PROCESS_FAULTS = frozenset({FaultKind.KILL, FaultKind.STOP})


class ChaosConfig(msgspec.Struct, frozen=True, kw_only=True):
    seconds: float
    """Under faults; the references before and the audit after take their own time."""
    clients: int = 8
    faults: tuple[FaultKind, ...] = ALL_FAULTS
    every_s: float = 5.0
    seed: int = 0
    num_prompts: int = 8
    max_tokens: int = 64
    stream_timeout_s: float = 120.0

    def __post_init__(self) -> None:
        check_range("minutes", self.seconds / 60, 1e-3, 7 * 24 * 60)
        check_range("clients", self.clients, 1, 1024)
        check_range("every_s", self.every_s, 0.1, 3600)
        check_range("num_prompts", self.num_prompts, 1, 1024)
        check_range("max_tokens", self.max_tokens, 2, 1 << 16)
        check_range("timeout_s", self.stream_timeout_s, 1.0, 3600)
        if not self.faults:
            raise InvalidArgument("faults", "", f"must name at least one of {', '.join(FaultKind)}")


def read_faults(text: str) -> tuple[FaultKind, ...]:
    """`kill,stop`. Raises `InvalidArgument`."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in ALL_FAULTS]
    if unknown or not names:
        raise InvalidArgument("faults", text, f"must be some of {','.join(FaultKind)}", "separated by commas")
    return tuple(kind for kind in FaultKind if kind in names)


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """One fault to come. Whom it hits is known only then: `pick` in [0, 1) chooses among those that can be hit."""

    at_s: float
    kind: FaultKind
    pick: float
    pick_rank: float
    hold_s: float


def plan_faults(config: ChaosConfig) -> list[Planned]:
    """In order of time. Each kind comes once in every `len(faults)` of them; no two are at the same distance."""
    rng = random.Random(f"faults {config.seed}")
    plan: list[Planned] = []
    deck: list[FaultKind] = []
    for number in range(1, 1 + int(config.seconds / config.every_s)):
        if not deck:
            deck = list(config.faults)
            rng.shuffle(deck)
        at_s = config.every_s * (number - 0.5 * rng.random())
        hold_s = rng.uniform(*HOLD_S)
        plan.append(Planned(at_s=at_s, kind=deck.pop(), pick=rng.random(), pick_rank=rng.random(), hold_s=hold_s))
    return plan


def choose(candidates: Sequence[T], pick: float) -> T | None:
    """`None` when there are none."""
    return candidates[int(pick * len(candidates))] if candidates else None


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """A question that is asked again and again."""

    number: int
    prompt: list[int]
    sampling: SamplingParams


def make_cases(config: ChaosConfig, vocab_size: int, eos_token_ids: Sequence[int], max_context: int) -> list[Case]:
    """Each prompt twice: greedy, and sampled from a seed. All answers have the same number of tokens.

    Without top_p and the like: at their thresholds the least rounding becomes another token.

    Raises `InvalidArgument` when the model's context has no room.
    """
    room = max_context - config.max_tokens
    if room < MIN_CONTEXT:
        limit = f"leaves {room} of {max_context} tokens of context for prompts, at least {MIN_CONTEXT} are needed"
        raise InvalidArgument("max_tokens", config.max_tokens, limit)
    rng = random.Random(f"prompts {config.seed}")
    allowed = [token for token in range(min(vocab_size, 1 << 15)) if token not in set(eos_token_ids)]
    greedy = SamplingParams(max_tokens=config.max_tokens, ignore_eos=True, temperature=0.0)
    cases: list[Case] = []
    for number in range(config.num_prompts):
        prompt = rng.choices(allowed, k=rng.randint(PROMPT_TOKENS[0], min(PROMPT_TOKENS[1], room)))
        drawn = msgspec.structs.replace(greedy, temperature=0.9, seed=rng.randrange(1 << 31))
        cases.append(Case(number=2 * number, prompt=prompt, sampling=greedy))
        cases.append(Case(number=2 * number + 1, prompt=prompt, sampling=drawn))
    return cases
