"""A pool's pages are there before a step writes them, and what lies in them stays."""

from __future__ import annotations

import resource
import sys
import threading
import time

import pytest
import torch

from kvferry.runtime.kv import pages
from kvferry.runtime.kv.pages import PageTaker
from kvferry.runtime.kv.shared import shared_empty

SIZE = 64 << 20
PAGE = 4096
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems take pages as they are written")


def faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def wait(taker: PageTaker) -> None:
    taker._thread.join(30)
    assert not taker._thread.is_alive()


@pytest.mark.parametrize("shared", [True, False])
def test_writing_to_taken_pages_is_no_fault(shared: bool) -> None:
    """A range that is left out, or advice that the system does not know: the first prompts pay for it."""
    pool = shared_empty((SIZE,), torch.uint8) if shared else torch.empty(SIZE, dtype=torch.uint8)
    wait(PageTaker([pool[: SIZE // 2], pool[SIZE // 2 :]]))
    before = faults()
    pool.fill_(1)
    assert faults() - before < SIZE // PAGE // 50


def test_what_is_written_meanwhile_stays() -> None:
    """Pages that are written over while they are taken: KV of the first prompts is gone."""
    pool = shared_empty((SIZE // PAGE, PAGE), torch.uint8)
    pool[::7] = 3
    taker = PageTaker([pool])
    for _ in range(3):
        pool[::5] = 4
        pool[::7, 1] = 5
    wait(taker)
    assert (pool[::35, 2] == 4).all()
    assert (pool[7:35:7, 2] == 3).all()
    assert (pool[::7, 1] == 5).all()


def test_close_ends_it_after_the_piece_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that is told to stop, and goes on taking memory."""
    begun, go_on = threading.Event(), threading.Event()
    taken: list[int] = []

    def take(address: int, size: int) -> bool:
        taken.append(address)
        begun.set()
        return go_on.wait(30)

    monkeypatch.setattr(pages, "take", take)
    taker = PageTaker([torch.empty(SIZE, dtype=torch.uint8)])
    assert begun.wait(30)
    closing = threading.Thread(target=taker.close)
    closing.start()
    deadline = time.monotonic() + 30
    while not taker._stop.is_set() and time.monotonic() < deadline:
        time.sleep(0.001)
    go_on.set()
    closing.join(30)
    assert len(taken) == 1
    assert not taker._thread.is_alive()


def test_a_system_that_cannot_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that asks thousands of times for what it will not get."""
    taken: list[int] = []
    monkeypatch.setattr(pages, "take", lambda address, size: bool(taken.append(address)))
    wait(PageTaker([torch.empty(SIZE, dtype=torch.uint8)]))
    assert len(taken) == 1
