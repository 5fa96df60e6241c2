"""The tables of `kvferry status` and of `kvferry generate --timeline`."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from kvferry.cluster.service import ClusterView, GroupView
from kvferry.runtime.timeline import Timeline

_STATE_STYLE = {"live": "green", "starting": "yellow", "draining": "yellow", "unreachable": "yellow", "dead": "red"}


def show(cluster: ClusterView, findings: list[str] | None) -> None:
    """Prints to standard output. `findings`: of an audit, `None` if there was none."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=160)  # a pipe has no width; do not cut what a script reads
    console.print(cluster.model, style="bold", markup=False)
    console.print(groups_table(cluster.groups))
    console.print(
        f"requests: {cluster.num_requests} in flight, {cluster.num_finished} finished, {cluster.num_failed} failed, "
        f"{cluster.num_resumed} outlived a death of workers"
    )
    if findings is not None:
        console.print("audit: all is well" if not findings else f"audit: {len(findings)} findings")
        for finding in findings:
            console.print(f"  {finding}", style="red", markup=False)


def groups_table(groups: list[GroupView]) -> Table:
    table = Table()
    table.add_column("group")
    table.add_column("role")
    table.add_column("state")
    for name in ("epoch", "workers", "free blocks", "leased", "waiting", "running"):
        table.add_column(name, justify="right")
    for name in ("hit rate", "prompt tokens", "output tokens", "received"):
        table.add_column(name, justify="right")
    guessing = any(group.drafted_tokens for group in groups)
    if guessing:
        table.add_column("guessed right", justify="right")
    for group in groups:
        table.add_row(
            group.group,
            group.role,
            f"[{_STATE_STYLE.get(group.state, 'default')}]{group.state}[/]",
            str(group.epoch),
            str(group.tp_size),
            f"{group.num_free_blocks}/{group.num_blocks}",
            str(group.num_leased_blocks),
            str(group.num_waiting),
            str(group.num_running),
            f"{group.hit_rate:.0%}",
            str(group.prompt_tokens),
            str(group.output_tokens),
            f"{group.received_bytes / 1e6:.1f} MB",
            *([f"{group.accepted_tokens}/{group.drafted_tokens}"] if guessing else []),
        )
    return table


def show_timeline(timeline: Timeline) -> None:
    """Prints to standard error: spans, their share of the whole, and setbacks."""
    console = Console(highlight=False, stderr=True)
    table = Table()
    table.add_column("at ms", justify="right")
    table.add_column("ms", justify="right")
    table.add_column("phase")
    table.add_column("group")
    for span in timeline.spans:
        began_ms, took_ms = (span.begin_ns - timeline.received_ns) / 1e6, (span.end_ns - span.begin_ns) / 1e6
        table.add_row(f"{began_ms:.1f}", f"{took_ms:.1f}", span.phase.value, span.group)
    console.print(table)
    console.print(f"attempts: {timeline.attempts}")
    for setback in timeline.setbacks:
        at_ms = (setback.at_ns - timeline.received_ns) / 1e6
        console.print(f"  [{setback.index}] {setback.cause.value} on {setback.group} at {at_ms:.1f} ms", markup=False)
