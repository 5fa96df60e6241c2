"""A Ray of our own ends whole: with the process that started it, however that one dies, and when a part of it dies.

    launcher ── pipe ──▶ watchdog (this file as a script): at the pipe's end it kills every process of this Ray,
        │                unless the launcher said farewell
        └── looks at Ray's two daemons: when one dies, `lost` tells; without them nothing can be placed or ended

Ray ends most of its processes itself, but leaves some for a minute. Its processes are known by a mark in their
environment, which is set only while Ray starts, so that no other child of the launcher bears it. Standard library only.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

MARK = "KVFERRY_RAY"
DAEMONS = ("gcs_server", "raylet")
KILL_S = 5.0
"""How long a kill goes on: a dying process may just have started another one."""
LOOK_S = 0.5
WATCH_S = 2.0
FAREWELL = b"."


class OwnRay:
    """Use around `ray.init` (`with ray.starting():`), then `watch`; `close` after `ray.shutdown`."""

    def __init__(self) -> None:
        self._mark = uuid.uuid4().hex
        self._watchdog: subprocess.Popen[bytes] | None = None
        self._daemons: dict[str, int] = {}
        """Their names and pids."""

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """What starts inside belongs to this Ray. The watchdog runs from then on, so a start may be killed, too."""
        command = [sys.executable, "-I", "-S", str(Path(__file__).resolve()), self._mark]
        self._watchdog = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        os.environ[MARK] = self._mark
        try:
            yield
        finally:
            del os.environ[MARK]
        names = {pid: Path(f"/proc/{pid}/comm").read_text().strip() for pid in marked(self._mark)}
        self._daemons = {name: pid for pid, name in names.items() if name in DAEMONS}

    async def lost(self) -> str:
        """Returns once a daemon has died: which one."""
        while True:
            for name, pid in self._daemons.items():
                if _is_over(pid):
                    return name
            await asyncio.sleep(LOOK_S)

    def kill(self) -> None:
        """Ends all of this Ray's processes at once."""
        kill_marked(self._mark)

    def close(self) -> None:
        """Ray has ended in good order."""
        if self._watchdog is None or self._watchdog.stdin is None:
            return
        with contextlib.suppress(BrokenPipeError), self._watchdog.stdin as pipe:
            pipe.write(FAREWELL)
        try:
            self._watchdog.wait(KILL_S)
        except subprocess.TimeoutExpired:
            self._watchdog.kill()
            self._watchdog.wait(KILL_S)


Started = tuple[int, str]
"""A process: its number, and when it began, so that a number that is used again is not hit."""


def _stat(pid: int) -> list[str]:
    """What follows the name in /proc/PID/stat: state, parent, …; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _is_over(pid: int) -> bool:
    """Dead, or a zombie that nobody has reaped."""
    stat = _stat(pid)
    return not stat or stat[0] in "ZX"


def marked(mark: str, known: set[Started] | None = None) -> dict[int, Started]:
    """Processes that bear the mark, and the living ones of `known` with their children.

    A process that gives itself another title may overwrite its environment, but somebody who still bears the mark has
    started it.
    """
    wanted, parents = f"{MARK}={mark}\0".encode(), dict[int, int]()
    found: dict[int, Started] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or not (stat := _stat(pid := int(entry.name))) or stat[0] in "ZX":
            continue
        parents[pid], started = int(stat[1]), (pid, stat[19])
        with contextlib.suppress(OSError):  # it has gone, or is another user's
            if started in (known or ()) or wanted in (entry / "environ").read_bytes():
                found[pid] = started
    for pid in sorted(parents):  # a child is younger, and numbers rarely wrap
        if parents[pid] in found and pid not in found and (stat := _stat(pid)):
            found[pid] = (pid, stat[19])
    return found


def kill_marked(mark: str, known: set[Started] | None = None) -> None:
    known, until = known or set(), time.monotonic() + KILL_S
    while (found := marked(mark, known)) and time.monotonic() < until:
        known |= set(found.values())
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def watch(mark: str) -> None:
    """The watchdog's life."""
    known: set[Started] = set()
    while not select.select([sys.stdin], [], [], WATCH_S)[0]:
        known = set(marked(mark, known).values())
    if os.read(sys.stdin.fileno(), 1) != FAREWELL:
        kill_marked(mark, known)


if __name__ == "__main__":
    watch(sys.argv[1])
