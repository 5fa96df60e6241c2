"""From what a deployment wants to what each group gets: threads and CPU shares, checked against the nodes at hand."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvferry.cluster.config import GroupSpec
from kvferry.runtime.errors import ResourceMissing

MIN_CPU_SHARE = 0.1
"""Of Ray's CPU count, per rank. Ranks may share cores (on a laptop they must); this only keeps them countable."""
SPARE = 0.2
"""Share of each node that a launch leaves unreserved, so that groups can be added and restarted later."""


class Allotment(msgspec.Struct, frozen=True, kw_only=True):
    """One group with what each of its ranks may use."""

    spec: GroupSpec
    threads: int | None
    """CPU threads of one rank; `None`: as many as neighbours leave idle."""
    cpus: float
    """What one rank reserves of its Ray node."""


def threads_per_rank(num_ranks: int, nodes: Sequence[float]) -> int:
    """An even share of all cores, at most one node's; threads that outnumber cores only wait for each other."""
    return max(1, min(int(max(nodes)), int(sum(nodes)) // num_ranks))


def allot(groups: Sequence[GroupSpec], threads: int | None, nodes: Sequence[float]) -> list[Allotment]:
    """`nodes`: free CPUs of each Ray node. Each group lies on one node.

    Reserves as many CPUs as threads (`None`: an even share) where all groups fit so beside `SPARE`, less where they
    must share cores. Raises `ResourceMissing` when even `MIN_CPU_SHARE` per rank does not fit.
    """
    if not nodes or max(nodes) <= 0:
        raise ResourceMissing("the Ray cluster has no node with a free CPU; start one, or leave --ray-address out")
    num_ranks = sum(group.tp_size for group in groups)
    share = threads or threads_per_rank(num_ranks, nodes)
    usable = [node * (1 - SPARE) for node in nodes]
    even = int(sum(usable) / num_ranks * 10) / 10
    missing = groups[0]
    for cpus, room in ((float(share), usable), (min(float(share), even), usable), (MIN_CPU_SHARE, nodes)):
        homeless = _first_that_does_not_fit(groups, cpus, room)
        if homeless is None:
            return [Allotment(spec=group, threads=threads, cpus=cpus) for group in groups]
        missing = homeless
    raise ResourceMissing(
        f"group {missing.group} does not fit: its {missing.tp_size} ranks need {missing.tp_size * MIN_CPU_SHARE:.1f} "
        f"CPUs on one node; the nodes have {', '.join(f'{node:g}' for node in nodes)} for {num_ranks} ranks in all. "
        "Add nodes, or ask for fewer or smaller groups"
    )


def _first_that_does_not_fit(groups: Sequence[GroupSpec], cpus: float, nodes: Sequence[float]) -> GroupSpec | None:
    """Largest groups first, each on the node with the most left."""
    left = list(nodes)
    for group in sorted(groups, key=lambda g: -g.tp_size):
        roomiest = max(range(len(left)), key=left.__getitem__)
        need = group.tp_size * cpus
        if cpus <= 0 or left[roomiest] < need - 1e-9:
            return group
        left[roomiest] -= need
    return None
