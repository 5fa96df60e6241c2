"""Blocks that links write themselves: only while they are granted, and nobody has them before the writing is over."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvferry.runtime.errors import InvariantBroken
from kvferry.runtime.ids import BlockId, TransferId
from kvferry.runtime.transfer import landing as module
from kvferry.runtime.transfer.landing import Landing

pytestmark = pytest.mark.core
T, OTHER = (TransferId("t"), 1), (TransferId("t"), 2)
IDS = [BlockId(i) for i in range(6)]


def nobody(reason: str) -> None:
    raise AssertionError(f"a link was cut: {reason}")


def test_blocks_are_written_once_and_for_their_transfer() -> None:
    """Guards against a message for blocks that no ticket names, or that has come before and whose blocks are in use."""
    landing = Landing()
    assert landing.begin(T, IDS[:2], nobody) is None
    landing.grant(T, IDS[:4])
    assert landing.begin(OTHER, IDS[:2], nobody) is None
    assert landing.begin(T, IDS[3:5], nobody) is None, "one of them is not granted"
    flight = landing.begin(T, IDS[:2], nobody)
    assert flight is not None
    assert landing.begin(T, IDS[1:3], nobody) is None
    landing.end(flight)
    assert landing.begin(T, IDS[:2], nobody) is None
    landing.take_back(T, IDS[2:3])  # as an import does of what was staged
    assert landing.begin(T, IDS[2:4], nobody) is None
    assert landing.num_transfers == 1
    landing.take_back(T)
    assert landing.begin(T, IDS[3:4], nobody) is None
    assert landing.num_transfers == 0, "transfers that are over are forgotten"


def test_taking_back_waits_for_those_blocks_only() -> None:
    """Guards against a step that uses blocks still being written, and one that waits for what does not concern it."""
    landing = Landing()
    landing.grant(T, IDS)
    flight = landing.begin(T, IDS[:2], nobody)
    assert flight is not None
    landing.take_back(T, IDS[2:3])
    landing.take_back(OTHER)
    with ThreadPoolExecutor(1) as pool:
        taking = pool.submit(landing.take_back, T)
        threading.Event().wait(0.03)
        assert not taking.done()
        assert landing.begin(T, IDS[4:], nobody) is None, "nothing new begins meanwhile"
        landing.end(flight)
        taking.result(2)
    assert landing.num_transfers == 0


def test_a_message_that_does_not_end_costs_its_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a peer that stops in mid-message and a step that waits for it, or goes on in spite of it."""
    monkeypatch.setattr(module, "PATIENCE_S", 0.02)
    monkeypatch.setattr(module, "CUT_S", 0.05)
    landing = Landing()
    cuts: list[str] = []
    landing.grant(T, IDS)
    flight = landing.begin(T, IDS[:1], lambda reason: [cuts.append(reason), landing.end(flight)][0])  # type: ignore[arg-type]
    landing.take_back(T)
    assert len(cuts) == 1
    landing.grant(T, IDS)
    assert landing.begin(T, IDS[:1], cuts.append) is not None
    with pytest.raises(InvariantBroken, match="still writes blocks"):
        landing.take_back(T)
    assert len(cuts) == 2
