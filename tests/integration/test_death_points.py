"""Workers are killed after each token of an answer and at points all over a prompt: the answer is always the same.

`KVFERRY_FULL=1` (`make test-full`) tries every point; otherwise every second one of the tokens' and five of the
prompt's, so that a change is tested in minutes.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

import pytest

from kvferry.cluster.launch import Parts
from kvferry.cluster.service import GroupView
from kvferry.cluster.supervisor import SupervisorPolicy
from kvferry.runtime.llm import LLM
from kvferry.runtime.request import RequestOutput, SamplingParams
from tests.support.deployment import Deployment, serve_config
from tests.support.faulty import num_steps
from tests.support.streams import Call, Stream, assert_same, tokens

FULL = os.environ.get("KVFERRY_FULL") == "1"
pytestmark = [pytest.mark.integration, pytest.mark.timeout(900 if FULL else 400)]
BLOCK, CHUNK = 8, 64
OPTIONS = {"block_size": BLOCK, "num_blocks": 1024, "max_batch_tokens": CHUNK}
QUICK = SupervisorPolicy(first_pause_s=0.05, max_pause_s=0.1, healthy_after_s=0.1)
SLOW = Parts(rank_class="tests.support.faulty:SlowRank")
NUM_TOKENS = 40
LAST_POINT = 20
PROMPT_CHUNKS = 11
SAMPLING = {
    "greedy": SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, temperature=0.0),
    "sampled": SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, temperature=0.9, top_p=0.95, seed=11),
}
Hit = Callable[[GroupView], bool]


@pytest.fixture(scope="module")
def llm(tiny_model: str) -> LLM:
    return LLM(tiny_model, dtype="float32", threads=1, **OPTIONS)


async def find(deployment: Deployment, role: str, hit: Hit, stream: Stream) -> GroupView:
    """The group of that role that is at the wanted stage; fails if the stream ends before one was."""
    while True:
        found = [g for g in (await deployment.client.cluster()).groups if g.role == role and g.state == "live"]
        for group in sorted(found, key=lambda g: -g.num_running):
            if hit(group):
                return group
        assert not stream.done, f"the stream ended before it was seen there: {found}"
        await asyncio.sleep(0.005)


def busy(group: GroupView) -> bool:
    return bool(group.num_running or group.num_waiting or group.num_leased_blocks)


async def prefills(deployment: Deployment) -> list[GroupView]:
    return [g for g in (await deployment.client.cluster()).groups if g.role == "prefill"]


async def until_live(deployment: Deployment, role: str, count: int) -> None:
    async with asyncio.timeout(90):
        while True:
            groups = (await deployment.client.cluster()).groups
            if sum(g.role == role and g.state == "live" for g in groups) >= count:
                return
            await asyncio.sleep(0.05)


def points() -> list[tuple[str, int]]:
    every = [(kind, k) for k in range(1, LAST_POINT + 1) for kind in SAMPLING]
    return every if FULL else [point for i, point in enumerate(every) if i % 4 in (0, 3)]


async def test_decode_worker_dies_after_each_token(tiny_model: str, shared_ray: str, llm: LLM) -> None:
    """Fault: some positions lose or repeat a token: the first, those at a block's border, those on their way."""
    calls = {kind: Call(tokens(21, 1), sampling) for kind, sampling in SAMPLING.items()}
    wanted = {kind: llm.generate([call.prompt], call.sampling)[0] for kind, call in calls.items()}
    config = serve_config(tiny_model, disaggregate="always", ray_address=shared_ray, decode=3, **OPTIONS)
    hits: list[int] = []
    async with Deployment(config, parts=SLOW, policy=QUICK) as deployment:
        for kind, k in points():
            stream = Stream(deployment, calls[kind])
            read = asyncio.create_task(stream.read())
            await deployment.until(lambda s=stream, k=k: s.num_tokens >= k)
            group = await find(deployment, "decode", busy, stream)
            os.kill(group.pids[0], signal.SIGKILL)
            hits.append(stream.num_tokens)
            assert not stream.done, "the answer was complete before the death"
            output: RequestOutput = await read
            assert output.timeline.attempts == 2, (kind, k)
            assert_same(output, wanted[kind])
            await until_live(deployment, "decode", 1)
        view = await deployment.assert_at_rest()
        assert (view.num_failed, view.num_resumed) == (0, len(hits))
        assert len({h for h in hits if h <= LAST_POINT + 2}) >= len(points()) // 2 // (2 if FULL else 1), hits
        assert next(g for g in view.groups if g.role == "prefill").epoch == 1, "the prefill group was disturbed"


async def test_prefill_worker_dies_all_over_a_prompt(tiny_model: str, shared_ray: str, llm: LLM) -> None:
    """Fault: a prompt half computed and half ferried is lost, waits for ever, or is answered wrong."""
    config = serve_config(tiny_model, disaggregate="always", ray_address=shared_ray, prefill=2, **OPTIONS)
    hits = []
    async with Deployment(config, parts=SLOW, policy=QUICK) as deployment:
        for point in range(0, 10, 1 if FULL else 2):  # steps that have begun
            call = Call(tokens(PROMPT_CHUNKS * CHUNK + 3, 100 + point), SAMPLING["sampled" if point % 4 else "greedy"])
            stream = Stream(deployment, call)
            before = {g.pids[0]: num_steps(tiny_model, g.pids[0]) for g in await prefills(deployment)}
            read = asyncio.create_task(stream.read())
            pid = (await find(deployment, "prefill", busy, stream)).pids[0]
            await deployment.until(lambda p=pid, n=before[pid] + point: num_steps(tiny_model, p) >= n)
            os.kill(pid, signal.SIGKILL)
            hits.append(num_steps(tiny_model, pid) - before[pid])
            assert stream.num_tokens == 0, "the prompt was computed before the death"
            output = await read
            assert output.timeline.attempts == 2, point
            assert_same(output, llm.generate([call.prompt], call.sampling)[0])
            await until_live(deployment, "prefill", 2)
        view = await deployment.assert_at_rest()
        assert (view.num_failed, view.num_resumed) == (0, len(hits))
        assert len(set(hits)) > len(hits) // 2, hits
        assert next(g for g in view.groups if g.role == "decode").epoch == 3, "the decode group was disturbed"
