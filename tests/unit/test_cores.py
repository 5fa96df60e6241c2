"""The shares of a machine's cores among the workers that compute."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvferry.runtime import cores
from kvferry.runtime.cores import CoreShare, usable_cores

pytestmark = pytest.mark.core


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def share(stack: ExitStack, path: Path, num_cores: int, group: str, size: int = 1, rank: int = 0) -> CoreShare:
    made = CoreShare(num_cores, group, size, rank, path=path / "notes")
    stack.callback(made.close)
    return made


def test_an_idle_neighbour_leaves_its_cores(tmp_path: Path, stack: ExitStack) -> None:
    """Fault: a decode worker that computes alone uses half of the machine; or two workers all of it, each; or a prompt
    that comes right after the last token of an answer is computed on half of the cores."""
    one, two = share(stack, tmp_path, 4, "a"), share(stack, tmp_path, 4, "b")
    assert one.begin() == 4
    assert two.begin() == 2
    one.rest()
    assert two.begin() == 4


def test_a_group_rests_as_a_whole(tmp_path: Path, stack: ExitStack) -> None:
    """Fault: its other ranks, whom nobody tells that it rests, count as busy for a while."""
    ranks = [share(stack, tmp_path, 4, "a", size=2, rank=rank) for rank in range(2)]
    for rank in ranks:
        rank.begin()
    other = share(stack, tmp_path, 4, "b")
    assert other.begin() == 1
    ranks[0].rest()
    assert other.begin() == 4


def test_ranks_of_a_group_count_as_busy_together(tmp_path: Path, stack: ExitStack) -> None:
    """Fault: the first rank of a group to begin a step takes all cores, because the others have not begun."""
    ranks = [share(stack, tmp_path, 4, "a", size=2, rank=rank) for rank in range(2)]
    assert [rank.begin() for rank in ranks] == [2, 2]
    assert share(stack, tmp_path, 8, "b").begin() == 2
    assert share(stack, tmp_path, 1, "c").begin() == 1


def test_a_dead_workers_note_runs_out_and_its_slot_is_used_again(
    tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: a killed worker counts as busy for ever, or fills the file."""
    script = (
        "import os, pathlib; from kvferry.runtime.cores import CoreShare; "
        f"CoreShare(2, 'dead', path=pathlib.Path({str(tmp_path / 'notes')!r})).begin(); os._exit(1)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=20).returncode == 1
    size = os.stat(tmp_path / "notes").st_size
    other = share(stack, tmp_path, 2, "a")  # takes the dead one's slot, and its note with it
    assert other.begin() == 2
    assert os.stat(tmp_path / "notes").st_size == size
    monkeypatch.setattr(cores, "_NUM_SLOTS", 1)
    with pytest.raises(OSError, match="all 1 slots"):
        share(stack, tmp_path, 2, "b")


def test_cores_of_this_process() -> None:
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)


def test_notes_stay_mapped_for_who_reads_them_from_outside(tmp_path: Path, stack: ExitStack) -> None:
    """Fault: a program that runs, or the next one of the process, reads memory that is no longer mapped."""
    one = share(stack, tmp_path, 2, "a")
    native = one.native
    one.begin(free_ns=10**9)
    assert native.one_free_until > time.monotonic_ns()
    one.close()
    del one
    slots = ctypes.cast(native.notes, ctypes.POINTER(ctypes.c_int64))
    assert slots[0] == 1
    assert slots[4] == 0  # it is over
