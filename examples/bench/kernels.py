"""Linear maps: kvferry's kernels beside torch's and oneDNN's, by number of rows.

    python examples/bench/kernels.py [--threads 1 2] [--rows 1 4 16 64 256 1024] [--shapes 576x3072] [--seconds 0.2]

Prints a table for each number of threads and a line of JSON. Microseconds a call: the least of many, all kinds by
turns, so that a shared machine disturbs them alike. Up to 64 rows weights come from memory: calls go round many copies.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from kvferry.kernels.cpu.memory import weight_empty
from kvferry.kernels.linear import make_linear

SHAPES = ["576x960", "576x576", "576x3072", "1536x576", "2048x8192", "576x49152"]
"""in x out: SmolLM2-135M's, a larger model's, SmolLM2's head."""
ROUND_BYTES = 96 << 20
"""More than caches hold."""
Call = Callable[[torch.Tensor], torch.Tensor]


def kinds(weight: torch.Tensor) -> dict[str, Callable[[], Call]]:
    """What makes one packed copy of the weight (bfloat16) each."""
    ops: Any = torch.ops.mkldnn

    def onednn() -> Call:
        packed = ops._reorder_linear_weight(weight, None)
        return lambda x: ops._linear_pointwise(x, packed, None, "none", [], "")

    def torch_float32() -> Call:
        wide = weight.float()
        return lambda x: F.linear(x, wide)

    return {
        "bf16 oneDNN": onednn,
        "bf16": lambda: make_linear(weight),
        "int8": lambda: make_linear(weight, None, "int8"),
        "int4": lambda: make_linear(weight, None, "int4"),
        "float32 torch": torch_float32,
        "float32": lambda: make_linear(weight.float()),
    }


BYTES = {"bf16 oneDNN": 2.0, "bf16": 2.0, "int8": 1.0, "int4": 0.625, "float32 torch": 4.0, "float32": 4.0}
"""Of a weight."""


def measure(shape: str, all_rows: list[int], seconds: float) -> list[dict[str, Any]]:
    inputs, outputs = (int(size) for size in shape.split("x"))
    weight = torch.randn(outputs, inputs).mul_(inputs**-0.5).bfloat16()
    copies = {
        kind: [make() for _ in range(1 + int(ROUND_BYTES / (weight.numel() * BYTES[kind])))]
        for kind, make in kinds(weight).items()
    }
    results = []
    for rows in all_rows:
        xs = {dtype: torch.randn(rows, inputs).to(dtype) for dtype in (torch.bfloat16, torch.float32)}
        least = dict.fromkeys(copies, float("inf"))
        stop = time.perf_counter() + seconds * len(copies)
        rounds = 0
        while rounds < 2 or time.perf_counter() < stop:
            rounds += 1
            for kind, calls in copies.items():
                x = xs[torch.float32 if kind.startswith("float32") else torch.bfloat16]
                calls = calls if rows <= 64 else calls[:1]
                begin = time.perf_counter()
                for call in calls:
                    call(x)
                least[kind] = min(least[kind], (time.perf_counter() - begin) / len(calls))
        results.append({"shape": shape, "rows": rows} | {kind: 1e6 * value for kind, value in least.items()})
    return results


def read_speed() -> float:
    """Bytes a second of a plain sum, of memory as weights lie in."""
    x = weight_empty(ROUND_BYTES).view(torch.float32).fill_(1.0)
    taken = []
    for _ in range(20):
        begin = time.perf_counter()
        x.sum()
        taken.append(time.perf_counter() - begin)
    return ROUND_BYTES / min(taken)


def table(results: list[dict[str, Any]]) -> str:
    """Per cell µs; behind kvferry's, how many times as fast as torch or oneDNN, and GB/s of weights or GFLOP/s."""
    lines = [f"{'in x out':>10} {'rows':>5}" + "".join(f"{kind:>26}" for kind in BYTES)]
    for one in results:
        inputs, outputs = (int(size) for size in one["shape"].split("x"))
        cells = []
        for kind, width in BYTES.items():
            taken = one[kind] * 1e-6
            weights = inputs * outputs
            rate = (
                f"{weights * width / taken * 1e-9:.1f} GB/s"
                if one["rows"] <= 8
                else f"{2 * one['rows'] * weights / taken * 1e-9:.0f} GF/s"
            )
            peer = one["float32 torch" if kind.startswith("float32") else "bf16 oneDNN"]
            ratio = f" {peer / one[kind]:.2f}x" if " " not in kind else ""
            cells.append(f"{one[kind]:.0f} {rate}{ratio}")
        lines.append(f"{one['shape']:>10} {one['rows']:>5}" + "".join(f"{cell:>26}" for cell in cells))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64, 256, 1024])
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--seconds", type=float, default=0.2, help="for each kind, shape and number of rows")
    options = parser.parse_args()
    report = []
    for threads in options.threads:
        torch.set_num_threads(threads)
        speed = read_speed()
        results = [one for shape in options.shapes for one in measure(shape, options.rows, options.seconds)]
        sys.stdout.write(f"\n{threads} threads; memory is read at {speed * 1e-9:.1f} GB/s\n{table(results)}\n")
        sys.stdout.flush()
        report.append({"threads": threads, "read_bytes_per_s": speed, "results": results})
    sys.stdout.write(json.dumps({"linears": report}) + "\n")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
