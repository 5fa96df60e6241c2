"""Brings a scenario's faults about, each at its moment, and takes them back in the end."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvferry.cluster.sim import checks
from kvferry.cluster.sim.faults import Fault
from kvferry.cluster.sim.gateway import SimGateway
from kvferry.cluster.sim.group import SimGroup
from kvferry.runtime.ids import Peer

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
        self._draining: dict[Peer, None] = {}
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
        for peer in list(self._draining):
            self._drain(peer, False)

    def _strike(self, fault: Fault) -> None:
        if self._over:
            return
        groups, gateways = self._world.live_groups(), self._world.live_gateways()
        group = groups[fault.which % len(groups)] if groups else None
        gateway = gateways[(fault.which >> 4) % len(gateways)]
        if fault.kind == "gateway death":
            self._kill_gateway(fault)
        elif fault.kind == "scale up":
            self._scale_up(fault)
        elif fault.kind == "scale down":
            self._scale_down(fault)
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
            case "drain":
                self._trace.fault("drain", group.peer)
                self._drain(group.peer, True)
                self._loop.call_later(fault.amount, self._drain, group.peer, False)

    def _stop(self, group: SimGroup, seconds: float) -> None:
        def go_on() -> None:
            if group.process.alive and group.process.stopped:
                self._trace.fault("went on", group.peer)
                group.go_on()

        if not group.process.stopped:
            self._trace.fault("stop", group.peer)
            group.process.stop()
            self._loop.call_later(seconds, go_on)

    def _drain(self, peer: Peer, draining: bool) -> None:
        if draining:
            self._draining[peer] = None
        else:
            self._draining.pop(peer, None)
        for gateway in self._world.live_gateways():
            gateway.registry.drain(peer, draining)

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

    def _scale_up(self, fault: Fault) -> None:
        name, role, shape = self._world.scenario.groups[fault.which % len(self._world.scenario.groups)]
        self._trace.fault("scale up", role)
        self._world.add_group(f"x{fault.which}-{name}", role, shape)

    def _scale_down(self, fault: Fault) -> None:
        """One that was added gets no new work for a while, then goes."""
        for group in self._world.live_groups():
            if group.peer.group.startswith("x"):
                self._trace.fault("scale down", group.peer)
                self._drain(group.peer, True)
                self._loop.call_later(fault.amount, group.process.end)
                return
