"""`kvferry sim`: lifetimes of simulated clusters, checked."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import tyro

from kvferry.cluster.cli_shared import shown
from kvferry.runtime.errors import InvalidArgument, KvferryError

if TYPE_CHECKING:
    from kvferry.cluster.sim.runner import RunReport, Summary

MAX_SHOWN = 20


@dataclass(frozen=True, kw_only=True)
class Sim:
    """Run simulated clusters under faults drawn from seeds, and check each: nothing lost, changed or left behind."""

    seed: Annotated[int, shown("INT")] = 0
    """The first seed. The same seed is the same run, everywhere."""
    seeds: Annotated[int | None, shown("COUNT", "1, or as many as --minutes allows")] = None
    """How many, counted on from --seed."""
    minutes: Annotated[float | None, shown("MINUTES", "no limit")] = None
    """When to stop."""
    shrink: tyro.conf.FlagCreatePairsOff[bool] = False
    """Reduce the first failing seed to the fewest faults and requests."""
    trace: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print the events of the first failing seed, or of the only one."""

    def run(self) -> None:
        """Raises `KvferryError` when a seed fails."""
        from kvferry.cluster.sim.runner import simulate_many

        if self.seeds is not None and self.seeds < 1:
            raise InvalidArgument("seeds", self.seeds, "must be at least 1")
        if self.minutes is not None and self.minutes <= 0:
            raise InvalidArgument("minutes", self.minutes, "must be above 0")
        until = None if self.minutes is None else time.monotonic() + self.minutes * 60
        summary = simulate_many(self._seeds(), until, _show_failure)
        _show(summary)
        failed = [report.seed for report in summary.failed]
        if self.trace and (failed or summary.num_seeds == 1):
            _show_trace(failed[0] if failed else self.seed)
        if failed:
            if self.shrink:
                _show_shrunk(failed[0])
            raise KvferryError(f"{len(failed)} of {summary.num_seeds} seeds failed; kvferry sim --seed {failed[0]}")

    def _seeds(self) -> Iterable[int]:
        if self.seeds is None and self.minutes is not None:
            return itertools.count(self.seed)
        return range(self.seed, self.seed + (self.seeds or 1))


def _show_failure(report: RunReport) -> None:
    for failure in report.failures[:MAX_SHOWN]:
        _print(f"seed {report.seed}: {failure}")


def _show(summary: Summary) -> None:
    seconds = max(summary.seconds, 1e-9)
    _print(
        f"{summary.num_seeds} seeds, {summary.num_events} events, {summary.seconds:.1f} s "
        f"({summary.num_seeds / seconds:.0f} seeds/s), {len(summary.failed)} failed"
    )
    _print("observed:")
    for kind, count in sorted(summary.observed.items()):
        _print(f"  {kind:28} {count:10}")


def _show_trace(seed: int) -> None:
    from kvferry.cluster.sim.runner import simulate

    report = simulate(seed, keep_lines=True)
    for line in report.lines:
        _print(line)
    _print(f"digest {report.digest}")


def _show_shrunk(seed: int) -> None:
    from kvferry.cluster.sim.faults import draw
    from kvferry.cluster.sim.runner import simulate
    from kvferry.cluster.sim.shrink import described, shrink

    smallest = shrink(draw(seed))
    _print(f"seed {seed}, shrunk:")
    for line in described(smallest):
        _print(f"  {line}")
    for failure in simulate(smallest).failures[:MAX_SHOWN]:
        _print(f"  fails with: {failure}")


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
