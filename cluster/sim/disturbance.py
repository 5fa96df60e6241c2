"""Brings a scenario's faults about, each at its moment, and takes them back in the end."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvferry.cluster.operations import ROLES
from kvferry.cluster.service import Drain, Operation, Restart, Scale, SetRole
from kvferry.cluster.sim import checks
from kvferry.cluster.sim.faults import Fault
from kvferry.cluster.sim.gateway import SimGateway
from kvferry.cluster.sim.group import SimGroup
from kvferry.runtime.errors import KvferryError

if TYPE_CHECKING:
    from kvferry.cluster.sim.world import World

MAX_GATEWAYS = 6
GRACE_S = 0.4
"""For the end of a stream to be heard of, and for a step; less than a lease."""


class Disturbance:
    """A fault without anything to befall is not observed, and not counted."""

    def __init__(self, world: World, faults: Sequence[Fault]) -> None:
        self._world = world
        self._trace = world.trace
        self._loop = asyncio.get_running_loop()
        self._timed = sorted((f for f in faults if f.at_s is not None), key=lambda f: f.at_s or 0.0)
        self._counted = [f for f in faults if f.at_event is not None]
        self._over = False
        for fault in faults:
            if fault.at_s is None and fault.at_event is None:
                self._trace.note("condition", fault)
        if world.max_skew_ns:
            self._trace.fault("clock skew")

    async def run(self, begin: float) -> None:
        """Returns after the last timed fault."""
        for fault in self._counted:
            self._trace.at_event(fault.at_event or 0, functools.partial(self._strike, fault))
        for fault in self._timed:
            await asyncio.sleep(max(0.0, begin + (fault.at_s or 0.0) - self._loop.time()))
            self._strike(fault)

    def end(self) -> None:
        """No more faults, and those that last are over."""
        self._over = True
        for group in self._world.live_groups():
            group.slow = 1.0
            group.links.be_quiet()
            if group.process.stopped:
                group.go_on()
        for gateway in self._world.live_gateways():
            gateway.be_quiet()

    def _strike(self, fault: Fault) -> None:
        if self._over:
            return
        groups, gateways = self._world.live_groups(), self._world.live_gateways()
        group = groups[fault.which % len(groups)] if groups else None
        gateway = gateways[(fault.which >> 4) % len(gateways)]
        if fault.kind == "gateway death":
            self._kill_gateway(fault)
        elif fault.kind in ("drain", "scale up", "scale down", "role change", "rolling restart"):
            self._world.create_task(self._operate(fault), f"operation {fault.kind}")
        elif group is not None:
            self._strike_group(fault, group, gateway)

    def _strike_group(self, fault: Fault, group: SimGroup, gateway: SimGateway) -> None:
        match fault.kind:
            case "group death":
                self._trace.fault("group death", group.peer)
                group.process.end()
            case "rank death":
                if group.shape.tp_size > 1:
                    self._trace.fault("rank death", group.peer)
                    group.process.stop()  # a step waits for the lost rank until the leader hears of its end
                    self._loop.call_later(fault.amount * 0.05, group.process.end)
            case "stream cut":
                for stream in self._world.network.between(gateway.process, group.process):
                    self._trace.fault("stream cut", gateway.name, group.peer)
                    stream.break_off("cut")
            case "link cut":
                for peer in group.links.peers():
                    if group.links.cut(peer, "cut"):
                        self._trace.fault("link cut", group.peer, peer)
            case "stop":
                self._stop(group, fault.amount)
            case "slow worker":
                group.slow = fault.amount
                self._loop.call_later(1.0, setattr, group, "slow", 1.0)
            case "slow gateway":
                for stream in self._world.network.between(gateway.process, group.process):
                    self._trace.fault("slow gateway", gateway.name, group.peer)
                    stream.down.stalled_until = self._loop.time() + fault.amount

    def _stop(self, group: SimGroup, seconds: float) -> None:
        def go_on() -> None:
            if group.process.alive and group.process.stopped:
                self._trace.fault("went on", group.peer)
                group.go_on()

        if not group.process.stopped:
            self._trace.fault("stop", group.peer)
            group.process.stop()
            self._loop.call_later(seconds, go_on)

    # ------------------------------------------------------------ membership
    def _kill_gateway(self, fault: Fault) -> None:
        """The first one owns the supervisor: with it the deployment would end."""
        gateways = self._world.live_gateways()[1:]
        if not gateways:
            return
        gateway = gateways[fault.which % len(gateways)]
        self._trace.fault("gateway death", gateway.name, gateway.coordinator.in_flight)
        gateway.die()
        self._loop.call_later(GRACE_S, self._check_clean_of, gateway)
        if len(self._world.gateways) < MAX_GATEWAYS:
            self._loop.call_later(0.05, self._new_gateway)

    def _check_clean_of(self, gateway: SimGateway) -> None:
        for finding in checks.of_dead_gateway(gateway, self._world.live_groups()):
            self._trace.failed(finding)

    def _new_gateway(self) -> None:
        if not self._over:
            self._world.add_gateway()

    async def _operate(self, fault: Fault) -> None:
        """One of an operator's changes; that it is refused is no failure."""
        operation = self._operation(fault)
        if operation is None:
            return
        try:
            done = await self._world.operations.run(operation)
        except KvferryError as error:
            self._trace.note("operation refused", fault.kind, error.label)
            return
        self._trace.fault(fault.kind, len(done.started), len(done.ended))
        self._trace.observed["sequence moved while it ran"] += done.num_moved
        if fault.kind == "drain":
            await self._bring_back()

    async def _bring_back(self) -> None:
        with contextlib.suppress(KvferryError):  # a later operation may be under way
            await self._world.operations.run(Restart(timeout_s=1.0))

    def _operation(self, fault: Fault) -> Operation | None:
        places = self._world.supervisor.places()
        if not places:
            return None
        place = places[fault.which % len(places)]
        role = place.spec.role
        there = sum(p.spec.role == role for p in places)
        match fault.kind:
            case "drain":
                return Drain(group=place.group, timeout_s=fault.amount)
            case "role change":
                return SetRole(group=place.group, role=ROLES[(fault.which >> 4) % len(ROLES)])
            case "rolling restart":
                return Restart(timeout_s=fault.amount)
            case _:
                number = max(0, there + (1 if fault.kind == "scale up" else -1))
                counts = {role: number}
                return Scale(
                    prefill=counts.get("prefill"),
                    decode=counts.get("decode"),
                    mixed=counts.get("mixed"),
                    timeout_s=fault.amount,
                )
