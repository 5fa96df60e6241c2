"""What an engine costs beside its kernels: microseconds per step of planning, batches, sampling, commit and output.

    python examples/bench/overhead.py [--sequences 1 16 64 256] [--steps 200] [--json]

Two runners without arithmetic: `toy` looks at a row's last token and draws at once; `null` is the production's runner
(batches, contexts of the C++ kernels, sampler) over a model of SmolLM2's shape that computes nothing and has a small
vocabulary, so that what is left of its sampler is the host's part. Messages between ranks, and the frame to the
gateway, are encoded as in production. Decode is steady; "prefill arrives" has a prompt's chunk in every step as well.

Prints the least and the median of each part over all steps, and the step's CPU time (the machine may be shared); then
one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from kvferry.cluster import messages as m
from kvferry.cluster.collector import settle_collector
from kvferry.cluster.engine_driver import EngineDriver
from kvferry.kernels.sampling import Largest, argmax
from kvferry.runtime.config import CacheConfig, EngineConfig, SchedulerConfig
from kvferry.runtime.engine import Engine
from kvferry.runtime.ids import Epoch, GroupId, Peer, RequestId, SequenceKey
from kvferry.runtime.kv.groups import KVGroups, one_group
from kvferry.runtime.kv.layout import KVLayout
from kvferry.runtime.kv.storage import RankStorage
from kvferry.runtime.model import runner as runner_module
from kvferry.runtime.model.batch import Batch, Batches
from kvferry.runtime.model.parallel import SingleRank
from kvferry.runtime.model.runner import Runner
from kvferry.runtime.model.sampler import sample
from kvferry.runtime.request import SamplingParams, SequenceRequest
from kvferry.runtime.step import SampledToken, SampleInput, StepPlan, StepResult
from kvferry.runtime.transfer.ticket import GroupAddress

PROMPT_TOKENS, BLOCK_SIZE, CHUNK_TOKENS = 300, 16, 64
VOCAB = 64
LAYOUT = KVLayout(num_layers=30, num_kv_heads=3, head_dim=64, block_size=BLOCK_SIZE, dtype="bfloat16")
NUM_HEADS = 9
PARTS = ("plan", "batch", "contexts", "sample", "commit", "output", "frame")


class Watch:
    """Microseconds of each part, step by step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._step: dict[str, float] = {}

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **rest: Any) -> Any:
            begin = time.perf_counter_ns()
            result = function(*args, **rest)
            self._step[part] += (time.perf_counter_ns() - begin) / 1e3
            return result

        return call

    def step(self, work: Callable[[], None]) -> None:
        """Measures one step, whose parts add themselves; what is in none of them is `output`."""
        self._step = step = dict.fromkeys(PARTS, 0.0)
        cpu, begin = time.thread_time_ns(), time.perf_counter_ns()
        work()
        whole = (time.perf_counter_ns() - begin) / 1e3
        step["output"] = whole - sum(step.values())
        step["step"], step["cpu"] = whole, (time.thread_time_ns() - cpu) / 1e3
        self.steps.append(step)


class ToyRunner:
    """Draws a function of each row's last token."""

    def __init__(self, watch: Watch) -> None:
        self.execute = watch.timed("sample", self._execute)

    def _execute(self, plan: StepPlan, _samples: Sequence[SampleInput]) -> StepResult:
        return StepResult([SampledToken((row.token_ids[-1] * 7 + 1) % VOCAB) for row in plan.rows if row.num_samples])


class NullModel:
    """A decoder that computes nothing: the largest logit of a row is anywhere."""

    def __init__(self, watch: Watch) -> None:
        self._prepare = watch.timed("contexts", lambda contexts: contexts._prepare(NUM_HEADS, 1 << 62))
        self._logits = torch.randn((1024, VOCAB)).bfloat16()
        self._largest = argmax(self._logits)

    def forward(self, batches: Sequence[Batch], storage: RankStorage) -> tuple[torch.Tensor, Largest]:
        del storage
        if batches[0].contexts is not None:
            self._prepare(batches[0].contexts)
        rows = slice(len(batches[0].sample_index))
        values, ids = self._largest
        return self._logits[rows], (values[rows], ids[rows])


