"""What processes took of this machine, as Linux keeps it: peak resident memory and CPU time."""

from __future__ import annotations

import signal
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True)
class ProcessMemory:
    name: str
    pid: int
    peak_mib: float


def end_in_order() -> None:
    """SIGTERM ends the bench as Ctrl-C does: what it has started ends with it."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def peak_rss_mib(pid: int) -> float:
    """Highest resident size since the process began. Raises `OSError` when it is gone."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    return 0.0  # a process that has ended and was not reaped


def memory(pids: Iterable[int]) -> dict[str, float]:
    """Of these processes, MiB: what they take now, each page once however many share it (PSS); the sum of their peaks.

    Raises `OSError` when one is gone, `psutil.Error` where the system does not tell.
    """
    known = list(pids)
    shares = sum(psutil.Process(pid).memory_full_info().pss for pid in known)
    return {"resident_mib": shares / (1 << 20), "peak_mib": sum(map(peak_rss_mib, known))}


def peaks(server: int, workers: dict[int, str]) -> tuple[list[ProcessMemory], list[ProcessMemory]]:
    """kvferry's own processes (the server and `workers`: pid to name), and all others below the server: Ray's."""
    own = [ProcessMemory("kvferry serve", server, peak_rss_mib(server))]
    own += [ProcessMemory(name, pid, peak_rss_mib(pid)) for pid, name in workers.items()]
    rest: list[ProcessMemory] = []
    for child in _below(server, workers):
        try:
            rest.append(ProcessMemory(_label(child), child.pid, peak_rss_mib(child.pid)))
        except (OSError, psutil.Error):  # it ended meanwhile
            continue
    return own, rest


def _below(pid: int, known: Collection[int]) -> list[psutil.Process]:
    return [p for p in psutil.Process(pid).children(recursive=True) if p.pid not in known]


def _label(process: psutil.Process) -> str:
    """A name that tells Ray's Python processes apart."""
    command = process.cmdline() or [process.name()]
    if command[0].startswith("ray::"):
        return command[0]
    names = [Path(part).name for part in command[:4] if not part.startswith("-")]
    return next((n for n in names if n.endswith(".py")), names[0])


@dataclass(frozen=True)
class CpuTime:
    watched_s: float
    own_s: float
    """Of this process."""
    other_s: float
    """Of everything else on this machine."""


class CpuWatch:
    """CPU seconds between `begin` and `end`, of some processes (with their threads), this one, and all others."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._watched = [psutil.Process(pid) for pid in pids]
        self._start = CpuTime(0.0, 0.0, 0.0)

    def begin(self) -> None:
        self._start = self._now()

    def end(self) -> CpuTime:
        now, start = self._now(), self._start
        watched, own = now.watched_s - start.watched_s, now.own_s - start.own_s
        return CpuTime(watched, own, max(0.0, now.other_s - start.other_s - watched - own))

    def _now(self) -> CpuTime:
        """Totals so far; `other_s` is that of the whole machine."""
        times = [process.cpu_times() for process in self._watched]
        machine = psutil.cpu_times()
        return CpuTime(
            sum(t.user + t.system for t in times), time.process_time(), machine.user + machine.system + machine.nice
        )
