"""Summaries of measurements."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Middle:
    """The median of some runs with their extremes."""

    median: float
    low: float
    high: float


def middle(values: Sequence[float]) -> Middle:
    return Middle(statistics.median(values), min(values), max(values))


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the nearest ranks. Raises `ValueError` for no values."""
    if not values:
        raise ValueError("a percentile of nothing")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def token_gaps(arrivals: Sequence[tuple[float, int]]) -> list[float]:
    """Seconds before each token but the first, of one stream. `arrivals`: instant and number of tokens of each delta.

    Tokens of one delta arrive together: the first of them had the whole wait, the others none.
    """
    gaps: list[float] = []
    for i, (instant, count) in enumerate(arrivals):
        if i:
            gaps.append(instant - arrivals[i - 1][0])
        gaps.extend([0.0] * (count - 1))
    return gaps
