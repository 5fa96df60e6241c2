"""The faults that were done, and whether they were seen to take effect. Pure.

A signal that was sent is only an attempt. Each kind counts as observed by what the cluster, or the connection, shows:

    kill     the group is seen dead, or alive under a newer epoch
    stop     the group is seen unreachable, or it has work and none of its counters moves for `STALL_S`
    cut      the stream on that connection broke
    cancel   the server let go of the request's id long before its answer could have ended
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from kvferry.cluster.chaos.plan import PROCESS_FAULTS, FaultKind, Planned, choose
from kvferry.cluster.service import ClusterView, GroupView

LIVE, UNREACHABLE, GONE = "live", "unreachable", ("dead", "starting")
STALL_S = 1.5


class Fault(msgspec.Struct, kw_only=True, eq=False):
    """Instants are nanoseconds of one monotonic clock."""

    kind: FaultKind
    begin_ns: int
    group: str = ""
    epoch: int = 0
    rank: int = 0
    request_id: str = ""
    released_ns: int | None = None
    """When a stopped process was let go on."""
    observed_ns: int | None = None
    how: str = ""
    """How it was observed, in words."""
    end_ns: int | None = None
    """When all was as before: the group lives, the id is free."""
    _frozen: tuple[int, tuple[int, ...]] | None = None
    """Since when the group's counters have stood still, and at what."""

    def observe(self, now_ns: int, how: str) -> None:
        """The first time counts."""
        if self.observed_ns is None:
            self.observed_ns, self.how = now_ns, how

    def on_group(self, group: GroupView, now_ns: int) -> None:
        """What the cluster says about the group that was hit."""
        if self.end_ns is not None:
            return
        if group.epoch > self.epoch:
            self.observe(now_ns, f"epoch {group.epoch} after {self.epoch}")
        elif group.state in GONE:
            self.observe(now_ns, group.state)
        elif self.kind is FaultKind.STOP and self.released_ns is None:
            self._on_stopped(group, now_ns)
        if group.state == LIVE and (group.epoch > self.epoch or self._goes_on(group)):
            self.end_ns = now_ns

    def _on_stopped(self, group: GroupView, now_ns: int) -> None:
        if group.state == UNREACHABLE:
            self.observe(now_ns, UNREACHABLE)
        counters = (group.num_running, group.num_waiting, group.prompt_tokens, group.output_tokens)
        if self._frozen is None or self._frozen[1] != counters or not group.num_running:
            self._frozen = (now_ns, counters)
        elif now_ns - self._frozen[0] >= STALL_S * 1e9:
            self.observe(now_ns, "stalled")

    def _goes_on(self, group: GroupView) -> bool:
        """A stopped group lives again in its old epoch: a view taken right after SIGCONT may still be the old one."""
        return self.kind is FaultKind.STOP and self.released_ns is not None and group.epoch == self.epoch


class FaultLog:
    """All faults of a run."""

    def __init__(self) -> None:
        self.faults: list[Fault] = []
        self.skipped: dict[FaultKind, int] = {}
        """Planned, but there was nobody to hit."""

    def add(self, fault: Fault) -> Fault:
        self.faults.append(fault)
        return fault

    def skip(self, kind: FaultKind) -> None:
        self.skipped[kind] = self.skipped.get(kind, 0) + 1

    def on_view(self, view: ClusterView, now_ns: int) -> None:
        groups = {group.group: group for group in view.groups}
        for fault in self.faults:
            if fault.kind in PROCESS_FAULTS and fault.group in groups:
                fault.on_group(groups[fault.group], now_ns)

    def busy(self) -> set[str]:
        """Groups that have not got over their last fault."""
        return {fault.group for fault in self.faults if fault.kind in PROCESS_FAULTS and fault.end_ns is None}

    def close(self, now_ns: int) -> None:
        """The run is over: what has not ended lasts until now."""
        for fault in self.faults:
            if fault.end_ns is None:
                fault.end_ns = now_ns


class Victim(msgspec.Struct, frozen=True):
    group: str
    epoch: int
    rank: int
    pid: int


def choose_victim(view: ClusterView, busy: Collection[str], planned: Planned) -> Victim | None:
    """A rank of a live group, often of the busiest. `None` unless another group, if there is any, stays unhurt."""
    well = [group for group in view.groups if group.state == LIVE and group.pids and group.group not in busy]
    if len(well) < min(2, len(view.groups)):
        return None
    well.sort(key=lambda group: -group.num_running)
    group = choose(well, planned.pick**2)
    if group is None:
        return None
    rank = int(planned.pick_rank * len(group.pids))
    return Victim(group.group, group.epoch, rank, group.pids[rank])


def all_live(groups: Sequence[GroupView]) -> bool:
    return all(group.state == LIVE for group in groups)
