"""vLLM's own prefill/decode pair: two servers, a thread and a core each, KV carried by its NIXL connector.

    bench ── prompt, max_tokens=1 ─▶ prefill server: its answer says where the KV lies
          ── prompt, and that ──────▶ decode server: fetches the KV, streams the tokens

Who sends both is called a proxy elsewhere; here it is the bench itself, so that it costs the pair nothing.
Needs `pip install --no-deps nixl-cu12 nixl` (works without CUDA) in vLLM's environment.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from http_side import HttpSide, free_port, vllm
from streams import Answer

CONNECTOR = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
ASKED = {"do_remote_decode": True, "do_remote_prefill": False}


def _server(executable: Path, model: Path, core: int, name: str) -> HttpSide:
    command = vllm(executable, model, [core])
    way = {"UCX_TLS": "tcp,sm,self", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
    more = ["--kv-transfer-config", json.dumps(CONNECTOR), *command.arguments[-1:]]
    arguments, environment = [*command.arguments[:-1], *more], {**command.environment, **way}
    return HttpSide(replace(command, name=f"vLLM {name}", arguments=arguments, environment=environment))


class VllmPair:
    """A running pair. `begin`: as `peers.Side` has it."""

    name = "vLLM pair"

    def __init__(self, executable: Path, model: Path, cores: Sequence[int]) -> None:
        self.begin = time.perf_counter()
        self._prefill = _server(executable, model, cores[0], "prefill")
        self._decode = _server(executable, model, cores[-1], "decode")
        self._both = (self._prefill, self._decode)

    async def ready(self) -> None:
        for side in self._both:
            await side.ready()

    async def ask(self, prompt: list[int], max_tokens: int) -> Answer:
        sent = time.perf_counter()
        found: dict[str, Any] = await self._prefill.post(prompt, 1, {"stream": False, "kv_transfer_params": ASKED})
        where = {"kv_transfer_params": found["kv_transfer_params"]}
        answer = await self._decode.ask(prompt, max_tokens, where)
        answer.sent = sent
        return answer

    def pause(self) -> None:
        for side in self._both:
            side.pause()

    def resume(self) -> None:
        for side in self._both:
            side.resume()

    def memory(self) -> dict[str, float]:
        one, two = (side.memory() for side in self._both)
        return {name: one[name] + two[name] for name in one}

    async def close(self) -> None:
        for side in self._both:
            await side.close()
