"""kvferry's side: a `kvferry serve` of its own, and loads sent to it through gRPC.

The client runs in the caller's process; what it costs is reported as `client_cpu_s`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import machine
from loads import NEW_TOKENS, SHARED_TOKENS
from machine import CpuWatch
from streams import Answer, closed_loop, figures

import kvferry
from kvferry.cluster.service import Completed, Delta

START_TIMEOUT_S, STOP_TIMEOUT_S, REQUEST_TIMEOUT_S = 120.0, 30.0, 300.0
BLOCK_TOKENS = 16
APART, TOGETHER = ["--prefill", "1", "--decode", "1"], ["--prefill", "0", "--decode", "0", "--mixed", "1"]
SHARED_HIT = SHARED_TOKENS - BLOCK_TOKENS
"""Cached tokens from which on a request counts as a hit of the shared prefix: a block may be lost to rounding."""


class Server:
    """A running `kvferry serve`. `begin`: when its process was started, as `time.perf_counter` tells."""

    def __init__(self, model: str, options: Sequence[str]) -> None:
        command = [sys.executable, "-m", "kvferry.cluster.cli", "serve", model, "--port", "0", "--log-json", *options]
        self.begin = time.perf_counter()
        self.process = subprocess.Popen(
            command, env={**os.environ, "PYTHONUNBUFFERED": "1"}, stderr=subprocess.PIPE, text=True
        )
        self.target = ""
        self._target: queue.Queue[str] = queue.Queue()
        self._tail: deque[str] = deque(maxlen=20)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        """Its events, to the end: a full pipe would stop it."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._tail.append(line.rstrip())
            with contextlib.suppress(ValueError):
                event = json.loads(line)
                if isinstance(event, dict) and event.get("event") == "serving":
                    self._target.put(event["target"])
        self._target.put("")

    def wait_serving(self) -> None:
        """Raises `RuntimeError` with the server's last words if it does not come up."""
        try:
            self.target = self._target.get(timeout=START_TIMEOUT_S)
        except queue.Empty:
            raise RuntimeError(f"kvferry serve was not ready within {START_TIMEOUT_S:g} s") from None
        if not self.target:
            raise RuntimeError("kvferry serve ended:\n" + "\n".join(self._tail))

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(STOP_TIMEOUT_S)


@contextlib.contextmanager
def serving(model: str, options: Sequence[str]) -> Iterator[Server]:
    server = Server(model, options)
    try:
        server.wait_serving()
        yield server
    finally:
        server.stop()


async def ask(client: kvferry.AsyncClient, prompt: list[int], max_tokens: int = NEW_TOKENS) -> Answer:
    """Greedy, regardless of end-of-sequence tokens."""
    answer = Answer(time.perf_counter())
    events = client.stream(
        token_ids=prompt, max_tokens=max_tokens, temperature=0.0, ignore_eos=True, timeout_s=REQUEST_TIMEOUT_S
    )
    async for event in events:
        if isinstance(event, Delta):
            answer.take(event.token_ids)
        elif isinstance(event, Completed):
            answer.num_cached_tokens = event.usage.num_cached_tokens
            answer.ferried_bytes = event.usage.ferried_bytes
    return answer.complete(max_tokens)


class Side:
    """A server of its own, as `peers.Side` has it. `pinned`: each worker to a core of its own, as far as they go."""

    def __init__(self, model: str, options: Sequence[str], name: str, *, pinned: bool = False) -> None:
        self.name, self._pinned = name, pinned
        self._server = Server(model, options)
        self.begin = self._server.begin
        self._client: kvferry.AsyncClient | None = None

    async def ready(self) -> None:
        await asyncio.to_thread(self._server.wait_serving)
        if self._pinned:
            await asyncio.to_thread(pin, self._server.target)
        self._client = await kvferry.AsyncClient(self._server.target).__aenter__()

    async def ask(self, prompt: list[int], max_tokens: int) -> Answer:
        assert self._client is not None
        return await ask(self._client, prompt, max_tokens)

    def pause(self) -> None:
        """It waits without work; stopped, its own watchdogs would wake."""

    def resume(self) -> None: ...

    def memory(self) -> dict[str, float]:
        """As `machine.memory`, of kvferry's own processes; Ray's are left out."""
        return machine.memory([self._server.process.pid, *workers(self._server.target)])

    async def close(self) -> None:
        if self._client is not None:
            await self._client.__aexit__(None, None, None)
        await asyncio.to_thread(self._server.stop)


def pin(target: str) -> None:
    """Every worker with all its threads, those that it will start as well."""
    for pid, core in zip(workers(target), itertools.cycle(sorted(os.sched_getaffinity(0))), strict=False):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                os.sched_setaffinity(int(thread), {core})


async def run_load(server: Server, prompts: Sequence[list[int]], concurrency: int) -> dict[str, float]:
    """Numbers of one load; seconds, tokens and bytes.

    `server_cpu_s` and `client_cpu_s`: CPU seconds of kvferry's processes and of this one; `other_cores`: how many cores
    everything else on this machine kept busy meanwhile.
    """
    watch = CpuWatch([server.process.pid, *workers(server.target)])
    async with kvferry.AsyncClient(server.target) as client:
        watch.begin()
        begin = time.perf_counter()
        answers = await closed_loop(partial(ask, client), prompts, concurrency, NEW_TOKENS)
        cpu = watch.end()
    found = figures(answers, begin)
    return {
        **found,
        "hit_rate": sum(a.num_cached_tokens for a in answers) / sum(map(len, prompts)),
        "num_shared_hits": float(sum(a.num_cached_tokens >= SHARED_HIT for a in answers)),
        "num_requests": float(len(answers)),
        "num_ferried_requests": float(sum(a.ferried_bytes > 0 for a in answers)),
        "ferried_bytes": float(sum(a.ferried_bytes for a in answers)),
        "server_cpu_s": cpu.watched_s,
        "client_cpu_s": cpu.own_s,
        "other_cores": cpu.other_s / found["seconds"],
    }


async def first_token_s(server: Server, prompt: list[int]) -> float:
    """From the start of the server's process to the first token of a first request."""
    async with kvferry.AsyncClient(server.target) as client:
        answer = await ask(client, prompt, max_tokens=1)
    return answer.arrivals[0][0] - server.begin


async def one_by_one(target: str, prompts: Sequence[list[int]], max_tokens: int) -> list[Answer]:
    async with kvferry.AsyncClient(target) as client:
        return [await ask(client, prompt, max_tokens) for prompt in prompts]


def workers(target: str) -> dict[int, str]:
    """Process ids of all workers, with their groups' names."""
    with kvferry.Client(target) as client:
        return {pid: group.group for group in client.cluster().groups for pid in group.pids}


def peak_memory(server: Server) -> dict[str, Any]:
    """Peak resident MiB of kvferry's processes and, apart, of Ray's."""
    own, ray = machine.peaks(server.process.pid, workers(server.target))
    return {
        "own_mib": {p.name: p.peak_mib for p in own},
        "total_mib": sum(p.peak_mib for p in own),
        "ray_mib": [(p.name, p.peak_mib) for p in ray],
    }


def audit(target: str) -> list[str]:
    with kvferry.Client(target) as client:
        return client.audit().findings
