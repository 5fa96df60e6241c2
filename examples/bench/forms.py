"""What latent attention costs in both forms, and a mixture of experts beside an MLP of the same active size.

    python examples/bench/forms.py [--dtype bfloat16] [--heads 16] [--threads 1]

Prints two tables and a line of JSON. Sizes are those of DeepSeek-V2-Lite (16 heads; one rank's of V3 at TP 8).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from kvferry.kernels.attention import Scoring
from kvferry.kernels.linear import PackedLinear
from kvferry.kernels.mla import LatentHeads
from kvferry.kernels.moe import GroupedLinear
from kvferry.runtime.model.layers import MLP
from kvferry.runtime.model.moe import MoE, make_routing
from kvferry.runtime.model.spec import MoESpec

KEY, ROTATED, VALUE, RANK = 128, 64, 128, 512
HIDDEN, INNER = 2048, 1408
SPANS = [(0, 64), (0, 512), (512, 1), (512, 64), (512, 256), (4096, 1), (4096, 4), (4096, 64), (4096, 256)]
"""First position and number of queries."""


def seconds(work: Callable[[], object], repeats: int = 3) -> float:
    """The least of several; the machine may be shared."""
    work()
    taken = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        taken.append(time.perf_counter() - begin)
    return min(taken)


def latent_attention(dtype: torch.dtype, num_heads: int) -> list[dict[str, float | int | bool]]:
    up = torch.randn((num_heads, KEY + VALUE, RANK)).mul_(RANK**-0.5).to(dtype)
    one = LatentHeads(up, KEY, Scoring((KEY + ROTATED) ** -0.5))
    rows = []
    for start, count in SPANS:
        q = torch.randn((count, num_heads, KEY + ROTATED)).to(dtype)
        latents = torch.randn((start + count, RANK + ROTATED)).to(dtype)
        a, e = one.absorbed(q, latents, start), one.expanded(q, latents, start)
        absorbed, expanded = (seconds(partial(form, q, latents, start)) for form in (one.absorbed, one.expanded))
        rows.append(
            {
                "start": start,
                "queries": count,
                "absorbed_ms": absorbed * 1e3,
                "expanded_ms": expanded * 1e3,
                "absorbs": one.absorbs(start, count),
                "largest_difference": float((a - e).abs().max()),
            }
        )
    return rows


def each(layers: Sequence[Callable[[torch.Tensor], torch.Tensor]], batches: Sequence[torch.Tensor]) -> None:
    for layer, x in zip(layers, batches, strict=True):
        layer(x)


def mixture(dtype: torch.dtype, num_experts: int, num_active: int) -> list[dict[str, float | int]]:
    spec = MoESpec(num_experts=num_experts, num_active=num_active, inner_size=INNER)

    def linear(rows: int, columns: int) -> PackedLinear:
        return PackedLinear(torch.randn((rows, columns)).mul_(columns**-0.5).to(dtype))

    moe = MoE(
        router=torch.randn((num_experts, HIDDEN)),
        correction=None,
        routing=make_routing(spec),
        gate_up=GroupedLinear([linear(2 * INNER, HIDDEN) for _ in range(num_experts)]),
        down=GroupedLinear([linear(HIDDEN, INNER) for _ in range(num_experts)]),
        activation="silu",
        shared=None,
    )
    # Several, in turn: else it would lie in a cache, where the experts of changing tokens do not.
    dense = [
        MLP(linear(2 * INNER * num_active, HIDDEN), linear(HIDDEN, INNER * num_active), "silu", True) for _ in range(4)
    ]
    rows = []
    for num_tokens in (1, 4, 16, 64, 256, 1024):
        batches = [torch.randn((num_tokens, HIDDEN)).to(dtype) for _ in range(4)]
        experts, plain = (seconds(partial(each, layers, batches)) / 4 for layers in ([moe] * 4, dense))
        used = len(set(moe.routing.choose(batches[0].float() @ moe.router.T, None)[0].flatten().tolist()))
        rows.append({"tokens": num_tokens, "experts_used": used, "moe_ms": experts * 1e3, "mlp_ms": plain * 1e3})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    dtype = getattr(torch, options.dtype)
    write = sys.stdout.write
    with torch.inference_mode():
        attention = latent_attention(dtype, options.heads)
        write(f"{'start':>6} {'queries':>7} {'absorbed ms':>12} {'expanded ms':>12}  chosen\n")
        for one in attention:
            chosen = "absorbed" if one["absorbs"] else "expanded"
            write(f"{one['start']:>6} {one['queries']:>7} {one['absorbed_ms']:>12.2f} {one['expanded_ms']:>12.2f}")
            write(f"  {chosen}\n")
        experts = mixture(dtype, num_experts=32, num_active=6)
        write(f"\n{'tokens':>6} {'experts used':>12} {'moe ms':>9} {'mlp ms':>9} {'ratio':>6}\n")
        for row in experts:
            ratio = row["moe_ms"] / row["mlp_ms"]
            write(f"{row['tokens']:>6} {row['experts_used']:>12} {row['moe_ms']:>9.2f} {row['mlp_ms']:>9.2f}")
            write(f" {ratio:>6.2f}\n")
    tolerance = 0.05 if dtype == torch.bfloat16 else 1e-3
    agree = all(one["largest_difference"] < tolerance for one in attention)
    found = {"options": vars(options), "torch": torch.__version__, "agree": agree, "mla": attention, "moe": experts}
    write(json.dumps(found) + "\n")
    return 0 if agree else 1


if __name__ == "__main__":
    raise SystemExit(main())
