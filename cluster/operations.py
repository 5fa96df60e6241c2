"""Changes of a deployment while it serves: drain, scale, role change, rolling restart.

    one group leaves:  empty (its sequences go on elsewhere) ──▶ its processes end
    drain      leaves
    scale      new groups start, then surplus ones leave, the newest first
    restart    for each group: its successor starts, then it leaves; where there is no room for both, first it leaves

One operation at a time. It runs in a task of its own, so that a caller who goes away does not leave it half done; each
of its waits is bounded: a start by the launcher, a group's leaving by the operation's `timeout_s`.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, get_args

import msgspec
import structlog

from kvferry.cluster.config import MAX_GROUPS, GroupSpec, Role, ServeConfig
from kvferry.cluster.coordinator import Coordinator
from kvferry.cluster.registry import Registry
from kvferry.cluster.service import Drain, Operation, OperationView, Restart, Scale, SetRole
from kvferry.cluster.supervisor import Place, Supervisor
from kvferry.cluster.topology import Allotment
from kvferry.runtime.config import check_range
from kvferry.runtime.errors import GroupUnavailable, InvalidArgument, QueueFull, ResourceMissing
from kvferry.runtime.ids import GroupId, Peer

MAX_DRAIN_S = 3600.0
ROLES: tuple[Role, ...] = get_args(Role)

_log = structlog.get_logger(__name__)


class Gateway(Protocol):
    """The part of `gateway.Gateway` that is used here."""

    registry: Registry
    coordinator: Coordinator

    def set_role(self, peer: Peer, role: Role) -> None: ...


class _Report(msgspec.Struct, kw_only=True):
    started: list[str] = []
    ended: list[str] = []
    num_moved: int = 0
    num_rerouted: int = 0
    num_resumed: int = 0


class Operations:
    """Implements `gateway.Operator`. `check` raises for a group whose model does not fit its size."""

    def __init__(
        self, config: ServeConfig, gateway: Gateway, supervisor: Supervisor, check: Callable[[GroupSpec], None]
    ) -> None:
        self._config = config
        self._gateway = gateway
        self._supervisor = supervisor
        self._check = check
        self._drained: dict[GroupId, GroupSpec] = {}
        self._running: asyncio.Task[OperationView] | None = None

    async def run(self, operation: Operation) -> OperationView:
        """See `Service.operate`."""
        if self._running is not None and not self._running.done():
            text = f"{self._running.get_name()} is running, one at a time; see `kvferry status`, and try again later"
            raise QueueFull(text, retry_after_s=1.0)
        if not isinstance(operation, SetRole):
            check_range("timeout_s", operation.timeout_s, 1e-3, MAX_DRAIN_S)
        name = type(operation).__name__.lower()
        self._running = asyncio.create_task(self._run(operation), name=f"operation {name}")
        self._running.add_done_callback(_told)
        return await asyncio.shield(self._running)

    async def close(self) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    async def _run(self, operation: Operation) -> OperationView:
        clock, report = asyncio.get_running_loop().time, _Report()
        begin = clock()
        _log.info("operation_begins", operation=operation)
        if isinstance(operation, Drain):
            await self._drain(operation, report)
        elif isinstance(operation, Scale):
            await self._scale(operation, report)
        elif isinstance(operation, SetRole):
            self._set_role(operation)
        else:
            await self._restart(operation, report)
        view = OperationView(seconds=clock() - begin, **msgspec.structs.asdict(report))
        _log.info("operation_ended", result=view)
        return view

    # ------------------------------------------------------------ the four
    async def _drain(self, operation: Drain, report: _Report) -> None:
        if operation.group not in self._drained:
            place = self._supervisor.find(GroupId(operation.group))
            await self._take_out(place, operation.timeout_s, report, out_of_service=True)

    def _set_role(self, operation: SetRole) -> None:
        role = next((role for role in ROLES if role == operation.role), None)
        if role is None:
            raise InvalidArgument("role", operation.role, f"must be one of {', '.join(ROLES)}")
        group = GroupId(operation.group)
        if (drained := self._drained.get(group)) is not None:
            self._drained[group] = msgspec.structs.replace(drained, role=role)
            return
        place = self._supervisor.find(group)
        self._supervisor.set_role(place, role)
        if place.epoch is not None:
            self._gateway.set_role(Peer(group, place.epoch), role)

    async def _scale(self, operation: Scale, report: _Report) -> None:
        there = self._supervisor.places()
        new: list[GroupSpec] = []
        surplus: list[Place] = []
        for role, wanted in zip(ROLES, (operation.prefill, operation.decode, operation.mixed), strict=True):
            ours = [place for place in there if place.spec.role == role]
            number = len(ours) if wanted is None else wanted
            check_range(role, number, 0, MAX_GROUPS)
            surplus += ours[number:][::-1]
            new += self._new_specs(
                role, number - len(ours), [*(place.group for place in there), *(s.group for s in new)]
            )
        if len(there) + len(new) == len(surplus):
            raise InvalidArgument("prefill + decode + mixed", 0, "must be at least 1 group", "keep one of any role")
        for spec in new:
            self._check(spec)
        try:
            allotments = await self._supervisor.allot(new)
        except ResourceMissing:
            if not surplus or len(surplus) == len(there):
                raise
            await self._take_all_out(surplus, operation.timeout_s, report)
            surplus = []
            allotments = await self._supervisor.allot(new)
        await self._add(allotments, report)
        await self._take_all_out(surplus, operation.timeout_s, report)

    def _new_specs(self, role: Role, number: int, taken: Iterable[GroupId]) -> list[GroupSpec]:
        """Drained groups of that role first, then new names."""
        number = max(0, number)
        back = [spec for spec in self._drained.values() if spec.role == role][:number]
        names = {*taken, *self._drained}
        tp_size: int = getattr(self._config, f"{role}_tp")
        free = (name for i in itertools.count() if (name := GroupId(f"{role}-{i}")) not in names)
        return back + [GroupSpec(name, role, tp_size) for name in itertools.islice(free, number - len(back))]

    async def _restart(self, operation: Restart, report: _Report) -> None:
        for place in self._supervisor.places():
            await self._renew(place, operation.timeout_s, report)
        await self._add(await self._supervisor.allot(list(self._drained.values())), report)

    async def _renew(self, place: Place, timeout_s: float, report: _Report) -> None:
        try:
            (allotment,) = await self._supervisor.allot([place.spec])
        except ResourceMissing:
            await self._take_out(place, timeout_s, report, out_of_service=True)
            await self._add(await self._supervisor.allot([place.spec]), report)
            return
        self._supervisor.hold(place)
        try:
            if place.epoch is not None:
                self._gateway.registry.stay(Peer(place.group, place.epoch))
            report.started.append(str(await self._supervisor.add(allotment, successor_of=place)))
        except BaseException:
            self._supervisor.release(place)
            raise
        await self._take_out(place, timeout_s, report)

    # ------------------------------------------------------------ coming and going
    async def _add(self, allotments: Sequence[Allotment], report: _Report) -> None:
        """All at once. Raises the first failure, once the others live."""
        results = await asyncio.gather(*(self._supervisor.add(a) for a in allotments), return_exceptions=True)
        for allotment, result in zip(allotments, results, strict=True):
            if isinstance(result, Peer):
                self._drained.pop(allotment.spec.group, None)
                report.started.append(str(result))
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _take_all_out(self, places: Iterable[Place], timeout_s: float, report: _Report) -> None:
        for place in places:
            await self._take_out(place, timeout_s, report)

    async def _take_out(self, place: Place, timeout_s: float, report: _Report, out_of_service: bool = False) -> None:
        """Empties the group, if it lives, and ends it. Raises `GroupUnavailable` when no other could take over."""
        registry = self._gateway.registry
        self._supervisor.hold(place)
        peer = None if place.epoch is None else Peer(place.group, place.epoch)
        try:
            if peer is not None and registry.get(peer) is not None:
                done = await self._gateway.coordinator.empty(peer, timeout_s)
                report.num_moved += done.num_moved
                report.num_rerouted += done.num_rerouted
                report.num_resumed += done.num_resumed
            elif not registry.routable():
                raise GroupUnavailable(f"group {place.group} does not live, nor does any other; see `kvferry status`")
        except BaseException:
            if peer is not None:
                registry.drain(peer, False)
            self._supervisor.release(place)
            raise
        if out_of_service:
            self._drained[place.group] = place.spec
        await self._supervisor.end(place, out_of_service)
        report.ended.append(f"{place.group}@{place.epoch}")


def _told(task: asyncio.Task[OperationView]) -> None:
    """An operation that fails is logged, as its caller may have left."""
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.warning("operation_failed", operation=task.get_name(), reason=str(error))
