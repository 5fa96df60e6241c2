"""What is drawn from a seed: a deployment, its load, and the faults that befall it. All of it before the run begins.

So a run can be repeated with some of its faults or requests left out, which is how failures are shrunk.
"""

from __future__ import annotations

import random
from typing import Literal

import msgspec

from kvferry.cluster.config import Role
from kvferry.cluster.sim.group import GroupShape
from kvferry.cluster.sim.model import BLOCK_SIZE, VOCAB

Kind = Literal[
    "group death",
    "rank death",
    "gateway death",
    "stream cut",
    "link cut",
    "stop",
    "slow worker",
    "slow gateway",
    "drain",
    "scale up",
    "scale down",
    "role change",
    "rolling restart",
    "clock skew",
    "slow network",
    "slow links",
    "lossy links",
    "repeating links",
    "overtaking links",
    "repeated frames",
    "overtaken frames",
    "lost frames",
]
EVENTS: dict[Kind, int] = {
    "group death": 6,
    "rank death": 2,
    "gateway death": 6,
    "stream cut": 3,
    "link cut": 4,
    "stop": 5,
    "slow worker": 3,
    "slow gateway": 2,
    "drain": 3,
    "scale up": 2,
    "scale down": 2,
    "role change": 3,
    "rolling restart": 1,
}
"""Faults of a moment, with their weights."""
CONDITIONS: list[Kind] = [
    "clock skew",
    "slow network",
    "slow links",
    "lossy links",
    "repeating links",
    "overtaking links",
    "repeated frames",
    "overtaken frames",
    "lost frames",
]
"""Faults of a whole run."""


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    kind: Kind
    at_s: float | None = None
    """After the load began. One of this and `at_event` is set, or none: the whole run."""
    at_event: int | None = None
    which: int = 0
    """Picks among what there is at that moment."""
    amount: float = 0.0
    """Seconds, a rate or a factor."""

    def __str__(self) -> str:
        when = f" at {self.at_s:.3f} s" if self.at_s is not None else f" at event {self.at_event}"
        always = self.at_s is None and self.at_event is None
        return f"{self.kind}{'' if always else when} (which={self.which}, amount={self.amount:.3g})"


class Behaviour(msgspec.Struct, frozen=True, kw_only=True):
    """What a client does besides reading."""

    close_after: int | None = None
    """Leaves after so many events."""
    close_at_s: float | None = None
    stop_after: int | None = None
    """Has enough of sequence 0 after so many of its tokens."""
    pause_s: float = 0.0
    """Between two reads."""


class PlannedTurn(msgspec.Struct, frozen=True, kw_only=True):
    """What a client says next in a conversation, once it has the whole answer."""

    message: list[int]
    think_s: float
    max_tokens: int


