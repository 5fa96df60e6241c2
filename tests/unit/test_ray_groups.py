"""Guards against one group's death that ends the whole deployment. Ray is imported, but not started."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Iterator
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray

from kvferry.cluster.ray_groups import RayGroup, RayOptions
from kvferry.cluster.worker import Loaded
from kvferry.runtime.config import EngineConfig
from kvferry.runtime.errors import GroupUnavailable
from kvferry.runtime.ids import Epoch, GroupId, Peer
from kvferry.runtime.transfer.ticket import RankAddress


def streaming(*answers: Any) -> SimpleNamespace:
    """A method of an actor whose call gives references to these answers."""

    async def reference(answer: Any) -> Any:
        return answer

    async def call() -> AsyncIterator[Awaitable[Any]]:
        for answer in answers:
            yield reference(answer)

    method = SimpleNamespace(remote=call)
    return SimpleNamespace(options=lambda **_: method)


@pytest.fixture
def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


async def test_rank_that_dies_right_after_loading_is_a_passing_failure(dead_pid: int) -> None:
    """Fault: psutil's error, which nobody expected, ended the supervisor and with it all other groups."""
    loaded = Loaded(address=RankAddress("h", 1, "m"), fingerprint=b"", host="h", group_port=0, pid=dead_pid)
    group = RayGroup(Peer(GroupId("decode-0"), Epoch(1)), on_this_machine=True)
    group.actors = [SimpleNamespace(load=streaming(0.5, loaded))]
    options = RayOptions(model="m", engine=EngineConfig(), secret="s", host=None)
    with pytest.raises(GroupUnavailable, match="decode-0"):
        await group.bring_up(options, lambda _: None)


@pytest.fixture
def running() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        yield process
        process.kill()


async def test_killing_a_group_whose_ray_has_gone_joins_no_other(
    running: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: Ray's calls connect to any Ray of this machine by themselves, or start one that nobody ends."""
    inits: list[Any] = []
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **options: inits.append(options))
    group = RayGroup(Peer(GroupId("decode-0"), Epoch(1)), on_this_machine=True)
    group.actors, group._reservation = [object()], object()
    group._processes = [psutil.Process(running.pid)]
    await group.kill()
    assert await asyncio.to_thread(running.wait, 10) == -signal.SIGKILL
    assert not inits
