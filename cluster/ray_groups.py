"""Groups as Ray actors: one placement group (`STRICT_PACK`) and one actor per rank. The only file that calls Ray.

Ray's handles are typed loosely, hence `Any` at its border.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Sequence
from typing import Any

import msgspec
import psutil
import ray
import structlog
from ray.exceptions import RayActorError, RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from kvferry.cluster.completion import see_through
from kvferry.cluster.config import GroupSpec
from kvferry.cluster.supervisor import OnProgress
from kvferry.cluster.topology import MIN_CPU_SHARE, Allotment
from kvferry.cluster.worker import Failure, Loaded, Started, Worker, WorkerSpec
from kvferry.runtime.config import EngineConfig
from kvferry.runtime.errors import GroupUnavailable, ResourceMissing, error_of
from kvferry.runtime.ids import Epoch, Peer
from kvferry.runtime.transfer.ticket import GroupAddress

PLACE_TIMEOUT_S = 30.0
KILL_TIMEOUT_S = 15.0
TRIAL_TIMEOUT_S = 1
"""Whole seconds: Ray rounds down."""

_log = structlog.get_logger(__name__)


class RayOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What all groups of a launch share."""

    model: str
    engine: EngineConfig
    secret: str
    host: str | None
    """Where workers listen; `None`: their Ray node's address."""
    load_timeout_s: float = 600.0
    start_timeout_s: float = 60.0
    log_json: bool = False
    rank_class: str = "kvferry.runtime.rank:Rank"
    engine_class: str = "kvferry.runtime.engine:Engine"


class RayGroup:
    """The actors of one incarnation; implements `supervisor.Incarnation`."""

    def __init__(self, peer: Peer, on_this_machine: bool) -> None:
        self.peer = peer
        self.target = ""
        self._reservation: Any = None
        self.actors: list[Any] = []
        self._on_this_machine = on_this_machine
        self._processes: list[psutil.Process] = []  # each remembers its start time, so a reused pid is not hit

    async def call(self, timeout_s: float, calls: Sequence[Awaitable[Any]]) -> list[Any]:
        """Results of one call per rank. Raises `GroupUnavailable`, or what a rank reported."""
        try:
            async with asyncio.timeout(timeout_s):
                results = await asyncio.gather(*calls)
        except TimeoutError:
            raise GroupUnavailable(f"{self.peer} did not start within {timeout_s} s") from None
        except RayError as error:
            raise GroupUnavailable(f"{self.peer} did not start: {_short(error)}") from error
        for result in results:
            if isinstance(result, Failure):
                raise error_of(result.label, result.message)
        return results

    async def bring_up(self, options: RayOptions, on_progress: OnProgress) -> None:
        shares = [0.0] * len(self.actors)

        async def load(rank: int) -> Loaded | Failure:
            async for reference in self.actors[rank].load.options(num_returns="streaming").remote():
                news: float | Loaded | Failure = await reference
                if not isinstance(news, float):
                    return news
                shares[rank] = news
                on_progress(sum(shares) / len(shares))
            raise GroupUnavailable(f"{self.peer} did not start: rank {rank} has loaded nothing")

        loads = [load(rank) for rank in range(len(self.actors))]
        loaded: list[Loaded] = await self.call(options.load_timeout_s, loads)
        pids = [rank.pid for rank in loaded]
        if self._on_this_machine:
            try:
                self._processes = [psutil.Process(pid) for pid in pids]
            except psutil.Error as error:
                raise GroupUnavailable(f"{self.peer} did not start: a rank died after loading: {error}") from error
        own = GroupAddress(
            peer=self.peer,
            tp_size=len(loaded),
            fingerprint=loaded[0].fingerprint,
            ranks=[rank.address for rank in loaded],
        )
        starts = [_result(actor.start.remote(own, loaded[0], pids)) for actor in self.actors]
        started: list[Started] = await self.call(options.start_timeout_s, starts)
        self.target = started[0].target

    async def wait_dead(self) -> str:
        ends = [asyncio.ensure_future(_result(actor.wait_end.remote())) for actor in self.actors]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_EXCEPTION)
            failed = [(rank, end.exception()) for rank, end in enumerate(ends) if end.done()]
            return "; ".join(f"rank {rank}: {_short(error)}" for rank, error in failed)
        finally:
            for end in ends:
                end.cancel()
            await asyncio.gather(*ends, return_exceptions=True)

    async def reserve(self, bundles: list[dict[str, float]]) -> Any:
        """Asks for a placement group and returns it; `kill` gives it back. Raises `GroupUnavailable`."""
        try:
            await see_through(asyncio.to_thread(self._reserve, bundles), PLACE_TIMEOUT_S)
        except TimeoutError:
            raise GroupUnavailable(f"{self.peer}: Ray took no placement group within {PLACE_TIMEOUT_S:g} s") from None
        return self._reservation

    def _reserve(self, bundles: list[dict[str, float]]) -> None:
        self._reservation = placement_group(bundles, strategy="STRICT_PACK", name=str(self.peer))

    async def kill(self) -> None:
        """Also ends a stopped (SIGSTOP) process, which Ray's own kill may not, where it is on this machine."""
        try:
            await see_through(asyncio.to_thread(self._kill), KILL_TIMEOUT_S)
        except TimeoutError:
            _log.error("kill_unfinished", peer=str(self.peer), after_s=KILL_TIMEOUT_S)

    def _kill(self) -> None:
        here = ray.is_initialized()  # else calls would start a Ray, or join somebody else's
        for actor in self.actors if here else ():
            with contextlib.suppress(RayError):
                ray.kill(actor, no_restart=True)
        for process in self._processes:
            with contextlib.suppress(psutil.Error):
                process.kill()
        if here and self._reservation is not None:
            with contextlib.suppress(RayError):
                remove_placement_group(self._reservation)


