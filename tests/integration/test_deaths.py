"""Workers are killed under running streams: each stream goes on, and ends as if nothing had happened."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
import pytest

from kvferry.cluster.launch import Parts
from kvferry.runtime.llm import LLM
from kvferry.runtime.request import RequestOutput, SamplingParams
from tests.support.deployment import Deployment, serve_config
from tests.support.streams import Call, Stream, assert_same, tokens
from tests.support.tiny_model import EOS

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]
OPTIONS = {"block_size": 8, "num_blocks": 1024, "max_batch_tokens": 64}
PACED = Parts(rank_class="tests.support.faulty:PacedRank")
NUM_TOKENS = 250
TOKENS_BEFORE_DEATH = 8
LONG = 3000
"""Tokens of a prompt that takes about fifty steps to prefill."""


def sampled(seed: int, **fields: int) -> SamplingParams:
    return SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, temperature=0.9, top_p=0.95, seed=seed, **fields)


GREEDY = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, temperature=0.0)
SHARED = tokens(64, 0)
CALLS = [
    Call(tokens(40, 1), GREEDY),
    Call(SHARED + tokens(9, 2), GREEDY),
    Call(SHARED + tokens(30, 3), sampled(3)),
    Call(tokens(5, 4), sampled(4)),
    Call(tokens(33, 5), sampled(5, n=2)),
    Call(SHARED, msgspec.structs.replace(GREEDY, repetition_penalty=1.2, logprobs=1)),
]


@pytest.fixture(scope="module")
def llm(tiny_model: str) -> LLM:
    return LLM(tiny_model, dtype="float32", threads=1, **OPTIONS)


@pytest.fixture
async def make(tiny_model: str, shared_ray: str) -> AsyncIterator[Callable[..., Awaitable[Deployment]]]:
    """Starts deployments that hand every request over; afterwards each must be at rest, and is ended."""
    started: list[Deployment] = []

    async def start(**fields: int) -> Deployment:
        config = serve_config(tiny_model, disaggregate="always", ray_address=shared_ray, **OPTIONS, **fields)
        started.append(await Deployment(config, parts=PACED).__aenter__())
        return started[-1]

    yield start
    for deployment in started:
        await deployment.__aexit__(None, None, None)


async def run_and_kill(
    deployment: Deployment, llm: LLM, calls: list[Call], kill: Callable[[], Awaitable[object]]
) -> list[RequestOutput]:
    """All calls at once; `kill` once each has shown some tokens and none has ended. All end as in one engine."""
    wanted = llm.generate([call.prompt for call in calls], [call.sampling for call in calls])
    streams = [Stream(deployment, call) for call in calls]
    reads = [asyncio.create_task(stream.read()) for stream in streams]
    await deployment.until(lambda: all(s.num_tokens >= TOKENS_BEFORE_DEATH for s in streams))
    await kill()
    assert not any(stream.done for stream in streams), "a stream has ended before the death"
    outputs = await asyncio.gather(*reads)
    for got, want in zip(outputs, wanted, strict=True):
        assert_same(got, want)
    return list(outputs)


async def assert_ferries(deployment: Deployment, llm: LLM, seed: int) -> None:
    """A new request works, and its blocks go over the new links."""
    call = Call(tokens(50, seed), msgspec.structs.replace(GREEDY, max_tokens=5))
    output = await Stream(deployment, call).read()
    assert_same(output, llm.generate([call.prompt], call.sampling)[0])
    assert output.usage is not None
    assert output.usage.num_ferried_blocks == 50 // 8


async def test_decode_worker_dies(make: Callable[..., Awaitable[Deployment]], llm: LLM) -> None:
    """Fault: tokens that were delivered come again, or those on their way are lost, or sampling starts anew."""
    deployment = await make()
    old = await deployment.group("decode-0")
    outputs = await run_and_kill(deployment, llm, CALLS, lambda: deployment.kill("decode-0"))
    assert [output.timeline.attempts for output in outputs] == [2] * len(CALLS)
    view = await deployment.client.cluster()
    assert (view.num_finished, view.num_failed, view.num_resumed) == (len(CALLS), 0, len(CALLS))
    await deployment.until_replaced(old)
    await deployment.assert_at_rest()
    await assert_ferries(deployment, llm, 100)


async def test_prefill_worker_dies_in_the_middle_of_a_prompt(
    make: Callable[..., Awaitable[Deployment]], llm: LLM
) -> None:
    """Fault: the request whose prompt was half computed is lost; or those that decode elsewhere notice anything."""
    deployment = await make()
    old = await deployment.group("prefill-0")
    long = Call(tokens(LONG, 9), sampled(9))
    streams = [Stream(deployment, call) for call in [*CALLS[:2], long]]
    wanted = llm.generate([s.call.prompt for s in streams], [s.call.sampling for s in streams])
    reads = [asyncio.create_task(stream.read()) for stream in streams[:2]]
    await deployment.until(lambda: all(s.num_tokens > 0 for s in streams[:2]))
    reads.append(asyncio.create_task(streams[2].read()))
    while (await deployment.group("prefill-0")).num_running == 0:
        assert not streams[2].done
        await asyncio.sleep(0.01)
    await deployment.kill("prefill-0")
    assert streams[2].num_tokens == 0, "the prompt was computed before the death"
    outputs = await asyncio.gather(*reads)
    for got, want in zip(outputs, wanted, strict=True):
        assert_same(got, want)
    assert [output.timeline.attempts for output in outputs] == [1, 1, 2]
    assert (await deployment.client.cluster()).num_resumed == 1
    await deployment.until_replaced(old)
    await deployment.assert_at_rest()
    await assert_ferries(deployment, llm, 101)


@pytest.mark.parametrize("rank", [0, 1])
async def test_one_rank_of_a_group_dies(make: Callable[..., Awaitable[Deployment]], llm: LLM, rank: int) -> None:
    """Fault: the other rank lives on, holds memory and waits for sums that never come."""
    deployment = await make(decode_tp=2)
    old = await deployment.group("decode-0")
    assert len(old.pids) == 2
    await run_and_kill(deployment, llm, CALLS[:3], lambda: deployment.kill("decode-0", rank))
    assert (await deployment.client.cluster()).num_resumed == 3
    await deployment.until_replaced(old)
    await assert_ferries(deployment, llm, 102 + rank)


async def test_all_workers_die(make: Callable[..., Awaitable[Deployment]], llm: LLM) -> None:
    """Fault: streams end with an error though the groups are back a moment later."""
    deployment = await make()
    old = [await deployment.group(name) for name in ("prefill-0", "decode-0")]

    async def kill() -> None:
        await deployment.kill("prefill-0")
        await deployment.kill("decode-0")

    await run_and_kill(deployment, llm, CALLS[3:], kill)
    for group in old:
        await deployment.until_replaced(group)
    assert (await deployment.client.cluster()).num_resumed == 3
    await assert_ferries(deployment, llm, 110)


async def test_requests_that_end_at_their_first_token_ferry_nothing(
    make: Callable[..., Awaitable[Deployment]], llm: LLM
) -> None:
    """Fault: blocks travel for a request that needs no decode. (Uncached prompts of one chunk: ADR 0005.)"""
    deployment = await make()
    one = SamplingParams(max_tokens=1, temperature=0.0)
    ends = SamplingParams(max_tokens=50, temperature=0.0, logit_bias={EOS: 100.0})
    calls = [Call(tokens(40 + i, 200 + i), ends if i % 2 else one) for i in range(24)]
    calls.append(Call(tokens(500, 300), one))
    for call in calls:
        output = await Stream(deployment, call).read()
        assert len(output.outputs[0].token_ids) == 1
        assert output.outputs[0].finish_reason == ("length" if call.sampling is one else "stop")
        assert output.usage is not None
        assert (output.usage.num_ferried_blocks, output.usage.ferried_bytes) == (0, 0)
    view = await deployment.assert_at_rest()
    assert sum(group.received_bytes for group in view.groups) == 0
    await assert_ferries(deployment, llm, 111)
