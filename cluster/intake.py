"""Where groups' frames enter a gateway: registry, prefix index, coordinator, in this order."""

from __future__ import annotations

import asyncio
from typing import Protocol

import structlog

from kvferry.cluster import messages as m
from kvferry.cluster.coordinator import Coordinator
from kvferry.cluster.ports import Clock
from kvferry.cluster.prefix_index import PrefixIndex
from kvferry.cluster.registry import Registry
from kvferry.runtime.errors import GroupUnavailable
from kvferry.runtime.ids import Peer

SNAPSHOT_TIMEOUT_S = 10.0

_log = structlog.get_logger(__name__)


class Source(Protocol):
    """The part of `ports.GroupPort` that is used here."""

    @property
    def peer(self) -> Peer: ...

    async def snapshot(self, timeout_s: float) -> m.KvSnapshot: ...


class Intake:
    """Snapshots that the index asks for run in `tasks`."""

    def __init__(
        self,
        registry: Registry,
        index: PrefixIndex,
        coordinator: Coordinator,
        clock: Clock,
        tasks: asyncio.TaskGroup,
        snapshot_timeout_s: float = SNAPSHOT_TIMEOUT_S,
    ) -> None:
        self._registry = registry
        self._index = index
        self._coordinator = coordinator
        self._clock = clock
        self._tasks = tasks
        self._snapshot_timeout_s = snapshot_timeout_s
        self._snapshots: set[Peer] = set()

    def on_frame(self, port: Source, frame: m.StepFrame) -> None:
        peer = port.peer
        if not self._registry.on_frame(peer, frame, self._clock.now_ns()):
            return
        if self._index.apply(peer, frame.seq, frame.kv) and peer not in self._snapshots:
            self._snapshots.add(peer)
            self._tasks.create_task(self._snapshot(port), name=f"snapshot {peer}")
        self._coordinator.on_frame(peer, frame)

    async def _snapshot(self, port: Source) -> None:
        """One at a time per group; if it was not enough, the next frame asks again."""
        try:
            snapshot = await port.snapshot(self._snapshot_timeout_s)
            self._index.snapshot(port.peer, snapshot.seq, snapshot.hashes)
        except GroupUnavailable as error:
            _log.info("no_snapshot", peer=str(port.peer), reason=str(error))
        finally:
            self._snapshots.discard(port.peer)
