"""Allotment of groups on nodes: shares, and refusal instead of waiting for ever."""

from __future__ import annotations

import pytest

from kvferry.cluster.config import GroupSpec
from kvferry.cluster.topology import allot, threads_per_rank
from kvferry.runtime.errors import ResourceMissing
from kvferry.runtime.ids import GroupId

pytestmark = pytest.mark.core


def specs(*tp_sizes: int) -> list[GroupSpec]:
    return [GroupSpec(GroupId(f"mixed-{i}"), "mixed", tp) for i, tp in enumerate(tp_sizes)]


@pytest.mark.parametrize(
    ("num_ranks", "nodes", "threads"),
    [(2, [2.0], 1), (3, [2.0], 1), (2, [16.0], 8), (1, [8.0, 8.0], 8), (4, [8, 8], 4)],
)
def test_threads_never_outnumber_cores(num_ranks: int, nodes: list[float], threads: int) -> None:
    """Fault: ranks whose threads share cores wait for each other at every barrier."""
    assert threads_per_rank(num_ranks, nodes) == threads


@pytest.mark.parametrize("tp_sizes", [(1, 1), (2, 1), (2, 2, 1), (1,) * 8])
def test_laptop_of_two_cores_holds_every_small_deployment(tp_sizes: tuple[int, ...]) -> None:
    """Fault: a allotment group that asks for a core per rank stays pending without an error."""
    allotments = allot(specs(*tp_sizes), None, [2.0])
    assert [p.spec.tp_size for p in allotments] == list(tp_sizes)
    assert sum(p.cpus * p.spec.tp_size for p in allotments) <= 2.0
    assert all(p.cpus > 0 and p.threads is None for p in allotments)


def test_explicit_threads_win() -> None:
    assert [p.threads for p in allot(specs(1, 1), 3, [2.0])] == [3, 3]


def test_whole_cores_are_reserved_where_there_are_enough() -> None:
    assert [p.cpus for p in allot(specs(2, 2), 1, [8.0])] == [1.0, 1.0]


@pytest.mark.parametrize("nodes", [[2.0], [8.0], [8.0, 8.0]])
def test_launch_leaves_room_to_grow(nodes: list[float]) -> None:
    """Fault: all CPUs are reserved, so no group can ever be added, or restarted before its predecessor ends."""
    allotments = allot(specs(1, 1), None, nodes)
    assert sum(p.cpus for p in allotments) <= 0.8 * sum(nodes) + 1e-9


def test_group_is_never_split_over_nodes() -> None:
    """Fault: four ranks fit the sum of two nodes, but not one node; the share must shrink."""
    (allotment,) = allot(specs(4), 1, [2.0, 2.0])
    assert allotment.cpus * 4 <= 2.0


@pytest.mark.parametrize("nodes", [[], [0.0], [0.1]])
def test_what_does_not_fit_is_named(nodes: list[float]) -> None:
    """Fault: Ray would wait in silence."""
    with pytest.raises(ResourceMissing, match="node"):
        allot(specs(2), None, nodes)
