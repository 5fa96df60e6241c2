"""The simulator itself: the same seed is the same run, failures shrink, the command says what it found."""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec
import pytest

from kvferry.cluster import cli
from kvferry.cluster.sim.faults import Fault, draw
from kvferry.cluster.sim.loop import Deadlock, VirtualLoop, run
from kvferry.cluster.sim.runner import RunReport, Summary, simulate
from kvferry.cluster.sim.shrink import described, shrink
from kvferry.cluster.transfers import Transfers

pytestmark = pytest.mark.core
SEEDS = range(6, 18)


def test_same_seed_gives_the_same_run_in_every_process() -> None:
    """Fault: a failing seed that cannot be replayed, because sets are iterated in the order of addresses or hashes."""
    code = (
        "from kvferry.cluster.sim.runner import simulate\n"
        f"print(*(simulate(seed).digest for seed in range({SEEDS.start}, {SEEDS.stop})))"
    )
    here = [simulate(seed).digest for seed in SEEDS]
    assert len(set(here)) == len(here), "different seeds are different runs"
    assert [simulate(seed, keep_lines=True).digest for seed in SEEDS] == here
    for hash_seed in ("1", "77"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert done.stdout.split() == here


def test_shrinking_leaves_what_the_failure_needs() -> None:
    """Fault: a shrunk scenario that does not fail, or keeps faults that have nothing to do with the failure."""
    scenario = next(s for s in map(draw, range(500)) if len(s.faults) >= 6 and len(s.requests) >= 6)
    needed = {str(scenario.faults[1]), str(scenario.faults[4])}

    def fake(candidate: object) -> RunReport:
        assert isinstance(candidate, type(scenario))
        names = {plan.name for plan in candidate.requests}
        fails = needed <= set(map(str, candidate.faults)) and scenario.requests[3].name in names
        report = RunReport(
            seed=0, digest="", num_events=0, observed=Summary().observed, failures=["x"] * fails, lines=[]
        )
        return report

    smallest = shrink(scenario, fake)
    assert set(map(str, smallest.faults)) == needed
    assert [plan.name for plan in smallest.requests] == [scenario.requests[3].name]
    assert len(described(smallest)) == 2 + 2 + 1


def test_a_run_without_its_faults_is_still_a_run() -> None:
    """Fault: leaving faults out changes what is drawn for the rest."""
    scenario = next(s for s in map(draw, range(500)) if len(s.faults) >= 3)
    quiet = msgspec.structs.replace(scenario, faults=[])
    report = simulate(quiet)
    assert not report.failures
    assert "group death" not in report.observed


def test_faults_name_themselves() -> None:
    assert str(Fault(kind="group death", at_event=7)) == "group death at event 7 (which=0, amount=0)"
    assert str(Fault(kind="lossy links", amount=0.1)) == "lossy links (which=0, amount=0.1)"


def test_waiting_for_nothing_is_an_error_not_a_hang() -> None:
    """Fault: a deadlock in the simulated cluster hangs the simulator."""

    async def wait() -> None:
        loop = __import__("asyncio").get_running_loop()
        assert isinstance(loop, VirtualLoop)
        await loop.create_future()

    with pytest.raises(Deadlock):
        run(wait())


def test_command_prints_what_it_saw(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["sim", "--seed", "3", "--seeds", "4"])
    shown = capsys.readouterr().out
    assert shown.startswith("4 seeds, ")
    assert "0 failed" in shown


def test_command_prints_seed_and_shrinks(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a failure without the seed that shows it again, or an exit code of 0."""
    monkeypatch.setattr(Transfers, "settle", lambda *_args, **_more: None)
    with pytest.raises(SystemExit) as caught:
        cli.main(["sim", "--seed", "0", "--seeds", "2", "--shrink", "--trace"])
    assert caught.value.code == 1
    shown = capsys.readouterr()
    assert "seed 0" in shown.out
    assert "shrunk:" in shown.out
    assert "digest" in shown.out
    assert "kvferry sim --seed" in shown.err
