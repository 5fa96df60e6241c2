"""Peers that answer over HTTP: vLLM's and llama.cpp's servers, each through its own door and with its own processes.

    bench ── POST prompt's token ids ─▶ server ── server-sent events: token ids as they come ─▶ bench

While another side is measured, a peer's processes are stopped (SIGSTOP): some spin while they wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import machine
import psutil
from streams import Answer

START_TIMEOUT_S, STOP_TIMEOUT_S, REQUEST_TIMEOUT_S, POLL_S = 600.0, 20.0, 600.0, 0.1
CONTEXT, SLOTS = 2048, 16
"""Of a sequence, and how many sequences llama.cpp serves at once."""


@dataclass(frozen=True)
class Dialect:
    """How a server is asked for tokens, and how it says them."""

    path: str
    fields: dict[str, Any]
    count_field: str

    def body(self, prompt: list[int], max_tokens: int) -> dict[str, Any]:
        asked = {"prompt": prompt, self.count_field: max_tokens}
        return {**asked, "temperature": 0.0, "ignore_eos": True, "stream": True, **self.fields}

    def tokens(self, event: dict[str, Any]) -> list[int]:
        found = event["choices"][0] if event.get("choices") else event
        ids: list[int] = found.get("token_ids") or found.get("tokens") or []
        return ids


VLLM = Dialect("/v1/completions", {"return_token_ids": True, "model": "m"}, "max_tokens")
LLAMA = Dialect("/completion", {"return_tokens": True, "cache_prompt": True}, "n_predict")


@dataclass(frozen=True)
class Command:
    name: str
    dialect: Dialect
    arguments: list[str]
    """The port is appended."""
    environment: dict[str, str] = field(default_factory=dict)


def vllm(executable: Path, model: Path, threads: Sequence[int]) -> Command:
    """bfloat16; `model`: a folder in Hugging Face's format."""
    arguments = [str(executable), "serve", str(model), "--served-model-name", "m", "--dtype", "bfloat16"]
    arguments += ["--max-model-len", str(CONTEXT), "--enable-prefix-caching", "--port"]
    bound = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, threads))}
    return Command("vLLM", VLLM, arguments, {**bound, "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"})


def llama(executable: Path, model: Path, threads: Sequence[int]) -> Command:
    arguments = [str(executable), "-m", str(model), "-t", str(len(threads)), "--no-webui"]
    arguments += ["-np", str(SLOTS), "-c", str(CONTEXT * SLOTS), "--port"]
    return Command(f"llama.cpp {model.stem.rpartition('-')[2]}", LLAMA, arguments)


def free_port() -> int:
    """For servers that do not choose one themselves."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class HttpSide:
    """A running server. `begin`: when its process was started, as `time.perf_counter` tells."""

    def __init__(self, command: Command) -> None:
        port = free_port()
        self.name, self._dialect = command.name, command.dialect
        self._base = f"http://127.0.0.1:{port}"
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the side
        self.begin = time.perf_counter()
        self._process = subprocess.Popen(
            [*command.arguments, str(port)],
            env={**os.environ, **command.environment},
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._session: aiohttp.ClientSession | None = None

    async def ready(self) -> None:
        """Raises `RuntimeError` with the server's last words if it does not come up."""
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S),
            connector=aiohttp.TCPConnector(limit=0, force_close=True),  # llama.cpp ends kept ones when it likes
        )
        while time.perf_counter() - self.begin < START_TIMEOUT_S and self._process.poll() is None:
            with contextlib.suppress(aiohttp.ClientError):
                async with self._session.get(f"{self._base}/health") as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(POLL_S)
        self._log.seek(0)
        raise RuntimeError(f"{self.name} did not come up:\n" + self._log.read().decode(errors="replace")[-3000:])

    async def post(self, prompt: list[int], max_tokens: int, fields: dict[str, Any]) -> Any:
        """The whole answer, of a request that does not stream."""
        assert self._session is not None
        body = self._dialect.body(prompt, max_tokens) | fields
        async with self._session.post(self._base + self._dialect.path, json=body) as response:
            response.raise_for_status()
            return await response.json()

    async def ask(self, prompt: list[int], max_tokens: int, fields: dict[str, Any] | None = None) -> Answer:
        assert self._session is not None
        answer, dialect = Answer(time.perf_counter()), self._dialect
        body = dialect.body(prompt, max_tokens) | (fields or {})
        async with self._session.post(self._base + dialect.path, json=body) as response:
            response.raise_for_status()
            async for line in response.content:
                if line.startswith(b"data: {"):
                    answer.take(dialect.tokens(json.loads(line[6:])))
        return answer.complete(max_tokens)

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def memory(self) -> dict[str, float]:
        return machine.memory(process.pid for process in self._processes())

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
        self.resume()
        processes = self._processes()
        self._signal(signal.SIGTERM)
        _, left = psutil.wait_procs(processes, timeout=STOP_TIMEOUT_S)
        for process in left:
            process.kill()
        self._process.wait(STOP_TIMEOUT_S)
        self._log.close()

    def _processes(self) -> list[psutil.Process]:
        own = psutil.Process(self._process.pid)
        return [own, *own.children(recursive=True)]

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)
