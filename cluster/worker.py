"""One rank of a group in a process of its own: the Ray actor. Rank 0 leads: it runs the engine and serves the gateways.

    supervisor ── load ─▶ every rank       loads its shard (in parallel); tells how far, then where it can be met
               ── start ▶ every rank       the group's channel closes, links are attached, the leader opens its stream
               ── wait_end ▶ every rank    never returns; Ray fails it within milliseconds of the process's death

Ray carries only these calls. Errors of the taxonomy come back as values, because Ray would rebuild them with the wrong
arguments.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol

import msgspec
import structlog

from kvferry.cluster import messages as m
from kvferry.cluster.collector import settle_collector
from kvferry.cluster.engine_driver import EngineLike
from kvferry.cluster.engine_loop import EngineLoop
from kvferry.cluster.group import FollowerChannel, LeaderChannel, exit_process
from kvferry.cluster.hub import Hub
from kvferry.cluster.lazy_modules import UNUSED_OF_TORCH, lazily
from kvferry.cluster.telemetry import configure_logging
from kvferry.cluster.wire import WireServer
from kvferry.runtime.config import EngineConfig
from kvferry.runtime.errors import GroupUnavailable, KvferryError
from kvferry.runtime.ids import Peer
from kvferry.runtime.kv.groups import KVGroups
from kvferry.runtime.speculation.speculator import Proposer
from kvferry.runtime.step import SampleInput, StepPlan, StepResult
from kvferry.runtime.transfer.secret import tag
from kvferry.runtime.transfer.ticket import GroupAddress, LinkReport, RankAddress

PARENT_CHECK_S = 2.0
ORPHAN_GRACE_S = 6.0
"""Ray ends its workers itself; one that outlives its raylet by so long ends on its own."""
PROGRESS_POLL_S = 5.0
PROGRESS_STEP = 0.05

_log = structlog.get_logger(__name__)


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank is to be."""

    model: str
    config: EngineConfig
    peer: Peer
    role: str
    rank: int
    tp_size: int
    secret: str
    host: str | None
    """Address to listen on; `None`: this node's address in the Ray cluster."""
    start_timeout_s: float
    log_json: bool = False
    rank_class: str = "kvferry.runtime.rank:Rank"
    engine_class: str = "kvferry.runtime.engine:Engine"


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    address: RankAddress
    fingerprint: bytes
    host: str
    group_port: int
    """Where followers meet the leader; 0 from a follower."""
    pid: int


class Started(msgspec.Struct, frozen=True, kw_only=True):
    target: str
    """The leader's stream, `host:port`; empty from a follower."""


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """A `KvferryError` on its way through Ray."""

    label: str
    message: str


class RankLike(Protocol):
    """The part of `kvferry.runtime.rank.Rank` that a worker drives."""

    address: RankAddress
    dtype: str
    kv: KVGroups
    max_context: int
    hash_root: bytes
    proposer: Proposer | None

    def attach(self, own: GroupAddress, report: Callable[[LinkReport], None]) -> None: ...
    def execute(self, plan: StepPlan, samples: list[SampleInput]) -> StepResult: ...
    def rest(self) -> None: ...
    def close(self) -> None: ...


