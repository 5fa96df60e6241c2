"""Runs scenarios, one after another, and sums up what they showed."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import msgspec
import structlog

from kvferry.cluster.sim.faults import Scenario, draw
from kvferry.cluster.sim.loop import run
from kvferry.cluster.sim.trace import Trace
from kvferry.cluster.sim.world import World


class RunReport(msgspec.Struct, frozen=True, kw_only=True):
    """One run."""

    seed: int
    digest: str
    """Equal for equal runs, in any process."""
    num_events: int
    observed: Counter[str]
    failures: list[str]
    lines: list[str]
    """The last events as text, if they were asked for."""


class Summary(msgspec.Struct, kw_only=True):
    """Many runs."""

    num_seeds: int = 0
    num_events: int = 0
    seconds: float = 0.0
    observed: Counter[str] = msgspec.field(default_factory=Counter)
    failed: list[RunReport] = []


def simulate(scenario: Scenario | int, keep_lines: bool = False) -> RunReport:
    """Runs a scenario, or the one of a seed. Whatever goes wrong is in the report."""
    if isinstance(scenario, int):
        scenario = draw(scenario)
    with _quiet():
        return run(_life(scenario, keep_lines))


async def _life(scenario: Scenario, keep_lines: bool) -> RunReport:
    trace = Trace(keep_lines)
    try:
        await World(scenario, trace).run()
    except Exception as error:  # noqa: BLE001  reported like any other failure
        trace.failed(f"the run broke off: {_first(error)!r}")
    return RunReport(
        seed=scenario.seed,
        digest=trace.digest,
        num_events=trace.num_events,
        observed=trace.observed,
        failures=trace.failures,
        lines=list(trace.lines or ()),
    )


def simulate_many(
    seeds: Iterable[int], until: float | None = None, on_run: Callable[[RunReport], None] = lambda _: None
) -> Summary:
    """`until`: an instant of `time.monotonic` after which no run begins."""
    summary, begin = Summary(), time.monotonic()
    for seed in seeds:
        if until is not None and time.monotonic() >= until:
            break
        report = simulate(seed)
        summary.num_seeds += 1
        summary.num_events += report.num_events
        summary.observed.update(report.observed)
        if report.failures:
            summary.failed.append(report)
        on_run(report)
    summary.seconds = time.monotonic() - begin
    return summary


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What a disturbed cluster logs is of no use here."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    try:
        yield
    finally:
        structlog.configure(**before)


def _first(error: BaseException) -> BaseException:
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error
