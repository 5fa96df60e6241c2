"""Plots of the benchmark beside other servers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from stats import token_gaps

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from peers import Measured

_CLIENTS, _ARRIVING = "8 clients, shared", "long prompts arriving"


def plot_peers(samples: Mapping[str, Mapping[str, Measured]], target: Path) -> None:
    """How TTFT and ITL are distributed under load, and one stream's tokens while long prompts arrive."""
    figure, (ttft, itl, timeline) = pyplot.subplots(1, 3, figsize=(14, 4))
    for side, measured in samples[_CLIENTS].items():
        answers = measured.answers
        _distribution(ttft, side, [answer.ttft_s for answer in answers])
        _distribution(itl, side, [gap for answer in answers for gap in token_gaps(answer.arrivals)])
    for side, measured in samples[_ARRIVING].items():
        points = [(instant - measured.began, count) for instant, count in measured.answers[0].arrivals]
        gaps = token_gaps(points)
        timeline.plot(
            [instant for instant, _ in points[1:]], [1000 * gap for gap in gaps[: len(points) - 1]], label=side
        )
    ttft.set(xlabel="TTFT, ms", ylabel=f"share of requests ({_CLIENTS})", xscale="log")
    itl.set(xlabel="ITL, ms", ylabel=f"share of tokens ({_CLIENTS})", xscale="log")
    timeline.set(xlabel=f"seconds ({_ARRIVING})", ylabel="ms since the token before", yscale="log")
    for axis in (ttft, itl, timeline):
        axis.legend()
    figure.tight_layout()
    target.parent.mkdir(exist_ok=True)
    figure.savefig(target, dpi=80)


def _distribution(axis: Axes, label: str, seconds: list[float]) -> None:
    ordered = sorted(1000 * max(value, 1e-5) for value in seconds)
    axis.step(ordered, [(i + 1) / len(ordered) for i in range(len(ordered))], where="post", label=label)
