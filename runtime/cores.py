"""How many CPU threads a step may use: the cores of a machine, divided among the workers that compute right now.

Workers of one machine share its cores. A fixed share leaves cores idle whenever a neighbour rests (a prefill worker
once the prompts are computed), and threads that outnumber cores wait for each other. So every worker notes in a small
file, mapped by all of this user's workers on the machine, until when it counts as busy, and reads the others' notes
before each step. A step program reads them before each of its operations (`kernels/cpu/program.cpp`): so a prompt that
comes while a neighbour computes on all cores gets its share within a fraction of a step.

    number of slots in use | slot | slot | …    slot: pid, group, its ranks, busy until (ns, the monotonic clock)

The first rank of a group notes for all of them: they step together. A note needs no care: one that a dead worker left
runs out, and a wrong one costs speed for one step.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import mmap
import os
import struct
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from kvferry.kernels.cpu.threads import Cores

_COUNT = struct.Struct("<q")
_SLOT = struct.Struct("<qqqq")
_NUM_SLOTS = 1024
_BYTES = _COUNT.size + _NUM_SLOTS * _SLOT.size
STEP_NS = 10_000_000_000
"""A longer step no longer counts as work."""


def usable_cores() -> int:
    """Of this machine for this process: its affinity, or less where a container's quota says so."""
    cores = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, max(1, int(quota) // int(period)))  # "max" is no number: no quota
    return cores


@contextlib.contextmanager
def _locked(file: int) -> Iterator[None]:
    """Others hold the lock for microseconds. Raises `OSError` after a second, if one of them was stopped with it."""
    for attempt in range(1, 101):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if attempt == 100:
                raise
            time.sleep(0.01)
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)  # closing is not enough: the map keeps the file open


class CoreShare:
    """One rank's view of the machine's cores. `begin`, `end` and `rest` are for the thread that computes."""

    def __init__(
        self, num_cores: int, group: str, group_size: int = 1, rank: int = 0, *, path: Path | None = None
    ) -> None:
        """`group_size` ranks named `group` step together. Raises `OSError` where the file cannot be used."""
        self._num_cores = num_cores
        self._closed = False
        self._notes_for_all = rank == 0
        self._group = int.from_bytes(hashlib.blake2b(group.encode(), digest_size=7).digest(), "little")
        self._group_size = group_size
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        file = os.open(path or Path(tempfile.gettempdir()) / f"kvferry-core-shares-{os.getuid()}", flags, 0o600)
        try:
            if os.fstat(file).st_uid != os.getuid():
                raise PermissionError(f"the file of core shares belongs to user {os.fstat(file).st_uid}")
            os.ftruncate(file, _BYTES)
            self._notes = mmap.mmap(file, _BYTES)
            start = ctypes.c_char.from_buffer(self._notes)
            self.native = Cores(ctypes.addressof(start), num_cores, self._group, group_size, 0)
            """How a step program sees the notes while it runs. They stay mapped as long as this is used."""
            self.native.start = start
            with _locked(file):
                self._at = self._claim()
        finally:
            os.close(file)

    def begin(self, free_ns: int = 0) -> int:
        """Says that a step begins. Returns how many threads it may use; a step program looks for itself, all along.

        free_ns: for so long a step program leaves one core to others, where it might use all of several.
        """
        now_ns = time.monotonic_ns()
        self.native.one_free_until = now_ns + free_ns
        self._note(now_ns + STEP_NS)
        used = self._notes[_COUNT.size : _COUNT.size + _COUNT.unpack_from(self._notes)[0] * _SLOT.size]
        others = sum(
            ranks for _, group, ranks, until_ns in _SLOT.iter_unpack(used) if until_ns > now_ns and group != self._group
        )
        return max(1, int(self._num_cores // (self._group_size + others)))

    def rest(self) -> None:
        """There is nothing more to do: neighbours may have all cores at once."""
        self._note(0)

    def close(self) -> None:
        """Gives the slot back. Idempotent."""
        if not self._closed:
            _SLOT.pack_into(self._notes, self._at, 0, 0, 0, 0)
        self._closed = True

    def _note(self, until_ns: int) -> None:
        if self._notes_for_all:
            _SLOT.pack_into(self._notes, self._at, os.getpid(), self._group, self._group_size, until_ns)

    def _claim(self) -> int:
        """Offset of the first slot whose owner is gone."""
        for slot in range(_NUM_SLOTS):
            at = _COUNT.size + slot * _SLOT.size
            pid = _SLOT.unpack_from(self._notes, at)[0]
            if pid == 0 or not Path(f"/proc/{pid}").exists():
                _SLOT.pack_into(self._notes, at, os.getpid(), self._group, self._group_size, 0)
                _COUNT.pack_into(self._notes, 0, max(slot + 1, _COUNT.unpack_from(self._notes)[0]))
                return at
        raise OSError(f"all {_NUM_SLOTS} slots for workers of this machine are taken")
