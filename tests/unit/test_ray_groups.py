"""Guards against one group's death that ends the whole deployment. Ray is imported, but not started."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.cluster.ray_groups import RayGroup, RayOptions
from kvferry.cluster.worker import Loaded
from kvferry.runtime.config import EngineConfig
from kvferry.runtime.errors import GroupUnavailable
from kvferry.runtime.ids import Epoch, GroupId, Peer
from kvferry.runtime.transfer.ticket import RankAddress


def remote(answer: Any) -> SimpleNamespace:
    async def call(*_: Any) -> Any:
        return answer

    run: Callable[..., Awaitable[Any]] = call
    return SimpleNamespace(remote=run)


@pytest.fixture
def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


async def test_rank_that_dies_right_after_loading_is_a_passing_failure(dead_pid: int) -> None:
    """Fault: psutil's error, which nobody expected, ended the supervisor and with it all other groups."""
    loaded = Loaded(address=RankAddress("h", 1, "m"), fingerprint=b"", host="h", group_port=0, pid=dead_pid)
    group = RayGroup(Peer(GroupId("decode-0"), Epoch(1)), None, on_this_machine=True)
    group.actors = [SimpleNamespace(load=remote(loaded), progress=remote(1.0))]
    options = RayOptions(model="m", engine=EngineConfig(), secret="s", host=None)
    with pytest.raises(GroupUnavailable, match="decode-0"):
        await group.bring_up(options, lambda _: None)
