"""Keeps every group of the deployment alive: starts it, watches it, replaces it under a new epoch.

    ┌─▶ start (reserve, load, links, stream) ──▶ live ──▶ dead ─┐   death: a rank's process ended, the stream broke,
    │                                                             │   or no frame came for `dead_after_s`
    └──────────── after a bounded, growing pause, next epoch ◀────┘

Groups are added, ended and replaced while it runs; nobody else restarts then.

A group that is silent for a moment is not dead: the registry stops routing to it until it speaks again. A group that
cannot be loaded because of the caller's own fault (model, options) is not tried again: `run` raises that error, or
`add`.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
import structlog

from kvferry.cluster import messages as m
from kvferry.cluster.config import GroupSpec, Role
from kvferry.cluster.peer_stream import RemoteGroup
from kvferry.cluster.topology import Allotment
from kvferry.cluster.wire import Dial, dial_tcp
from kvferry.runtime.errors import FatalError, GroupUnavailable, KvferryError, NotFound, TransientError
from kvferry.runtime.ids import Epoch, GroupId, Peer

_log = structlog.get_logger(__name__)

OnProgress = Callable[[float], None]


class SupervisorPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """How patient the supervisor is."""

    dead_after_s: float = 20.0
    """A group that sends no frame for so long is killed and replaced."""
    connect_timeout_s: float = 20.0
    first_pause_s: float = 0.2
    max_pause_s: float = 30.0
    healthy_after_s: float = 60.0
    """A group that lived so long starts with the shortest pause again."""
    max_first_starts: int = 3
    """A group that has never lived is given up after so many tries; the launch fails if a role has no other."""


class Incarnation(Protocol):
    """A started group."""

    target: str
    """Of the leader's stream."""

    async def wait_dead(self) -> str:
        """Returns why, once any of its ranks has died."""

    async def kill(self) -> None:
        """Ends all its processes, also when the caller is cancelled meanwhile. Safe to call more than once."""


class Launcher(Protocol):
    async def allot(self, specs: Sequence[GroupSpec]) -> list[Allotment]:
        """What further groups may have beside those that run. Raises `ResourceMissing` at once."""

    async def start(self, allotment: Allotment, epoch: Epoch, on_progress: OnProgress) -> Incarnation:
        """Returns when the group's stream is open; leaves nothing behind when it raises."""


class Observer(Protocol):
    """The gateway: told of everything, on the event loop."""

    def group_starting(self, spec: GroupSpec, epoch: Epoch) -> None: ...
    def group_progress(self, group: GroupId, share: float) -> None: ...
    def group_up(self, port: RemoteGroup) -> None: ...
    def group_down(self, peer: Peer, reason: str) -> None:
        """Also for an incarnation that was never up. Tells the other groups, so that their links do not wait."""

    def group_ended(self, peer: Peer, out_of_service: bool) -> None:
        """As `group_down`, on purpose. `out_of_service`: its place stays, and nobody is in it."""

    def on_frame(self, port: RemoteGroup, frame: m.StepFrame) -> None: ...


class Place:
    """A place in the deployment, filled with one incarnation after another by its task."""

    def __init__(self, allotment: Allotment, serial: int, initial: bool) -> None:
        self.allotment = allotment
        self.serial = serial
        """Of its group, among the groups that there have ever been."""
        self.initial = initial
        """If it never lives, the whole launch has failed."""
        self.leaving = False
        """Not to be filled again."""
        self.epoch: Epoch | None = None
        """Of its present incarnation."""
        self.up: asyncio.Future[Peer] = asyncio.get_running_loop().create_future()
        """Its first one lives."""
        self.task: asyncio.Task[None]

    @property
    def spec(self) -> GroupSpec:
        return self.allotment.spec

    @property
    def group(self) -> GroupId:
        return self.allotment.spec.group