class Bench:
    """`num_sequences` decode; with `arriving`, prompts keep coming beside them, a chunk in every step."""

    def __init__(self, runner: str, num_sequences: int, arriving: bool, temperature: float) -> None:
        self.watch = watch = Watch()
        self._arriving, self._temperature = arriving, temperature
        self._num_requests = 0
        self._random = random.Random(7)
        num_blocks = (num_sequences + 8) * 60
        kv = one_group(LAYOUT, num_blocks)
        config = EngineConfig(
            cache=CacheConfig(block_size=BLOCK_SIZE, num_blocks=num_blocks),
            scheduler=SchedulerConfig(
                max_batch_tokens=num_sequences + CHUNK_TOKENS, max_sequences=num_sequences + 4, max_waiting=4096
            ),
        )
        address = GroupAddress(Peer(GroupId("bench"), Epoch(1)), 1, kv.fingerprint, [])
        make = ToyRunner if runner == "toy" else partial(_null_runner, kv)
        self._engine = Engine(config, kv, b"bench-root-of-16", address, 1 << 20, make(watch).execute)
        self._driver = EngineDriver(self._engine, lambda *_: None, lambda _: None, time.time_ns)
        self._encode = watch.timed("frame", m.encode)
        for _ in range(num_sequences):
            self._submit(1 << 20)
        while self._engine.load().waiting_tokens:
            watch.step(self._step)
        scheduler = self._engine.scheduler
        scheduler.plan = watch.timed("plan", scheduler.plan)  # type: ignore[method-assign]
        scheduler.commit = watch.timed("commit", scheduler.commit)  # type: ignore[method-assign]
        watch.steps.clear()

    def _submit(self, max_tokens: int) -> None:
        self._num_requests += 1
        length = PROMPT_TOKENS + self._random.randrange(BLOCK_SIZE)
        request = SequenceRequest(
            key=SequenceKey(RequestId(f"gateway/req-{self._num_requests:08}"), 0, self._num_requests),
            prompt_token_ids=[self._random.randrange(VOCAB) for _ in range(length)],
            sampling=SamplingParams(max_tokens=max_tokens, seed=1, temperature=self._temperature),
            eos_token_ids=[VOCAB],
            deadline_ns=time.time_ns() + 10**15,
        )
        self._driver.handle("gateway", m.Submit([request]))

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            if self._arriving and self._engine.load().waiting_tokens < CHUNK_TOKENS:
                self._submit(1)
            self.watch.step(self._step)

    def _step(self) -> None:
        output = self._driver.step(time.time_ns())
        tokens = output.tokens.get("gateway", [])
        self._encode(m.StepFrame(Epoch(1), 1, tokens, output.transfers, output.kv, output.load))


def _null_runner(kv: KVGroups, watch: Watch) -> Runner:
    Batches.make = watch.timed("batch", Batches.make)  # type: ignore[method-assign]
    runner_module.sample = watch.timed("sample", sample)  # type: ignore[attr-defined]
    return Runner(NullModel(watch), RankStorage(kv, "cpu"), SingleRank())


def measure(runner: str, num_sequences: int, arriving: bool, num_steps: int, temperature: float) -> dict[str, Any]:
    bench = Bench(runner, num_sequences, arriving, temperature)
    bench.run(num_steps)
    row: dict[str, Any] = {"runner": runner, "sequences": num_sequences, "arriving": arriving}
    for part in (*PARTS, "step", "cpu"):
        values = [step[part] for step in bench.watch.steps]
        row[part] = {"least": round(min(values), 1), "median": round(median(values), 1)}
    return row


def print_tables(rows: Sequence[dict[str, Any]]) -> None:
    for title, arriving in (("Steady decode", False), ("Prefill arrives", True)):
        table = Table(title=f"{title}: microseconds per step, least / median")
        for column in ("runner", "sequences", *PARTS, "step", "CPU"):
            table.add_column(column, justify="right")
        for row in rows:
            if row["arriving"] is arriving:
                cells = [f"{row[part]['least']:.0f} / {row[part]['median']:.0f}" for part in (*PARTS, "step", "cpu")]
                table.add_row(row["runner"], str(row["sequences"]), *cells)
        Console(width=160).print(table)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args(argv)
    settle_collector()  # as in a worker
    rows = [
        measure(runner, count, arriving, args.steps, args.temperature)
        for runner in ("toy", "null")
        for arriving in (False, True)
        for count in args.sequences
    ]
    print_tables(rows)
    print(json.dumps({"bench": "overhead", "temperature": args.temperature, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
