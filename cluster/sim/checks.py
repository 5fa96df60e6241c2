"""What must hold when a run has come to rest: nothing held, nothing owed, nobody misinformed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvferry.cluster.sim.gateway import SimGateway
from kvferry.cluster.sim.group import SimGroup

if TYPE_CHECKING:
    from kvferry.cluster.sim.world import World


def at_rest(world: World) -> Iterator[str]:
    """Findings, in words."""
    groups, gateways = world.live_groups(), world.live_gateways()
    for group in groups:
        yield from _group(group, len(gateways))
    for gateway in gateways:
        yield from _gateway(gateway, groups)
    if not world.scenario.faults and (lapsed := [g.peer for g in groups if g.num_lapsed]):
        yield f"leases lapsed on {', '.join(map(str, lapsed))} although nothing happened"
    for task in asyncio.all_tasks():
        if task.get_name().startswith(("request ", "snapshot ", "client ")):
            yield f"task '{task.get_name()}' is left"


def _group(group: SimGroup, num_gateways: int) -> Iterator[str]:
    engine, peer = group.engine, group.peer
    held = engine.audit()
    yield from (f"{peer}: {fault}" for fault in held.broken)
    for what, count in (
        ("sequences", held.sequences),
        ("incoming transfers", held.inbound),
        ("outgoing transfers", held.outbound),
        ("adopters", engine._adopters),
        ("senders", engine._senders),
        ("handed over", engine._handed_over),
    ):
        if count:
            yield f"{peer}: still holds {what}: {count}"
    if held.num_leased_blocks:
        yield f"{peer}: {held.num_leased_blocks} blocks are leased to nobody"
    if engine.has_work():
        yield f"{peer}: has work although nothing is asked of it"
    if owners := group.owners():
        yield f"{peer}: remembers the owners of {len(owners)} sequences that are over"
    if group.links.num_staged:
        yield f"{peer}: {group.links.num_staged} messages stay staged"
    if group.num_connections > num_gateways:
        yield f"{peer}: {group.num_connections} streams for {num_gateways} gateways"


def of_dead_gateway(gateway: SimGateway, groups: list[SimGroup]) -> Iterator[str]:
    """Soon after its death."""
    for group in groups:
        if group.attentive and (owned := [o for o in group.owners() if o.startswith(f"{gateway.name}#")]):
            yield f"{group.peer}: still runs {len(owned)} sequences of {gateway.name}, which is dead"


def _gateway(gateway: SimGateway, groups: list[SimGroup]) -> Iterator[str]:
    name, coordinator = gateway.name, gateway.coordinator
    if coordinator.in_flight:
        yield f"{name}: {coordinator.in_flight} requests are in flight"
    if gateway.router.num_bookings:
        yield f"{name}: {gateway.router.num_bookings} bookings are left"
    if open_ids := coordinator.open_transfers():
        yield f"{name}: transfers are open: {sorted(open_ids)}"
    try:
        coordinator.check_invariants()
    except AssertionError as error:
        yield f"{name}: {error}"
    live = {group.peer: group for group in groups}
    for member in gateway.registry.members():
        group = live.get(member.peer)
        if group is None:
            yield f"{name}: {member.peer} counts as {member.state} though it is gone"
        elif (known := gateway.index.hashes(member.peer)) != (truth := set(group.engine.cached_hashes())):
            yield f"{name}: index of {member.peer}: {len(known - truth)} too many, {len(truth - known)} missing"
