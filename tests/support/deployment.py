"""A whole deployment in the test's process (real Ray, real workers, real gRPC), and what must be true when it rests."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from typing import Any, Self

import psutil

from kvferry.cluster.client import AsyncClient
from kvferry.cluster.config import ServeConfig
from kvferry.cluster.launch import Parts, start_cluster
from kvferry.cluster.service import ClusterView, GroupView
from kvferry.cluster.supervisor import SupervisorPolicy
from kvferry.runtime.config import CacheConfig, EngineConfig, SchedulerConfig, TransferConfig

POLL_S = 0.02
REST_TIMEOUT_S = 20.0
START_TIMEOUT_S = 90.0
END_TIMEOUT_S = 20.0


def serve_config(model: str, **fields: Any) -> ServeConfig:
    """Flat options: those of `ServeConfig` and of the engine's parts. float32, checksums, one thread, free ports."""
    homes = {"cache": CacheConfig, "scheduler": SchedulerConfig, "transfer": TransferConfig}
    fields.setdefault("checksum", True)
    parts: dict[str, Any] = {}
    for name, kind in homes.items():
        parts[name] = kind(**{f: fields.pop(f) for f in kind.__struct_fields__ if f in fields})
    parts |= {name: fields.pop(name) for name in ("speculation", "quantization", "dtype") if name in fields}
    engine = EngineConfig(**{"dtype": "float32", "threads": 1, **parts})
    return ServeConfig(model=model, port=0, engine=engine, **fields)


class Deployment:
    """Use as an async context manager: it is usable inside, and looked over and ended on the way out."""

    def __init__(
        self, config: ServeConfig, *, parts: Parts | None = None, policy: SupervisorPolicy | None = None
    ) -> None:
        self._config, self._parts, self._policy = config, parts, policy

    async def __aenter__(self) -> Self:
        self._cluster = await start_cluster(self._config, parts=self._parts, policy=self._policy)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await self._cluster.usable()
                await self.until(lambda: len(self._cluster.supervisor.live) == len(self._config.groups()))
        except BaseException:
            await self._cluster.close()
            raise
        self.target = self._cluster.target
        self.client = AsyncClient(self.target)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        try:
            if error is None:
                await self.assert_at_rest()
        finally:
            await self.client.close()
            await self._cluster.close()

    async def assert_at_rest(self) -> ClusterView:
        """Nothing runs, nothing is leased, and no ledger disagrees with another; within `REST_TIMEOUT_S`."""
        deadline = time.monotonic() + REST_TIMEOUT_S
        while True:
            findings, view = (await self.client.audit()).findings, await self.client.cluster()
            held = {g.group: (g.num_leased_blocks, g.num_running, g.num_waiting) for g in view.groups}
            if not findings and not view.num_requests and not any(map(any, held.values())):
                return view
            assert time.monotonic() < deadline, f"not at rest: {findings}, {view.num_requests} in flight, held {held}"
            await asyncio.sleep(0.2)

    async def group(self, name: str) -> GroupView:
        return next(g for g in (await self.client.cluster()).groups if g.group == name)

    async def kill(self, name: str, rank: int = 0) -> GroupView:
        """SIGKILL to one rank's process. Returns the group as it was."""
        group = await self.group(name)
        assert group.state == "live"
        os.kill(group.pids[rank], signal.SIGKILL)
        return group

    async def until_replaced(self, old: GroupView) -> GroupView:
        """The group lives again: new epoch, new processes, the old ones gone."""
        async with asyncio.timeout(START_TIMEOUT_S):
            while True:
                now = await self.group(old.group)
                if now.state == "live" and now.epoch > old.epoch:
                    break
                await asyncio.sleep(0.1)
        assert not set(now.pids) & set(old.pids)
        assert len(now.pids) == len(old.pids)
        await self.until(lambda: not any(psutil.pid_exists(pid) for pid in old.pids))
        return now

    async def until(self, condition: Callable[[], Any], seconds: float = 60) -> None:
        async with asyncio.timeout(seconds):
            while not condition():  # noqa: ASYNC110  what is watched are other processes
                await asyncio.sleep(POLL_S)


def children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def assert_no_new_children(before: set[psutil.Process]) -> None:
    """All processes that this one, or a child of it, started since then have ended; within `END_TIMEOUT_S`.

    Ray's spare workers do not count: a Ray that tests share keeps some.
    """
    left = psutil.wait_procs(children() - before, timeout=END_TIMEOUT_S, callback=None)[1]
    names = [name for process in left if (name := _name(process)) and not name.startswith("ray::IDLE")]
    assert not names, f"left behind: {names}"


def _name(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())[:120]
    except psutil.Error:
        return ""
