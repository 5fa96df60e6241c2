"""What the faults cost: numbers, verdict, and the rows of the table. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from kvferry.cluster.chaos.faults import Fault, FaultLog
from kvferry.cluster.chaos.plan import FaultKind
from kvferry.cluster.chaos.streams import Change, Fate, Outcome

MAX_SHOWN = 10
MAX_UNSTEADY = 0.25
"""Share of the cases that may be answered in two ways without any fault, by rounding."""
COLUMNS = (
    *("faults", "sent", "observed", "streams", "resumed", "failed", "changed"),
    *("gap p50", "gap p99", "total p50", "total p99"),
)
UNHURT, BASELINE = "none meanwhile", "before all faults"


class Latency(msgspec.Struct, frozen=True):
    """Seconds, over complete streams."""

    num_streams: int
    gap_p50_s: float
    gap_p99_s: float
    total_p50_s: float
    total_p99_s: float

    def above(self, other: Latency) -> Latency:
        """The differences; of nothing there are none."""
        if not self.num_streams or not other.num_streams:
            return Latency(self.num_streams, 0.0, 0.0, 0.0, 0.0)
        return Latency(
            self.num_streams,
            self.gap_p50_s - other.gap_p50_s,
            self.gap_p99_s - other.gap_p99_s,
            self.total_p50_s - other.total_p50_s,
            self.total_p99_s - other.total_p99_s,
        )


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """Of one kind of fault: of all streams that ran while one of its faults lasted."""

    kind: str
    num_sent: int = 0
    num_observed: int = 0
    num_skipped: int = 0
    num_streams: int
    num_resumed: int
    num_failed: int
    num_changed: int
    latency: Latency
    added: Latency
    """Over the time before all faults."""


class RunFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the streams and faults themselves do not tell."""

    target: str
    dtype: str
    seed: int
    num_cases: int
    seconds: float
    """Of load under faults."""
    interrupted: bool
    left_behind: list[str]
    """What the server did not let go of, and groups that did not come back."""
    findings: list[str]
    """Of the audit at the end."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    run: RunFacts
    costs: list[Cost]
    num_streams: int
    num_complete: int
    num_cancelled: int
    num_cut: int
    failures: list[str]
    changes: list[Change]
    baseline_changes: list[Change]
    """Answers that differed although nothing had been done yet; those cases were asked no more."""

    @property
    def num_observed(self) -> int:
        return sum(cost.num_observed for cost in self.costs)

    @property
    def num_unsteady(self) -> int:
        """Cases."""
        return len({change.case for change in self.baseline_changes})

    def faults(self) -> list[str]:
        """Why this is not a success; empty when it is one."""
        unsteady = self.num_unsteady if self.num_unsteady > MAX_UNSTEADY * self.run.num_cases else 0
        counts = (
            (len(self.failures), "failed streams"),
            (len(self.changes), "changed answers"),
            (unsteady, f"of {self.run.num_cases} answers that changed before any fault"),
            (len(self.run.left_behind), "things left behind"),
            (len(self.run.findings), "audit findings"),
        )
        why = [f"{count} {what}" for count, what in counts if count]
        return why if self.num_observed else [*why, "no fault was observed, so nothing is shown"]


def make_report(log: FaultLog, streams: Sequence[Outcome], baseline: Sequence[Outcome], run: RunFacts) -> Report:
    """`baseline`: streams before all faults. The log must be closed."""
    before = latency(baseline)
    costs = [_cost(kind, log, streams, before) for kind in FaultKind]
    unhurt = [s for s in streams if not any(_during(s, fault) for fault in log.faults)]
    costs = [cost for cost in costs if cost.num_sent or cost.num_skipped]
    costs.append(_summary(UNHURT, unhurt, before))
    costs.append(_summary(BASELINE, baseline, before))
    fates = [stream.fate for stream in streams]
    return Report(
        run=run,
        costs=costs,
        num_streams=len(streams),
        num_complete=fates.count(Fate.COMPLETE),
        num_cancelled=fates.count(Fate.CANCELLED),
        num_cut=fates.count(Fate.CUT),
        failures=[f"{s.request_id}: {s.error}" for s in (*baseline, *streams) if s.fate is Fate.FAILED],
        changes=[stream.change for stream in streams if stream.change is not None],
        baseline_changes=[stream.change for stream in baseline if stream.change is not None],
    )


def latency(streams: Iterable[Outcome]) -> Latency:
    whole = [stream for stream in streams if stream.fate is Fate.COMPLETE]
    gaps, totals = [s.longest_gap_s for s in whole], [s.total_s for s in whole]
    return Latency(len(whole), *(percentile(v, p) for v in (gaps, totals) for p in (50, 99)))


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the nearest ranks; 0 of nothing."""
    if not values:
        return 0.0
    ordered = sorted(values)
    low, share = divmod((len(ordered) - 1) * percent / 100, 1)
    high = min(int(low) + 1, len(ordered) - 1)
    return ordered[int(low)] + (ordered[high] - ordered[int(low)]) * share