class RayLauncher:
    """Implements `supervisor.Launcher`."""

    def __init__(self, options: RayOptions, cpus: float) -> None:
        """`cpus`: what a rank of a group that is added later reserves, if that is free; less, if not."""
        self._options = options
        self._cpus = cpus
        # Detached actors are not used: all of them end with this driver.
        self._actor_class: Any = ray.remote(Worker)

    async def allot(self, specs: Sequence[GroupSpec]) -> list[Allotment]:
        """Reserves all of it for a moment, which answers within milliseconds; Ray would wait for room without a word.

        Raises `ResourceMissing`.
        """
        return await asyncio.to_thread(self._allot, specs)

    def _allot(self, specs: Sequence[GroupSpec]) -> list[Allotment]:
        for cpus in (self._cpus, MIN_CPU_SHARE):
            trials = [placement_group([{"CPU": cpus}] * spec.tp_size, strategy="STRICT_PACK") for spec in specs]
            pairs = zip(specs, trials, strict=True)
            homeless = next((spec for spec, trial in pairs if not trial.wait(TRIAL_TIMEOUT_S)), None)
            for trial in trials:
                remove_placement_group(trial)
            if homeless is None:
                return [Allotment(spec=spec, threads=self._options.engine.threads, cpus=cpus) for spec in specs]
        assert homeless is not None
        raise ResourceMissing(
            f"group {homeless.group} does not fit: its {homeless.tp_size} ranks need "
            f"{homeless.tp_size * MIN_CPU_SHARE:.1f} free CPUs on one node of the Ray cluster, whose free resources "
            f"are {_free_resources()}; add nodes, or drain other groups first"
        )

    async def start(self, allotment: Allotment, epoch: Epoch, on_progress: OnProgress) -> RayGroup:
        """Raises `ResourceMissing`, `GroupUnavailable`, and what a rank's load reports."""
        peer = Peer(allotment.spec.group, epoch)
        bundles = [{"CPU": allotment.cpus}] * allotment.spec.tp_size
        group = RayGroup(peer, self._options.host is not None)
        try:
            reservation = await group.reserve(bundles)
            await self._place(allotment, reservation)
            group.actors = self._make(allotment, peer, reservation)
            await group.bring_up(self._options, on_progress)
        except BaseException:
            await group.kill()
            raise
        return group

    async def _place(self, allotment: Allotment, reservation: Any) -> None:
        # `ready()` would start a task, and with it a process; `wait` only asks.
        if not await asyncio.to_thread(reservation.wait, PLACE_TIMEOUT_S):
            spec, free = allotment.spec, await asyncio.to_thread(_free_resources)
            raise ResourceMissing(
                f"no Ray node had {spec.tp_size} x {allotment.cpus:g} free CPUs for group {spec.group} within "
                f"{PLACE_TIMEOUT_S:g} s; the cluster's free resources are {free}"
            )

    def _make(self, allotment: Allotment, peer: Peer, reservation: Any) -> list[Any]:
        options = self._options
        engine = msgspec.structs.replace(options.engine, threads=allotment.threads)
        actors = []
        for rank in range(allotment.spec.tp_size):
            spec = WorkerSpec(
                model=options.model,
                config=engine,
                peer=peer,
                role=allotment.spec.role,
                rank=rank,
                tp_size=allotment.spec.tp_size,
                secret=options.secret,
                host=options.host,
                start_timeout_s=options.start_timeout_s,
                log_json=options.log_json,
                rank_class=options.rank_class,
                engine_class=options.engine_class,
            )
            where = PlacementGroupSchedulingStrategy(reservation, placement_group_bundle_index=rank)
            actor = self._actor_class.options(
                num_cpus=allotment.cpus,
                max_restarts=0,
                scheduling_strategy=where,
                name=f"{peer}.{rank}",
            )
            actors.append(actor.remote(spec))
        return actors


def _free_resources() -> Any:
    return ray.available_resources()  # type: ignore[no-untyped-call]


async def _result(reference: Any) -> Any:
    return await reference


def _short(error: BaseException | None) -> str:
    if isinstance(error, RayActorError):
        return "its process died"
    text = str(error).strip()
    return text.splitlines()[-1] if text else type(error).__name__
