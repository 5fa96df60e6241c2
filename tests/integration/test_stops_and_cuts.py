"""Processes that stop without dying, and links that are cut: requests go on, nobody is restarted for it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvferry.cluster.launch import Parts
from kvferry.cluster.service import GroupView
from kvferry.runtime.llm import LLM
from kvferry.runtime.request import SamplingParams
from tests.support.cuts import cut_links
from tests.support.deployment import Deployment, serve_config
from tests.support.faulty import num_steps
from tests.support.streams import Call, Stream, assert_same, tokens

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]
BLOCK, CHUNK = 8, 64
OPTIONS = {"block_size": BLOCK, "num_blocks": 1024, "max_batch_tokens": CHUNK}
SLOW = Parts(rank_class="tests.support.faulty:SlowRank")
LONG = 11 * CHUNK + 3
"""Tokens of a prompt that takes a dozen steps."""
STOP_S = 3.0
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture(scope="module")
def llm(tiny_model: str) -> LLM:
    return LLM(tiny_model, dtype="float32", threads=1, **OPTIONS)


def sampling(num_tokens: int, seed: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=0.9, seed=seed)


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Its threads stand still inside, and run again whatever happens."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def until_state(deployment: Deployment, name: str, state: str) -> None:
    async with asyncio.timeout(60):
        while (await deployment.group(name)).state != state:  # noqa: ASYNC110  seen from outside
            await asyncio.sleep(0.05)


async def running(deployment: Deployment, role: str) -> GroupView:
    async with asyncio.timeout(30):
        while True:
            for group in (await deployment.client.cluster()).groups:
                if group.role == role and group.num_running:
                    return group
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("transport", ["shm", "gloo"])
async def test_link_cut_in_mid_transfer(tiny_model: str, shared_ray: str, llm: LLM, transport: str) -> None:
    """Fault 24: the request waits for the rest of its blocks, or the group is given up for a link's sake."""
    call = Call(tokens(LONG, 1), sampling(20, 1))
    config = serve_config(tiny_model, disaggregate="always", ray_address=shared_ray, transport=transport, **OPTIONS)
    async with Deployment(config, parts=SLOW) as deployment:
        source, destination = [(await deployment.group(name)).pids[0] for name in ("prefill-0", "decode-0")]
        stream = Stream(deployment, call)
        read = asyncio.create_task(stream.read())
        await deployment.until(lambda: num_steps(tiny_model, source) >= 5)
        assert cut_links(source, destination) > 0, "there was no link to cut"
        assert stream.num_tokens == 0, "the prompt was computed before the cut"
        output = await read
        assert_same(output, llm.generate([call.prompt], call.sampling)[0])
        assert output.usage is not None
        assert 0 < output.usage.num_ferried_blocks < LONG // BLOCK, "the cut came before or after the transfer"
        assert output.timeline.attempts == 1
        again = Call(tokens(100, 2), sampling(3, 2))
        second = await Stream(deployment, again).read()
        assert_same(second, llm.generate([again.prompt], again.sampling)[0])
        assert second.usage is not None
        assert second.usage.num_ferried_blocks == 100 // BLOCK, "the link was not made again"
        assert sorted(g.epoch for g in (await deployment.assert_at_rest()).groups) == [1, 2]


async def test_stopped_worker_leaves_routing_and_comes_back(tiny_model: str, shared_ray: str, llm: LLM) -> None:
    """Faults 24, 30, 31: a stopped peer is never left, is taken for dead, or disturbs others when it wakes."""
    config = serve_config(tiny_model, disaggregate="always", ray_address=shared_ray, prefill=2, decode=2, **OPTIONS)
    async with Deployment(config, parts=SLOW) as deployment:
        before = {g.group: (g.epoch, g.pids) for g in (await deployment.client.cluster()).groups}
        for i, role in enumerate(("decode", "prefill")):
            call = Call(tokens(LONG, 10 + i), sampling(60, i))
            stream = Stream(deployment, call)
            read = asyncio.create_task(stream.read())
            if role == "decode":
                await deployment.until(lambda s=stream: s.num_tokens >= 8)
            group = await running(deployment, role)
            assert not stream.done
            with stopped(group.pids[0]):
                begin = time.monotonic()
                await until_state(deployment, group.group, "unreachable")
                other = Call(tokens(30, 20 + i), sampling(5, i))
                served = await Stream(deployment, other).read()  # by the others, meanwhile
                assert_same(served, llm.generate([other.prompt], other.sampling)[0])
                await asyncio.sleep(max(0.0, begin + STOP_S - time.monotonic()))
                assert not stream.done, "it ended without the worker that was stopped"
            await until_state(deployment, group.group, "live")
            assert_same(await read, llm.generate([call.prompt], call.sampling)[0])
        view = await deployment.assert_at_rest()
        assert {g.group: (g.epoch, g.pids) for g in view.groups} == before, "somebody was restarted"
        assert view.num_failed == 0


async def test_readiness_follows_progress(tiny_model: str, shared_ray: str, llm: LLM) -> None:
    """Fault 13: health stays green while the only group stands still: its leader, or a step that another rank holds."""
    config = serve_config(tiny_model, prefill=0, decode=0, mixed=1, mixed_tp=2, ray_address=shared_ray, **OPTIONS)
    async with Deployment(config, parts=SLOW) as deployment, grpc.aio.insecure_channel(deployment.target) as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        async def until(status: int) -> None:
            async with asyncio.timeout(60):
                async for answer in stub.Watch(health_pb2.HealthCheckRequest()):
                    if answer.status == status:
                        return

        group = await deployment.group("mixed-0")
        for rank in (0, 1):
            call = Call(tokens(50, 30 + rank), sampling(60, rank))
            await until(SERVING)
            stream = Stream(deployment, call)
            read = asyncio.create_task(stream.read())
            await deployment.until(lambda s=stream: s.num_tokens >= 3)
            with stopped(group.pids[rank]):
                await until(NOT_SERVING)
                assert not stream.done
            await until(SERVING)
            assert_same(await read, llm.generate([call.prompt], call.sampling)[0])
        assert (await deployment.group("mixed-0")).epoch == group.epoch