def _during(stream: Outcome, fault: Fault) -> bool:
    return stream.overlaps(fault.begin_ns, fault.begin_ns if fault.end_ns is None else fault.end_ns)


def _cost(kind: FaultKind, log: FaultLog, streams: Sequence[Outcome], before: Latency) -> Cost:
    ours = [fault for fault in log.faults if fault.kind is kind]
    hit = [stream for stream in streams if any(_during(stream, fault) for fault in ours)]
    return msgspec.structs.replace(
        _summary(kind.value, hit, before),
        num_sent=len(ours),
        num_observed=sum(fault.observed_ns is not None for fault in ours),
        num_skipped=log.skipped.get(kind, 0),
    )


def _summary(name: str, streams: Sequence[Outcome], before: Latency) -> Cost:
    own = latency(streams)
    return Cost(
        kind=name,
        num_streams=len(streams),
        num_resumed=sum(stream.attempts > 1 for stream in streams),
        num_failed=sum(stream.fate is Fate.FAILED for stream in streams),
        num_changed=sum(stream.change is not None for stream in streams),
        latency=own,
        added=own.above(before),
    )


def rows(report: Report) -> list[tuple[str, ...]]:
    """One per kind, as `COLUMNS`. Latencies: seconds, and in brackets what is more than before all faults."""
    table = []
    for cost in report.costs:
        own, added, is_kind = cost.latency, cost.added, cost.kind in list(FaultKind)
        counts = (cost.num_streams, cost.num_resumed, cost.num_failed, cost.num_changed)
        pairs = (
            (own.gap_p50_s, added.gap_p50_s),
            (own.gap_p99_s, added.gap_p99_s),
            (own.total_p50_s, added.total_p50_s),
            (own.total_p99_s, added.total_p99_s),
        )
        shown = [
            f"{a:.2f}" + (f" ({b:+.2f})" if cost.kind != BASELINE else "") if own.num_streams else "-" for a, b in pairs
        ]
        sent = (str(cost.num_sent), str(cost.num_observed)) if is_kind else ("", "")
        table.append((cost.kind, *sent, *map(str, counts), *shown))
    return table


def lines(report: Report) -> list[str]:
    """What stands below the table."""
    said = [
        f"{report.num_streams} streams in {report.run.seconds:.0f} s: {report.num_complete} complete, "
        f"{report.num_cancelled} cancelled, {report.num_cut} cut, {len(report.failures)} failed, "
        f"{len(report.changes)} changed"
    ]
    skipped = {cost.kind: cost.num_skipped for cost in report.costs if cost.num_skipped}
    if skipped:
        said.append(f"not done, for want of somebody to hit: {', '.join(f'{n} {kind}' for kind, n in skipped.items())}")
    said += _some("failed", report.failures)
    for title, changes in (("changed", report.changes), ("changed before any fault", report.baseline_changes)):
        said += _some(title, [f"{c.request_id} (case {c.case}) at token {c.position}: {c.what}" for c in changes])
    if report.baseline_changes:
        said.append(
            f"left out: {report.num_unsteady} of {report.run.num_cases} questions, whose answers are not steady even "
            "without faults (rounding decides between two tokens)"
        )
    if report.changes or report.baseline_changes:
        said.append(_rounding(report.run.dtype))
    said += _some("left behind", report.run.left_behind)
    said += _some("audit", report.run.findings)
    return said


def _rounding(dtype: str) -> str:
    where = (
        "if the deployment has no compiled CPU kernels, a model that they do not compute whole, or groups of different"
    )
    steady = "compare with a deployment of --dtype float32 --kv-dtype auto"
    if dtype == "float32":
        return (
            f"{where} tensor-parallel sizes, and stores KV as int8, int4 or fp8, other batches may store the next step "
            f"of a number, and answers may part without anybody's fault; {steady}"
        )
    return (
        f"{where} tensor-parallel sizes, other batches round differently in {dtype}, and answers may part without "
        f"anybody's fault; {steady}"
    )


def _some(title: str, items: Sequence[str]) -> list[str]:
    shown = [f"{title}: {item}" for item in items[:MAX_SHOWN]]
    return [*shown, f"{title}: and {len(items) - MAX_SHOWN} more"] if len(items) > MAX_SHOWN else shown