class Supervisor:
    """Owns the groups' processes and streams. Use: `run()` in a task; cancel it to end all groups.

    What changes its places is for one caller at a time, while `run` runs.
    """

    def __init__(
        self,
        allotments: Sequence[Allotment],
        launcher: Launcher,
        observer: Observer,
        *,
        secret: str,
        gateway: str,
        policy: SupervisorPolicy | None = None,
        dial: Dial = dial_tcp,
    ) -> None:
        self._allotments = allotments
        self._tasks = asyncio.TaskGroup()
        self._places: list[Place] = []
        self._serials = itertools.count()
        self._launcher = launcher
        self._observer = observer
        self._secret = secret
        self._gateway = gateway
        self._policy = policy or SupervisorPolicy()
        self._dial = dial
        self._epochs = itertools.count(1)
        self._live: dict[Peer, RemoteGroup] = {}
        self._has_served = False
        self._changed = asyncio.Event()

    @property
    def live(self) -> list[RemoteGroup]:
        return list(self._live.values())

    async def run(self) -> None:
        """Returns never. Raises the `KvferryError` that makes the deployment impossible."""
        try:
            async with self._tasks:
                for allotment in self._allotments:
                    self._fill(allotment, next(self._serials), initial=True)
                await asyncio.get_running_loop().create_future()  # until cancelled, or until a group cannot be kept
        except* KvferryError as failures:
            raise first_leaf(failures) from None

    async def usable(self) -> None:
        """Returns once each role of the deployment has a live group."""
        while not self._serves():
            self._changed.clear()
            await self._changed.wait()

    def _serves(self) -> bool:
        roles = {allotment.spec.group: allotment.spec.role for allotment in self._allotments}
        return set(roles.values()) <= {roles.get(peer.group) for peer in self._live}

    # ------------------------------------------------------------ changes
    def places(self) -> list[Place]:
        """Those that are kept filled, oldest group first."""
        return sorted((place for place in self._places if not place.leaving), key=lambda place: place.serial)

    def find(self, group: GroupId) -> Place:
        """Raises `NotFound`."""
        for place in self.places():
            if place.group == group:
                return place
        raise NotFound(f"group {group}: there is none of that name; see `kvferry status`")

    async def allot(self, specs: Sequence[GroupSpec]) -> list[Allotment]:
        """Raises `ResourceMissing` at once when there is no room for them."""
        return await self._launcher.allot(specs) if specs else []

    async def add(self, allotment: Allotment, successor_of: Place | None = None) -> Peer:
        """Returns once the new group lives; from then on it is kept alive. Raises what made its start fail."""
        serial = next(self._serials) if successor_of is None else successor_of.serial
        place = self._fill(allotment, serial, initial=False)
        try:
            return await asyncio.shield(place.up)
        except BaseException:
            await self.end(place)
            raise

    def hold(self, place: Place) -> None:
        """Who is there is not replaced if it dies; followed by `end`, or by `release`."""
        place.leaving = True

    def release(self, place: Place) -> None:
        place.leaving = False
        if place.task.done() and not place.task.cancelled():  # it died meanwhile
            self._places.remove(place)
            self._fill(place.allotment, place.serial, initial=False)

    async def end(self, place: Place, out_of_service: bool = False) -> None:
        """Ends a place and who is in it: all its processes are gone on return."""
        place.leaving = True
        if place.epoch is not None:
            self._observer.group_ended(Peer(place.group, place.epoch), out_of_service)
        place.task.cancel()
        await asyncio.gather(place.task, return_exceptions=True)
        self._places.remove(place)

    def set_role(self, place: Place, role: Role) -> None:
        """Of who comes next; who is there keeps its cache, and `Registry.set_role` tells the router."""
        spec = msgspec.structs.replace(place.allotment.spec, role=role)
        place.allotment = msgspec.structs.replace(place.allotment, spec=spec)

    # ------------------------------------------------------------ a place
    def _fill(self, allotment: Allotment, serial: int, initial: bool) -> Place:
        place = Place(allotment, serial, initial)
        self._places.append(place)
        place.task = self._tasks.create_task(self._keep(place), name=f"keep-{place.group}")
        return place

    async def _keep(self, place: Place) -> None:
        try:
            await self._keep_filled(place)
        except FatalError:
            raise
        except KvferryError as error:
            if place.initial:
                raise
            if not place.up.done():
                place.up.set_exception(error)
        finally:
            if not place.up.done():
                place.up.set_exception(GroupUnavailable(f"group {place.group} was ended before it lived"))
            place.up.exception()  # nobody may be waiting

    async def _keep_filled(self, place: Place) -> None:
        """Returns when the place is left. Raises what makes it hopeless: it has never lived and will not."""
        policy, clock = self._policy, asyncio.get_running_loop().time
        pause_s = policy.first_pause_s
        for num_tries in itertools.count(1):
            place.epoch, begin = Epoch(next(self._epochs)), clock()
            peer = Peer(place.group, place.epoch)
            self._observer.group_starting(place.spec, place.epoch)
            try:
                reason = await self._live_once(place, peer)
            except FatalError:
                raise
            except KvferryError as error:
                reason = str(error)
                self._observer.group_down(peer, reason)
                # Bad luck of one group at the start does not end a deployment that has served without it.
                luckless = num_tries >= policy.max_first_starts and not (place.initial and self._has_served)
                if (luckless or not isinstance(error, TransientError)) and not place.up.done():
                    raise
            _log.warning("group_died", peer=str(peer), reason=reason)
            if place.leaving:
                return
            pause_s = policy.first_pause_s if clock() - begin > policy.healthy_after_s else pause_s
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, policy.max_pause_s)

    async def _live_once(self, place: Place, peer: Peer) -> str:
        """From start to death; returns the reason. Raises what `Launcher.start` raises, `GroupUnavailable`."""
        group, observer = peer.group, self._observer
        incarnation = await self._launcher.start(
            place.allotment, peer.epoch, lambda share: observer.group_progress(group, share)
        )
        try:
            down: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            port = await RemoteGroup.connect(
                incarnation.target,
                self._secret,
                self._gateway,
                observer.on_frame,
                lambda _port, reason: None if down.done() else down.set_result(f"its stream ended: {reason}"),
                self._policy.connect_timeout_s,
                self._dial,
            )
            try:
                self._up(place, port)
                reason = await self._watch(incarnation, port, down)
                observer.group_down(peer, reason)
            finally:
                self._live.pop(peer, None)
                await port.close()
            return reason
        finally:
            await incarnation.kill()

    def _up(self, place: Place, port: RemoteGroup) -> None:
        self._observer.group_up(port)
        self._live[port.peer] = port
        self._has_served = self._has_served or self._serves()
        self._changed.set()
        if not place.up.done():
            place.up.set_result(port.peer)
        _log.info("group_up", peer=str(port.peer), role=port.info.role, pids=port.info.pids)

    async def _watch(self, incarnation: Incarnation, port: RemoteGroup, down: asyncio.Future[str]) -> str:
        dead = asyncio.ensure_future(incarnation.wait_dead())
        silent = asyncio.ensure_future(self._silence(port))
        watches = (dead, down, silent)
        try:
            done, _ = await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
            return next(watch for watch in watches if watch in done).result()
        finally:
            for watch in watches:
                watch.cancel()
            await asyncio.gather(*watches, return_exceptions=True)

    async def _silence(self, port: RemoteGroup) -> str:
        limit_s = self._policy.dead_after_s
        left_s = limit_s
        while left_s > 1e-3:  # less is rounding, and a sleep of that may end at the very same instant for ever
            await asyncio.sleep(left_s)
            left_s = limit_s - port.silent_s()
        return f"it has sent nothing for {limit_s} s"


def first_leaf(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first of a group's errors that is no group."""
    first = failures.exceptions[0]
    return first_leaf(first) if isinstance(first, BaseExceptionGroup) else first
