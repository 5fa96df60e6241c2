"""Starts a deployment: checks first, then Ray, the groups, the door; and ends all of it again.

    check model, sizes, port, tokenizer ─▶ Ray ─▶ groups (in parallel) ─▶ health says SERVING ─▶ … ─▶ close

What is wrong with the options is found before anything is started. `serve` is what the command line calls;
`start_cluster` gives the same to programs and tests.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from types import TracebackType
from typing import Any

import msgspec
import psutil
import structlog

import kvferry.cluster.grpc_env  # noqa: F401  before gRPC is imported
from kvferry.cluster.api.grpc import ApiServer, make_server
from kvferry.cluster.collector import settle_collector
from kvferry.cluster.config import ServeConfig
from kvferry.cluster.gateway import Gateway
from kvferry.cluster.operations import Operations
from kvferry.cluster.orphans import OwnRay
from kvferry.cluster.ray_start import connect, disconnect
from kvferry.cluster.start_checks import check_group, checked
from kvferry.cluster.supervisor import Supervisor, SupervisorPolicy, first_leaf
from kvferry.cluster.topology import allot
from kvferry.runtime.errors import Cancelled, KvferryError, ResourceMissing
from kvferry.runtime.ids import GroupId
from kvferry.runtime.model.files import ModelFiles, resolve_model
from kvferry.runtime.text.tokenizer import load_tokenizer

GRACE_S = 2.0
"""For what is still being sent to clients at the very end."""
CLOSE_TIMEOUT_S = 20.0
RAY_LOST_GRACE_S = 3.0
"""Of `serve`, once Ray has died, to end in good order: calls to a dead Ray may hang."""
LOOPBACK = "127.0.0.1"

_log = structlog.get_logger(__name__)


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """Which classes a worker is made of, as `module:name`; tests put toys in their place."""

    rank_class: str = "kvferry.runtime.rank:Rank"
    engine_class: str = "kvferry.runtime.engine:Engine"


class RunningCluster:
    """A deployment in this process. All of it lives in one task, so it can be closed from any other."""

    def __init__(
        self,
        config: ServeConfig,
        files: ModelFiles,
        policy: SupervisorPolicy | None,
        parts: Parts,
        on_connected: Callable[[], None],
        on_ray_lost: Callable[[], None],
    ) -> None:
        self._config = config
        self._files = files
        self._policy = policy
        self._parts = parts
        self._on_connected = on_connected
        self._on_ray_lost = on_ray_lost
        self._closing = asyncio.Event()
        self._drain_s = 0.0
        self._usable = asyncio.get_running_loop().create_future()
        self.target = ""
        self.gateway: Gateway
        self.supervisor: Supervisor
        self._task = asyncio.create_task(self._run(), name="cluster")
        self._task.add_done_callback(self._on_end)

    @property
    def closing(self) -> bool:
        return self._closing.is_set()

    async def usable(self) -> None:
        """Returns once each role has a live group. Raises what made the start fail; `Cancelled` after `close`."""
        await asyncio.shield(self._usable)

    async def ended(self) -> None:
        """Returns after `close`. Raises what ended the deployment."""
        await asyncio.shield(self._task)

    def begin_close(self, drain_s: float = 0.0) -> None:
        """The start of `close`, for signal handlers. New requests are refused; those that run have `drain_s` to end."""
        self._drain_s = drain_s
        self._closing.set()

    async def close(self) -> None:
        """Ends everything, within `CLOSE_TIMEOUT_S`. Safe to call more than once. Raises what `ended` does."""
        self.begin_close()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self.ended()
        except TimeoutError:
            self._task.cancel()
            raise

    def loading(self) -> list[tuple[GroupId, float]]:
        return self.gateway.loading() if self.target else []

    async def __aenter__(self) -> RunningCluster:
        return self

    async def __aexit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        await self.close()

    def _on_end(self, task: asyncio.Task[None]) -> None:
        if self._usable.done():
            return
        error = None if task.cancelled() else task.exception()
        self._usable.set_exception(error or Cancelled("the deployment was closed before it was usable"))
        self._usable.exception()  # nobody may be waiting

    async def _run(self) -> None:
        try:
            await self._check_and_serve()
        except* KvferryError as failures:
            raise first_leaf(failures) from None

    async def _check_and_serve(self) -> None:
        self._config, spec = await asyncio.to_thread(checked, self._config, self._files)
        config = self._config
        async with contextlib.AsyncExitStack() as stack:
            self.gateway = await stack.enter_async_context(Gateway(config, self._files.name, spec))
            server = make_server(self.gateway, config.host, config.port, config.server)
            stack.push_async_callback(server.stop, GRACE_S)
            if config.metrics_port is not None:
                stop_metrics = self.gateway.metrics.serve(config.host, config.metrics_port)
                stack.push_async_callback(asyncio.to_thread, stop_metrics)
            self.target = f"{config.host}:{server.port}"
            self.gateway.set_tokenizer(await asyncio.to_thread(load_tokenizer, self._files))
            own_ray = OwnRay() if config.ray_address is None else None
            nodes = await stack.enter_async_context(_ray(config, own_ray))
            self._on_connected()
            await server.start()
            self.supervisor = self._supervise(nodes)
            operations = Operations(config, self.gateway, self.supervisor, partial(check_group, config.engine, spec))
            stack.push_async_callback(operations.close)
            self.gateway.operator = operations
            await self._until_closed(server, own_ray)

    def _supervise(self, nodes: list[float]) -> Supervisor:
        from kvferry.cluster.ray_groups import RayLauncher, RayOptions

        config, secret = self._config, secrets.token_hex(16)
        options = RayOptions(
            model=self._files.path,
            engine=config.engine,
            secret=secret,
            host=LOOPBACK if config.ray_address is None else None,
            log_json=config.log_json,
            rank_class=self._parts.rank_class,
            engine_class=self._parts.engine_class,
        )
        allotments = allot(config.groups(), config.engine.threads, nodes)
        name = f"gateway-{os.getpid()}"
        return Supervisor(
            allotments,
            RayLauncher(options, allotments[0].cpus),
            self.gateway,
            secret=secret,
            gateway=name,
            policy=self._policy,
        )

    async def _until_closed(self, server: ApiServer, own_ray: OwnRay | None) -> None:
        """Raises what made the supervisor give up, and `ResourceMissing` when our Ray has died."""
        supervise = asyncio.create_task(self.supervisor.run(), name="supervisor")
        announce = asyncio.create_task(self._announce(server), name="announce")
        close = asyncio.create_task(self._closing.wait(), name="close")
        lost = asyncio.create_task(self._ray_lost(own_ray), name="ray")
        others: list[asyncio.Task[Any]] = [announce, close, lost]
        try:
            await asyncio.wait((supervise, close, lost), return_when=asyncio.FIRST_COMPLETED)
            announce.cancel()
            server.set_ready(False)
            self.gateway.coordinator.close_door()
            idle = asyncio.create_task(self.gateway.coordinator.idle(), name="idle")
            others.append(idle)
            if not supervise.done() and not lost.done():
                left_s = self._drain_s if self._usable.done() else 0.0
                await asyncio.wait((supervise, idle, lost), timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            for task in (supervise, lost):
                if task.done():
                    task.result()
        finally:
            for task in (supervise, *others):
                task.cancel()
            await asyncio.gather(supervise, *others, return_exceptions=True)

    async def _ray_lost(self, own_ray: OwnRay | None) -> None:
        if own_ray is None:  # somebody else's cluster
            await self._closing.wait()
            return
        daemon = await own_ray.lost()
        self._on_ray_lost()
        await asyncio.to_thread(own_ray.kill)
        raise ResourceMissing(f"Ray's {daemon} has died, and all workers with it; start kvferry again")

    async def _announce(self, server: ApiServer) -> None:
        await self.supervisor.usable()
        registry = self.gateway.registry

        def follow(*_change: Any) -> None:
            server.set_ready(bool(registry.routable()) and not self.closing)

        registry.listen(follow)
        follow()
        self._usable.set_result(None)


async def start_cluster(
    config: ServeConfig,
    *,
    policy: SupervisorPolicy | None = None,
    parts: Parts | None = None,
    on_connected: Callable[[], None] = lambda: None,
    on_ray_lost: Callable[[], None] = lambda: None,
) -> RunningCluster:
    """Returns at once; see `RunningCluster.usable`. Use as an async context manager, or `close` it.

    `on_connected` is called once Ray runs, which puts its own signal handlers in place; `on_ray_lost` when a Ray of
    our own has died: the deployment ends, and may hang on the way.

    Raises `NotFound` and `UnsupportedModel` for what is no model.
    """
    files = await asyncio.to_thread(resolve_model, config.model)
    return RunningCluster(config, files, policy, parts or Parts(), on_connected, on_ray_lost)


@contextlib.asynccontextmanager
async def _ray(config: ServeConfig, own: OwnRay | None) -> AsyncIterator[list[float]]:
    """A connection to Ray; yields the CPUs of each node."""
    try:
        yield await asyncio.to_thread(connect, config.ray_address, own, config.log_json)
    finally:
        await asyncio.to_thread(disconnect)
        if own is not None:
            await asyncio.to_thread(own.close)


def serve(config: ServeConfig, *, parts: Parts | None = None) -> None:
    """Serves until SIGINT or SIGTERM. Raises the `KvferryError` that prevents it."""
    asyncio.run(_serve(config, parts))


async def _serve(config: ServeConfig, parts: Parts | None) -> None:
    begin, loop = time.monotonic(), asyncio.get_running_loop()
    connected = False

    def on_ray_lost() -> None:
        _log.error("ray_died")
        loop.call_later(RAY_LOST_GRACE_S, os._exit, 1)

    def on_signal() -> None:
        if cluster.closing:  # asked twice: at once
            _kill_children()
            os._exit(130)
        _log.info("stopping", at_most_s=config.drain_s)
        if not connected:  # Ray's start cannot be interrupted, and nothing of ours runs yet
            _kill_children()
            os._exit(0)
        cluster.begin_close(config.drain_s)
        loop.call_later(config.drain_s + CLOSE_TIMEOUT_S, os._exit, 1)

    def listen() -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, on_signal)

    def on_connected() -> None:
        nonlocal connected
        connected = True
        listen()

    async with await start_cluster(config, parts=parts, on_connected=on_connected, on_ray_lost=on_ray_lost) as cluster:
        listen()
        show = asyncio.create_task(_show_progress(cluster))
        try:
            await cluster.usable()
        except Cancelled:
            return
        finally:
            show.cancel()
            await asyncio.gather(show, return_exceptions=True)
        settle_collector()
        _log.info("serving", target=cluster.target, model=config.model, after_s=round(time.monotonic() - begin, 1))
        await cluster.ended()


def _kill_children() -> None:
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            child.kill()


async def _show_progress(cluster: RunningCluster) -> None:
    """A bar per group on a terminal, until cancelled."""
    if not sys.stderr.isatty():
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("loading {task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks: dict[str, Any] = {}
        while True:
            for group, share in cluster.loading():
                if group not in tasks:
                    tasks[group] = bars.add_task(group, total=1.0)
                bars.update(tasks[group], completed=share)
            await asyncio.sleep(0.1)
