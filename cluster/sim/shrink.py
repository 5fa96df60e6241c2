"""Reduces a failing scenario to the fewest faults, then the fewest requests, with which it still fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec

from kvferry.cluster.sim.faults import Scenario
from kvferry.cluster.sim.runner import RunReport, simulate

MAX_RUNS = 500
T = TypeVar("T")


def shrink(scenario: Scenario, run: Callable[[Scenario], RunReport] = simulate) -> Scenario:
    """`scenario` must fail. Any failure counts: what remains may fail in another way, which is as good."""
    budget = [MAX_RUNS]

    def fails(candidate: Scenario) -> bool:
        budget[0] -= 1
        return budget[0] >= 0 and bool(run(candidate).failures)

    faults = _fewest(scenario.faults, lambda kept: fails(msgspec.structs.replace(scenario, faults=kept)))
    scenario = msgspec.structs.replace(scenario, faults=faults)
    requests = _fewest(scenario.requests, lambda kept: fails(msgspec.structs.replace(scenario, requests=kept)))
    return msgspec.structs.replace(scenario, requests=requests)


def _fewest(items: list[T], fails: Callable[[list[T]], bool]) -> list[T]:
    """Leaves out ever smaller runs of items for as long as what is left still fails."""
    size = max(1, len(items))
    while True:
        start, smaller = 0, False
        while start < len(items):
            kept = items[:start] + items[start + size :]
            if fails(kept):
                items, smaller = kept, True
            else:
                start += size
        if size == 1 and not smaller:
            return items
        size = max(1, size // 2)


def described(scenario: Scenario) -> list[str]:
    """What is left, one line each."""
    lines = [f"groups: {', '.join(f'{name} ({role})' for name, role, _ in scenario.groups)}"]
    lines.append(f"gateways: {scenario.num_gateways}")
    lines += [f"fault: {fault}" for fault in scenario.faults]
    for plan in scenario.requests:
        lines.append(
            f"request: {plan.name} at {plan.at_s:.3f} s, {len(plan.prompt)} tokens, n={plan.n}, "
            f"max_tokens={plan.max_tokens}"
        )
    return lines
