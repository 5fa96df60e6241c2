"""The deployment changes under running streams: each stream goes on, and ends as if nothing had happened."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
import psutil
import pytest

from kvferry.cluster.service import OperationView
from kvferry.runtime.errors import GroupUnavailable, InvalidArgument, NotFound, QueueFull, ResourceMissing
from kvferry.runtime.llm import LLM
from tests.integration.test_deaths import CALLS, OPTIONS, PACED, Call, Stream, assert_same, tokens
from tests.support.deployment import Deployment, serve_config

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def llm(tiny_model: str) -> LLM:
    return LLM(tiny_model, dtype="float32", threads=1, **OPTIONS)


@pytest.fixture
async def make(tiny_model: str, shared_ray: str) -> AsyncIterator[Callable[..., Awaitable[Deployment]]]:
    """Starts deployments; afterwards each must be at rest, and is ended."""
    started: list[Deployment] = []

    async def start(**fields: int) -> Deployment:
        config = serve_config(tiny_model, disaggregate="always", ray_address=shared_ray, **OPTIONS, **fields)
        started.append(await Deployment(config, parts=PACED).__aenter__())
        return started[-1]

    yield start
    for deployment in started:
        await deployment.__aexit__(None, None, None)


async def under_load(
    deployment: Deployment, llm: LLM, operate: Callable[[], Awaitable[OperationView]], calls: list[Call] = CALLS
) -> OperationView:
    """The operation begins when all streams have shown tokens and none has ended. All end as in one engine."""
    wanted = llm.generate([call.prompt for call in calls], [call.sampling for call in calls])
    streams = [Stream(deployment, call) for call in calls]
    reads = [asyncio.create_task(stream.read()) for stream in streams]
    await deployment.until(lambda: all(s.num_tokens >= 8 for s in streams))
    assert not any(stream.done for stream in streams), "a stream has ended before the operation"
    view = await operate()
    for got, want in zip(await asyncio.gather(*reads), wanted, strict=True):
        assert_same(got, want)
        assert got.timeline.attempts == 1
    cluster = await deployment.client.cluster()
    assert (cluster.num_failed, cluster.num_resumed) == (0, 0)
    await deployment.assert_at_rest()
    return view


async def roles(deployment: Deployment) -> dict[str, tuple[str, str]]:
    return {g.group: (g.role, g.state) for g in (await deployment.client.cluster()).groups}


async def test_drain_and_back(make: Callable[..., Awaitable[Deployment]], llm: LLM) -> None:
    """Fault: streams of a group that leaves break off, or it leaves processes behind, or it never comes back."""
    deployment = await make(decode=2)
    old = await deployment.group("decode-0")
    client = deployment.client
    view = await under_load(deployment, llm, lambda: client.drain("decode-0"))
    assert view.ended == [f"decode-0@{old.epoch}"]
    assert (view.num_resumed, view.started) == (0, [])
    assert view.num_moved >= 2
    await deployment.until(lambda: not any(map(psutil.pid_exists, old.pids)))
    assert (await roles(deployment))["decode-0"] == ("decode", "drained")
    again = await client.drain("decode-0")
    assert (again.ended, again.started) == ([], [])
    view = await under_load(deployment, llm, lambda: client.scale(decode=2), CALLS[:2])
    assert [name.partition("@")[0] for name in view.started] == ["decode-0"]
    assert (await deployment.group("decode-0")).epoch > old.epoch
    for name in ("prefill-0", "decode-0"):
        await client.drain(name)
    await under_load(deployment, llm, lambda: client.set_role("decode-1", "decode"), CALLS[:2])
    with pytest.raises(GroupUnavailable, match="scale"):
        await client.drain("decode-1")
    assert (await roles(deployment))["decode-1"] == ("decode", "live")


async def test_scale_up_and_down(make: Callable[..., Awaitable[Deployment]], llm: LLM) -> None:
    """Fault: a new group gets no work, or the wrong one leaves, or what does not fit waits in silence."""
    deployment = await make()
    client = deployment.client
    view = await under_load(deployment, llm, lambda: client.scale(prefill=2, decode=2))
    assert sorted(name.partition("@")[0] for name in view.started) == ["decode-1", "prefill-1"]
    calls = [Call(tokens(30 + i, 400 + i), call.sampling) for i, call in enumerate(CALLS)]
    view = await under_load(deployment, llm, lambda: client.scale(prefill=1, decode=1), calls)
    assert [name.partition("@")[0] for name in view.ended] == ["prefill-1", "decode-1"]
    assert view.num_moved >= 1
    assert view.num_resumed == 0
    assert set(await roles(deployment)) == {"prefill-0", "decode-0"}
    with pytest.raises(ResourceMissing, match="decode-"):
        await client.scale(decode=60)
    with pytest.raises(InvalidArgument):
        await client.scale(prefill=0, decode=0)
    with pytest.raises(NotFound):
        await client.drain("decode-7")
    assert set(await roles(deployment)) == {"prefill-0", "decode-0"}


async def test_roles_flip_in_place(make: Callable[..., Awaitable[Deployment]], llm: LLM) -> None:
    """Fault: a group that changes its role loses its processes, its cache or what it works on."""
    deployment = await make()
    client = deployment.client
    before = {g.group: g.pids for g in (await client.cluster()).groups}

    async def flip() -> OperationView:
        await client.set_role("prefill-0", "decode")
        return await client.set_role("decode-0", "prefill")

    await under_load(deployment, llm, flip)
    assert await roles(deployment) == {"prefill-0": ("decode", "live"), "decode-0": ("prefill", "live")}
    received = (await deployment.group("prefill-0")).received_bytes
    await under_load(deployment, llm, client.cluster, [Call(tokens(90, 500), CALLS[0].sampling)])  # type: ignore[arg-type]
    assert (await deployment.group("prefill-0")).received_bytes > received, "nothing is ferried the other way"
    assert before == {g.group: g.pids for g in (await client.cluster()).groups}
    with pytest.raises(InvalidArgument, match="role"):
        await client.set_role("decode-0", "referee")


@pytest.mark.parametrize("groups", [{}, {"prefill": 0, "decode": 0, "mixed": 1}])
async def test_rolling_restart(make: Callable[..., Awaitable[Deployment]], llm: LLM, groups: dict[str, int]) -> None:
    """Fault: a request fails because its only group restarts; or two operations tread on each other."""
    deployment = await make(**groups)
    client = deployment.client
    before = (await client.cluster()).groups

    async def restart() -> OperationView:
        running = asyncio.create_task(client.restart())
        await asyncio.sleep(0.1)
        with pytest.raises(QueueFull, match="restart"):
            await client.scale(decode=2)
        return await running

    long = [Call(c.prompt, msgspec.structs.replace(c.sampling, max_tokens=900)) for c in CALLS[:4]]
    view = await under_load(deployment, llm, restart, long)
    assert len(view.started) == len(view.ended) == len(before)
    assert view.num_resumed == 0
    after = {g.group: g for g in (await client.cluster()).groups}
    assert set(after) == {g.group for g in before}
    for group in before:
        assert after[group.group].state == "live"
        assert after[group.group].epoch > group.epoch
        await deployment.until(lambda pids=group.pids: not any(map(psutil.pid_exists, pids)))


@pytest.mark.parametrize("victim", ["decode-0", "decode-1"])
async def test_death_during_a_drain(make: Callable[..., Awaitable[Deployment]], llm: LLM, victim: str) -> None:
    """Fault: the group that leaves, or the one that takes over, dies in the middle, and a stream with it."""
    deployment = await make(decode=2)
    client, old = deployment.client, await deployment.group(victim)
    wanted = llm.generate([call.prompt for call in CALLS], [call.sampling for call in CALLS])
    streams = [Stream(deployment, call) for call in CALLS]
    reads = [asyncio.create_task(stream.read()) for stream in streams]
    await deployment.until(lambda: all(s.num_tokens >= 8 for s in streams))
    draining = asyncio.create_task(client.drain("decode-0"))
    await asyncio.sleep(0.02)
    os.kill(old.pids[0], signal.SIGKILL)
    await draining
    for got, want in zip(await asyncio.gather(*reads), wanted, strict=True):
        assert_same(got, want)
    assert (await client.cluster()).num_failed == 0
    if victim == "decode-1":
        await deployment.until_replaced(old)
    assert await roles(deployment) == {
        "prefill-0": ("prefill", "live"),
        "decode-0": ("decode", "drained"),
        "decode-1": ("decode", "live"),
    }