class Worker:
    """Lives inside one Ray actor; each method is called once, one after the other.

    Ray runs them in the process's main thread, and `wait_end` keeps it. Idle, that thread would come around a hundred
    times a second, with Python's lock, beside the engine.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        configure_logging(json=spec.log_json, level="warning", context={"group": str(spec.peer), "rank": spec.rank})
        self._host = spec.host or _node_address()
        self._rank: RankLike | None = None
        self._channel: LeaderChannel | None = None
        self._loaded_share = 0.0
        self._progress = threading.Condition()
        threading.Thread(target=_watch_parent, name="parent-watch", daemon=True).start()

    # ------------------------------------------------------------ called through Ray
    def load(self) -> Iterator[float | Loaded | Failure]:
        """The loaded share in [0, 1] as it grows, then what has come of it."""
        with ThreadPoolExecutor(1, "load") as thread:
            loading = thread.submit(self._load)
            loading.add_done_callback(self._on_loaded)
            seen = 0.0
            while not loading.done():
                with self._progress:
                    news = partial(self._has_news, loading, seen)
                    self._progress.wait_for(news, timeout=PROGRESS_POLL_S)
                    seen = self._loaded_share
                yield seen
            yield loading.result()

    def _has_news(self, loading: Future[Loaded | Failure], seen: float) -> bool:
        return loading.done() or self._loaded_share >= seen + PROGRESS_STEP

    def _on_loaded(self, _loading: Future[Loaded | Failure]) -> None:
        with self._progress:
            self._progress.notify_all()

    def _load(self) -> Loaded | Failure:
        spec = self._spec
        try:
            if spec.rank == 0 and spec.tp_size > 1:
                self._channel = LeaderChannel(self._host, spec.secret, spec.tp_size - 1)
            with lazily(UNUSED_OF_TORCH):
                rank_class = _resolve(spec.rank_class)
            rank: RankLike = rank_class(
                spec.model,
                spec.config,
                rank=spec.rank,
                tp_size=spec.tp_size,
                parallel_kind="shm",
                parallel_name=f"{launch_name(spec.secret)}-{spec.peer.group}-{spec.peer.epoch}",
                host=self._host,
                secret=spec.secret,
                on_progress=self._on_progress,
            )
        except KvferryError as error:
            return Failure(label=error.label, message=str(error))
        self._rank = rank
        self._on_progress(1, 1)
        return Loaded(
            address=rank.address,
            fingerprint=rank.kv.fingerprint,
            host=self._host,
            group_port=self._channel.port if self._channel else 0,
            pid=os.getpid(),
        )

    def start(self, own: GroupAddress, leader: Loaded, pids: list[int]) -> Started | Failure:
        """On all ranks at the same time, once all are loaded."""
        try:
            target = self._lead(own, pids) if self._spec.rank == 0 else self._follow(own, leader)
        except KvferryError as error:
            return Failure(label=error.label, message=str(error))
        settle_collector()
        return Started(target=target)

    def wait_end(self) -> None:
        """Returns never; the call fails when the process dies."""
        threading.Event().wait()

    # ------------------------------------------------------------ inside
    def _on_progress(self, done: int, total: int) -> None:
        with self._progress:
            self._loaded_share = done / max(1, total)
            self._progress.notify_all()

    def _loaded(self) -> RankLike:
        if self._rank is None:
            raise GroupUnavailable(
                f"rank {self._spec.rank} of {self._spec.peer} is asked to start before it has loaded"
            )
        return self._rank

    def _follow(self, own: GroupAddress, leader: Loaded) -> str:
        spec, rank = self._spec, self._loaded()
        channel = FollowerChannel(leader.host, leader.group_port, spec.secret, spec.rank, spec.start_timeout_s)
        rank.attach(own, channel.report)
        threading.Thread(target=_run_follower, args=(rank, channel), name="follower-loop", daemon=True).start()
        return ""

    def _lead(self, own: GroupAddress, pids: list[int]) -> str:
        """Returns the address of the stream."""
        spec, rank, channel = self._spec, self._loaded(), self._channel
        execute = rank.execute if channel is None else _with_followers(channel, rank)
        engine: EngineLike = _resolve(spec.engine_class)(
            spec.config, rank.kv, rank.hash_root, own, rank.max_context, execute, proposer=rank.proposer
        )
        stream = StreamThread(self._info(rank, own, pids), spec.secret, self._host, engine, rank.rest)
        if channel is not None:
            channel.start(stream.engine_loop.report, spec.start_timeout_s)
        rank.attach(own, stream.engine_loop.report)
        stream.engine_loop.start()
        return f"{self._host}:{stream.port}"

    def _info(self, rank: RankLike, own: GroupAddress, pids: list[int]) -> m.GroupInfo:
        scheduler = self._spec.config.scheduler
        return m.GroupInfo(
            address=own,
            role=self._spec.role,
            hash_root=rank.hash_root,
            block_size=rank.kv.block_size,
            block_bytes=rank.kv.main.layout.block_bytes * self._spec.tp_size,
            num_blocks=rank.kv.num_blocks,
            max_context=rank.kv.max_context(rank.max_context),
            window=rank.kv.main.window,
            beside=m.blocks_beside(rank.kv),
            max_sequences=scheduler.max_sequences,
            max_batch_tokens=scheduler.max_batch_tokens,
            model=self._spec.model,
            dtype=rank.dtype,
            pids=pids,
        )


class StreamThread:
    """The leader's event loop in a thread of its own: the hub, its server, its heartbeat."""

    START_TIMEOUT_S = 10.0

    def __init__(
        self, info: m.GroupInfo, secret: str, host: str, engine: EngineLike, on_rest: Callable[[], None]
    ) -> None:
        self._info = info
        self._on_rest = on_rest
        self._secret = secret
        self._host = host
        self._engine = engine
        self._ready = threading.Event()
        self.port = 0
        self.engine_loop: EngineLoop
        threading.Thread(target=self._run, name="peer-stream", daemon=True).start()
        if not self._ready.wait(self.START_TIMEOUT_S):
            raise GroupUnavailable(f"the stream of {info.address.peer} did not open on {host}")

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception as error:  # noqa: BLE001  whatever it is, the process ends
            _log.exception("peer_stream_failed")
            exit_process(f"peer stream: {error}")

    async def _serve(self) -> None:
        hub = Hub(self._info, self._secret)
        self.engine_loop = EngineLoop(self._engine, hub, on_rest=self._on_rest)
        hub.bind(self.engine_loop)
        server = WireServer(self._host, hub.open_stream)
        server.start()
        self.port = server.port
        self._ready.set()
        await hub.heartbeat()


def _with_followers(channel: LeaderChannel, rank: RankLike) -> Callable[[StepPlan, list[SampleInput]], StepResult]:
    def execute(plan: StepPlan, samples: list[SampleInput]) -> StepResult:
        channel.send(plan)
        return rank.execute(plan, samples)

    return execute


def _run_follower(rank: RankLike, channel: FollowerChannel) -> None:
    """Executes the leader's plans for ever; its end, however it comes, is the end of the process."""
    reason = "the leader closed the group"
    try:
        for plan in channel.plans():
            rank.execute(plan, [])
            channel.done(plan.step)
    except Exception as error:  # noqa: BLE001  whatever it is, the process ends
        _log.exception("follower_failed")
        reason = f"{type(error).__name__}: {error}"
    exit_process(reason)


def _watch_parent() -> None:
    """Ends this process when its raylet has been gone for `ORPHAN_GRACE_S`: no orphan holds a device."""
    parent, never = os.getppid(), threading.Event()
    while os.getppid() == parent:
        never.wait(PARENT_CHECK_S)
    never.wait(ORPHAN_GRACE_S)
    exit_process("the raylet is gone")


def launch_name(secret: str) -> str:
    """Tells launches on one machine apart where everybody may look, and gives nothing of the secret away."""
    return tag(secret.encode(), b"launch")[:4].hex()


def _resolve(path: str) -> Any:
    """`module:name`. Imported only here, in the process that computes: the gateway never imports torch."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def _node_address() -> str:
    import ray

    address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return address
