"""What the library leaves of a machine's cores to others."""

from __future__ import annotations

import time
from pathlib import Path

from kvferry.runtime import cores
from kvferry.runtime.cores import CoreShare
from kvferry.runtime.llm import LLM
from kvferry.runtime.request import SamplingParams
from tests.support.tiny_model import save_tiny_model


def test_a_library_that_has_answered_leaves_its_cores(tmp_path: Path) -> None:
    """Fault: a notebook that waits for its user counts as busy, and neighbours compute on half of the cores."""
    llm = LLM(str(save_tiny_model(tmp_path)), num_blocks=64)
    shares = llm._rank._cores
    assert shares is not None
    until_ns = []
    begin = shares.begin
    shares.begin = lambda free_ns=0: (begin(free_ns), until_ns.append(note(shares)))[0]  # type: ignore[method-assign]
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3, ignore_eos=True))
    assert len(until_ns) == 3
    assert min(until_ns) > time.monotonic_ns()
    assert note(shares) == 0


def note(shares: CoreShare) -> int:
    """Until when the worker counts as busy."""
    return int(cores._SLOT.unpack_from(shares._notes, shares._at)[3])