class PlannedRequest(msgspec.Struct, frozen=True, kw_only=True):
    at_s: float
    name: str
    gateway: int
    prompt: list[int]
    n: int
    max_tokens: int
    min_tokens: int
    seed: int
    eos: list[int]
    priority: int
    salt: str
    logprobs: bool
    deadline_s: float | None
    behaviour: Behaviour
    turns: list[PlannedTurn] = []


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about one run."""

    seed: int
    num_gateways: int
    groups: list[tuple[str, Role, GroupShape]]
    disaggregate: Literal["auto", "always", "never"]
    fetch_prefix: Literal["auto", "always", "never"]
    retry_budget: int
    max_in_flight: int
    max_unread_bytes: int
    crowded: bool
    """There is no room for a group beside those that run."""
    transfer_timeout_s: float
    expect_timeout_s: float
    unavailable_timeout_s: float
    requests: list[PlannedRequest]
    faults: list[Fault]

    @property
    def windows(self) -> list[int | None]:
        """Of each block group; all groups of workers are alike in this."""
        return [group.window for group in self.groups[0][2].kv().groups]

    def amount(self, kind: Kind) -> float:
        return max((fault.amount for fault in self.faults if fault.kind == kind), default=0.0)


LAYOUTS: list[list[tuple[str, Role]]] = [
    [("p0", "prefill"), ("d0", "decode")],
    [("p0", "prefill"), ("d0", "decode"), ("d1", "decode")],
    [("p0", "prefill"), ("p1", "prefill"), ("d0", "decode")],
    [("m0", "mixed"), ("m1", "mixed")],
    [("p0", "prefill"), ("d0", "decode"), ("m0", "mixed")],
]


def draw(seed: int) -> Scenario:
    rng = random.Random(f"scenario {seed}")
    faulty = rng.random() < 0.8
    layout = rng.choice(LAYOUTS)
    guesses = random.Random(f"speculation {seed}")
    shapes = [_shape(rng, guesses) for _ in layout]
    capacity = BLOCK_SIZE * min(shape.num_blocks for shape in shapes)
    shapes = _with_windows(random.Random(f"windows {seed}"), shapes)
    span_s = rng.choice([0.05, 0.3, 1.0])
    shared = [rng.randrange(VOCAB) for _ in range(24)]
    num_gateways = rng.choice([1, 2, 2, 3])
    requests = [
        _request(rng, number, num_gateways, shared, capacity, span_s) for number in range(rng.choice([1, 3, 6, 10, 14]))
    ]
    habits = random.Random(f"conversations {seed}")  # apart: what else a seed draws stays what it was
    requests = [_conversation(habits, request, capacity) for request in requests]
    return Scenario(
        seed=seed,
        num_gateways=num_gateways,
        groups=[(name, role, shape) for (name, role), shape in zip(layout, shapes, strict=True)],
        disaggregate=rng.choice(["auto", "always", "always"]),
        fetch_prefix=habits.choice(["auto", "always", "always", "never"]),
        retry_budget=rng.choice([3, 50, 50, 50]),
        max_in_flight=rng.choice([4, 64, 64, 64]),
        # What one step brings is not the client's slowness.
        max_unread_bytes=rng.choice([2000, 1 << 20, 1 << 20]) * (1 + max(shape.speculation for shape in shapes)),
        crowded=rng.random() < 0.2,
        transfer_timeout_s=rng.choice([0.2, 0.6, 1.5]) if faulty else 0.2,  # so that renewals are needed
        expect_timeout_s=rng.choice([0.02, 0.3]),
        unavailable_timeout_s=rng.choice([1.0, 20.0, 20.0]),
        requests=requests,
        faults=_faults(rng, span_s) if faulty else [],
    )


def _shape(rng: random.Random, guesses: random.Random) -> GroupShape:
    return GroupShape(
        tp_size=rng.choice([1, 1, 2]),
        num_blocks=rng.choice([14, 16, 30, 100]),
        max_batch_tokens=rng.choice([3, 8, 64]),
        max_sequences=rng.choice([2, 8, 64]),
        max_waiting=rng.choice([2, 64, 64, 64]),
        step_s=rng.choice([0.001, 0.004, 0.012]),
        token_s=rng.choice([0.0001, 0.0005]),
        speculation=guesses.choice([0, 0, 0, 1, 2, 6]),
    )


def _with_windows(rng: random.Random, shapes: list[GroupShape]) -> list[GroupShape]:
    """In all layers, in some, or (mostly) in none. Pools get too small for what their sequences were without it."""
    kind = rng.choice(["none", "none", "all", "some"])
    if kind == "none":
        return shapes
    window = rng.choice([2, 5, 9, 14])
    sizes = [rng.choice([8, 10, 16, 60]) for _ in shapes]
    if kind == "all":
        return [msgspec.structs.replace(s, window=window, num_blocks=n) for s, n in zip(shapes, sizes, strict=True)]
    return [msgspec.structs.replace(s, window=window, num_window_blocks=n) for s, n in zip(shapes, sizes, strict=True)]


def _request(
    rng: random.Random, number: int, num_gateways: int, shared: list[int], capacity: int, span_s: float
) -> PlannedRequest:
    own = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 8))]
    prompt = shared[: rng.choice([0, 8, 16, 24])] + own
    max_tokens = min(rng.choice([1, 4, 10, 20, 20, 70]), capacity - len(prompt))
    gateway = rng.randrange(num_gateways)
    again = rng.random() < 0.15
    return PlannedRequest(
        at_s=rng.random() * span_s,
        name=f"again{rng.randrange(3)}" if again else f"r{number}",
        gateway=gateway,
        prompt=prompt,
        n=rng.choice([1, 1, 1, 2, 3]),
        max_tokens=max_tokens,
        min_tokens=min(rng.choice([0, 0, 3]), max_tokens),
        seed=rng.randrange(4),
        eos=rng.choice([[], list(range(0, VOCAB, 12))]),
        priority=rng.randrange(2),
        salt=rng.choice(["", "", "", "tenant"]),
        logprobs=rng.random() < 0.3,
        deadline_s=rng.choice([0.01, 0.1, 0.5]) if rng.random() < 0.12 else None,
        behaviour=_behaviour(rng),
    )


def _conversation(rng: random.Random, first: PlannedRequest, capacity: int) -> PlannedRequest:
    """The request with what its client says later, as far as a group can hold it."""
    turns, length = [], len(first.prompt) + first.max_tokens
    for _ in range(rng.choice([0, 0, 1, 2, 5])):
        message = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 8))]
        max_tokens = rng.choice([1, 6, 12])
        length += len(message) + max_tokens
        if length > capacity:
            break
        turns.append(PlannedTurn(message=message, think_s=rng.choice([0.001, 0.05, 0.3]), max_tokens=max_tokens))
    return msgspec.structs.replace(first, turns=turns)


def _behaviour(rng: random.Random) -> Behaviour:
    luck = rng.random()
    if luck < 0.08:
        return Behaviour(close_after=rng.randrange(6))
    if luck < 0.16:
        return Behaviour(close_at_s=rng.random() * rng.choice([0.02, 0.3]))
    if luck < 0.22:
        return Behaviour(stop_after=rng.randrange(1, 5))
    if luck < 0.30:
        return Behaviour(pause_s=rng.choice([0.01, 0.2]))
    return Behaviour()


def _faults(rng: random.Random, span_s: float) -> list[Fault]:
    faults = [_condition(rng, kind) for kind in CONDITIONS if rng.random() < 0.2]
    kinds = rng.choices(list(EVENTS), list(EVENTS.values()), k=rng.choice([0, 1, 2, 3, 5]))
    for kind in kinds:
        at_event = rng.randrange(10, 600) if rng.random() < 0.5 else None
        faults.append(
            Fault(
                kind=kind,
                at_s=rng.random() * 1.5 * span_s if at_event is None else None,
                at_event=at_event,
                which=rng.randrange(1 << 16),
                amount=_amount(rng, kind),
            )
        )
    return faults


def _amount(rng: random.Random, kind: Kind) -> float:
    if kind == "slow worker":
        return rng.choice([3.0, 30.0])
    if kind == "stop":
        return rng.choice([0.05, 0.6, 1.6, 3.0, 6.0])
    return rng.choice([0.02, 0.2, 1.0])


def _condition(rng: random.Random, kind: Kind) -> Fault:
    if kind == "clock skew":
        amount = rng.choice([0.002, 0.05, 1.0, 100.0])
    elif kind == "slow network":
        amount = rng.choice([0.01, 0.05])
    elif kind == "slow links":
        amount = rng.choice([0.05, 0.3])
    else:
        amount = rng.choice([0.02, 0.1, 0.3])
    return Fault(kind=kind, which=rng.randrange(1 << 16), amount=amount)
