"""`kvferry chaos`: faults on purpose, against a deployment that runs."""

from __future__ import annotations

import asyncio
import signal
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import tyro

from kvferry.cluster.chaos.plan import ALL_FAULTS, PROCESS_FAULTS, ChaosConfig, FaultKind, read_faults
from kvferry.cluster.cli_calls import Server
from kvferry.cluster.cli_shared import shown
from kvferry.runtime.errors import InvalidArgument, KvferryError

if TYPE_CHECKING:
    from kvferry.cluster.chaos.report import Report
    from kvferry.cluster.chaos.run import Chaos

STREAM_TIMEOUT_S = 120.0


@dataclass(frozen=True, kw_only=True)
class ChaosCommand:
    """Hurt a running deployment, and check that no answer is lost or changed.

    First every question is answered undisturbed, then clients ask them again and again while workers are killed
    (SIGKILL) or stopped for some seconds (SIGSTOP, SIGCONT), clients' connections are cut, and clients leave in the
    middle of their answers. At the end: a table of the faults that were observed and what each kind cost, and an
    audit. Exit code 0: nothing failed, nothing changed, nothing was left behind. Ctrl-C ends early, with the table.

    On CPUs with the compiled kernels and one tensor-parallel size for all groups, a plain model's answers must not
    change at all. Elsewhere use a deployment with --dtype float32 and --kv-dtype auto: in bfloat16 or float16, or with
    a quantised KV cache, a request that is resumed is computed in other batches, rounds differently, and may
    legitimately go on with another word; such differences are reported with the position of the first token that
    differs.

    Workers are signalled only on this machine and only if they belong to you; the server itself is never signalled.
    Connections between workers are not cut: Linux has no way to that without privileges or extra tools.
    """

    minutes: float = 1.0
    """How long faults go on. The undisturbed answers before and the audit after take their own time."""
    clients: int = 8
    """Clients that ask at the same time."""
    faults: Annotated[str, shown("KIND[,KIND...]")] = ",".join(ALL_FAULTS)
    """Kinds of faults."""
    every_s: float = 5.0
    """Seconds from one fault to the next."""
    seed: int = 0
    """The same seed gives the same questions and the same plan of faults."""
    max_tokens: int = 64
    """Tokens of each answer."""
    yes: tyro.conf.FlagCreatePairsOff[bool] = False
    """Do not ask before hurting a server that is not on this machine's loopback address."""
    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print the report as one JSON object instead of a table."""
    server: Server = field(default_factory=Server)

    def config(self) -> ChaosConfig:
        """Raises `InvalidArgument`."""
        kinds = read_faults(self.faults)
        if FaultKind.CUT in kinds and self.server.encrypted:
            limit = "cannot be cut under TLS: the proxy that cuts does not have the server's name"
            rest = [kind.value for kind in kinds if kind is not FaultKind.CUT]
            raise InvalidArgument("faults", self.faults, limit, f"leave it out: --faults {','.join(rest) or 'cancel'}")
        return ChaosConfig(
            seconds=self.minutes * 60,
            clients=self.clients,
            faults=kinds,
            every_s=self.every_s,
            seed=self.seed,
            max_tokens=self.max_tokens,
            stream_timeout_s=STREAM_TIMEOUT_S if self.server.timeout_s is None else self.server.timeout_s,
        )

    def run(self) -> None:
        from kvferry.cluster.chaos.processes import LocalProcesses
        from kvferry.cluster.chaos.run import Chaos

        config, target = self.config(), self.server.target
        if not self.yes:
            confirm(config, target)

        async def act() -> Report:
            chaos = Chaos(config, target, self.server.async_client, LocalProcesses(target), _say)
            interrupt_on_signals(chaos)
            return await chaos.run()

        report = asyncio.run(act())
        self._show(report)
        if faults := report.faults():
            raise KvferryError(f"chaos: {', '.join(faults)}")
        if report.run.interrupted:
            raise KeyboardInterrupt

    def _show(self, report: Report) -> None:
        if self.json:
            import msgspec

            view = {**msgspec.to_builtins(report), "faults": report.faults()}
            sys.stdout.write(msgspec.json.encode(view).decode() + "\n")
            return
        from rich.console import Console
        from rich.table import Table

        from kvferry.cluster.chaos.report import COLUMNS, lines, rows

        console = Console(highlight=False)
        if not console.is_terminal:
            console = Console(highlight=False, width=160)  # a pipe has no width; do not cut what a script reads
        table = Table(caption="Seconds; in brackets: more than before all faults.", caption_justify="left")
        for i, column in enumerate(COLUMNS):
            table.add_column(column, justify="right" if i else "left")
        for row in rows(report):
            table.add_row(*row)
        console.print(table)
        for line in lines(report):
            console.print(line, markup=False)


def confirm(config: ChaosConfig, target: str) -> None:
    """Asks on the terminal unless the target is this machine's loopback. Raises `InvalidArgument` without a yes."""
    from kvferry.cluster.chaos.processes import is_loopback

    host = target.rpartition(":")[0].strip("[]")
    if is_loopback(host):
        return
    hurt = "kills or stops workers" if PROCESS_FAULTS & set(config.faults) else "breaks its own connections"
    question = f"{target} is not a loopback address. This {hurt} for {config.seconds / 60:g} minutes. Go on? [y/N] "
    said = ""
    if sys.stdin.isatty():
        sys.stderr.write(question)
        sys.stderr.flush()
        said = sys.stdin.readline().strip().lower()
    if said not in ("y", "yes"):
        raise InvalidArgument("target", target, "is not a loopback address", "confirm with --yes")


def interrupt_on_signals(chaos: Chaos) -> None:
    """The first SIGINT or SIGTERM ends the time of faults, the second one the program."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()

    def on_signal() -> None:
        if chaos.interrupt.is_set() and task is not None:
            task.cancel()
        chaos.interrupt.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        try:
            loop.add_signal_handler(number, on_signal)
        except (RuntimeError, ValueError):  # not in the main thread, to which signals go
            return


def _say(what: str) -> None:
    sys.stderr.write(f"{what} …\n")
    sys.stderr.flush()
