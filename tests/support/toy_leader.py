"""A group's leader in the test's own process: hub, server and a toy engine."""

from __future__ import annotations

import asyncio

from kvferry.cluster.engine_loop import EngineLoop
from kvferry.cluster.hub import Hub
from kvferry.cluster.messages import GroupInfo
from kvferry.cluster.wire import WireServer
from tests.support import toy_shell as toy

SECRET = "s3cret"


class Leader:
    def __init__(self, info: GroupInfo | None = None) -> None:
        self.engine = toy.engine()
        self.crashes: list[str] = []
        self.hub = Hub(info or toy.info(), SECRET)
        self.engine_loop = EngineLoop(self.engine, self.hub, on_crash=self.crashes.append)
        self.hub.bind(self.engine_loop)
        self.server = WireServer("127.0.0.1", self.hub.open_stream)
        self.target = f"127.0.0.1:{self.server.port}"

    async def start(self) -> None:
        self.server.start()
        self.engine_loop.start()
        self._heartbeat = asyncio.create_task(self.hub.heartbeat())

    async def stop(self) -> None:
        self._heartbeat.cancel()
        await asyncio.gather(self._heartbeat, return_exceptions=True)
        await self.server.stop()
        assert await asyncio.to_thread(self.engine_loop.stop, 5)
        assert not self.crashes
