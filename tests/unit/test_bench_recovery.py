"""The arithmetic of the recovery benchmark, and reports of only some of the benchmark's parts."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[2] / "examples" / "bench"


@pytest.fixture(scope="module")
def bench() -> Any:
    """The scripts import each other from their own folder, so that is how they are imported here."""
    sys.path.insert(0, str(BENCH))
    try:
        yield {name: importlib.import_module(name) for name in ("recovery", "report")}
    finally:
        sys.path.remove(str(BENCH))


def test_tokens_that_were_under_way_are_no_recovery(bench: Any) -> None:
    """A token that the dead worker had sent makes the pause vanish; or the pause is that of a later token."""
    stream = bench["recovery"].Stream([1])
    stream.arrivals = [9.9, 10.0, 10.05]
    assert stream.recovery_s(10.0) is None
    stream.arrivals += [13.0, 13.1]
    assert stream.recovery_s(10.0) == 3.0


def round_of(**fields: Any) -> dict[str, Any]:
    stations = {"noticed_s": 0.1, "submitted_s": 0.5, "prompt_tokens": 4000, "cached_tokens": 800, "num_decoding": 8}
    return {"recovery_s": [1.0, 3.0], "reprefill_s": [1.0, 1.0], "audit": [], **stations, **fields}


@pytest.mark.parametrize(("pause_s", "met"), [(2.9, True), (3.1, False)])
def test_the_limit_follows_from_the_prefill_of_the_same_run(bench: Any, pause_s: float, met: bool) -> None:
    """A missed target is reported as met."""
    found = bench["recovery"].summary([round_of(recovery_s=[pause_s]), round_of(recovery_s=[pause_s])])
    rows = bench["report"].targets({"recovery": found})
    assert [row["met"] for row in rows] == [met, met]
    assert {row["target"] for row in rows} == {"at most 3"}


def test_a_report_of_the_recovery_alone(bench: Any) -> None:
    """`--parts recovery` ends in a KeyError after minutes of measuring."""
    found = bench["recovery"].summary([round_of(), round_of(recovery_s=[5.0], noticed_s=0.3, audit=["x"])])
    environment = {
        **dict.fromkeys(("cpu", "python", "model"), "x"),
        **{"cores": 2, "memory_gib": 1.0, "versions": {}, "serve_options": [], "peer_threads": 2, "runs": 1},
        "load_average": [0.0, 0.0],
    }
    results = {"environment": environment, "recovery": found}
    results["targets"] = bench["report"].targets(results)
    text = bench["report"].markdown(results)
    assert "## Recovery from the death of a decode worker" in text
    for cell in ("3.00, 4.96", "1.00, 1.00", "| 0.20 |", "| 3.00, 4.00 |", "| 1 |", "2 kills"):
        assert cell in text, cell
    assert "transformers" not in text
