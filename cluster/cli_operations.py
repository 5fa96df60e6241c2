"""Commands that change a deployment while it serves: `drain`, `scale`, `role`, `restart`."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import tyro

from kvferry.cluster.cli_calls import Door
from kvferry.cluster.cli_shared import shown
from kvferry.cluster.config import Role as GroupRole
from kvferry.runtime.errors import InvalidArgument

if TYPE_CHECKING:
    from kvferry.cluster.service import OperationView

Seconds = Annotated[float, shown("SECONDS")]
Count = Annotated[int | None, shown("INT", "as many as now")]
DRAIN_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Drain:
    """Take a group out of service and end its processes. What it works on goes on elsewhere; scale brings it back."""

    group: Annotated[tyro.conf.Positional[str], shown("GROUP")]
    """Its name, as `kvferry status` shows it."""
    timeout_s: Seconds = DRAIN_S
    """For answers to move while they run; those that have not then are computed again elsewhere."""
    server: Door = field(default_factory=Door)

    def run(self) -> None:
        with self.server.open(None) as client:
            tell(client.drain(self.group, drain_s=self.timeout_s))


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Add groups, or drain the newest ones, until there are so many of each role."""

    prefill: Count = None
    """Number of groups that read prompts."""
    decode: Count = None
    """Number of groups that write answers."""
    mixed: Count = None
    """Number of groups that do both."""
    timeout_s: Seconds = DRAIN_S
    """For the answers of each group that leaves, as in `kvferry drain`."""
    server: Door = field(default_factory=Door)

    def run(self) -> None:
        with self.server.open(None) as client:
            tell(client.scale(prefill=self.prefill, decode=self.decode, mixed=self.mixed, drain_s=self.timeout_s))


@dataclass(frozen=True, kw_only=True)
class Role:
    """Change what a group is used for. It keeps its cache and what it works on."""

    group: Annotated[tyro.conf.Positional[str], shown("GROUP")]
    """Its name, as `kvferry status` shows it."""
    role: tyro.conf.Positional[GroupRole]
    """prefill, decode or mixed."""
    server: Door = field(default_factory=Door)

    def run(self) -> None:
        with self.server.open(None) as client:
            tell(client.set_role(self.group, self.role))


@dataclass(frozen=True, kw_only=True)
class Restart:
    """Replace the workers of all groups, one group after another, while the server serves."""

    rolling: tyro.conf.FlagCreatePairsOff[bool] = False
    """Required: there is no other kind of restart that keeps what runs."""
    timeout_s: Seconds = DRAIN_S
    """For the answers of each group, as in `kvferry drain`."""
    server: Door = field(default_factory=Door)

    def run(self) -> None:
        if not self.rolling:
            raise InvalidArgument("rolling", False, "all groups at once would drop what runs", "give --rolling")
        with self.server.open(None) as client:
            tell(client.restart(drain_s=self.timeout_s))


def tell(view: OperationView) -> None:
    """One line on standard output."""
    parts = [
        f"{verb} {', '.join(groups)}" for verb, groups in (("started", view.started), ("ended", view.ended)) if groups
    ]
    counts = (
        (view.num_moved, "moved while they ran"),
        (view.num_rerouted, "had not begun and went elsewhere"),
        (view.num_resumed, "computed again elsewhere"),
    )
    parts += [f"{number} answers {what}" for number, what in counts if number]
    sys.stdout.write(f"{'; '.join(parts) or 'done'} ({view.seconds:.1f} s)\n")
