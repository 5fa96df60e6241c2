"""Guards against one group's death that ends the whole deployment. Ray is imported, but not started."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable
from types import SimpleNamespace
from typing import Any

import pytest

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
    group = RayGroup(Peer(GroupId("decode-0"), Epoch(1)), None, on_this_machine=True)
    group.actors = [SimpleNamespace(load=streaming(0.5, loaded))]
    options = RayOptions(model="m", engine=EngineConfig(), secret="s", host=None)
    with pytest.raises(GroupUnavailable, match="decode-0"):
        await group.bring_up(options, lambda _: None)
