"""A few hundred simulated clusters under faults.

Guards against: tokens that differ from the undisturbed run; a request that hangs, ends twice or ends without a cause;
blocks, leases, bookings or tasks left behind; an index that stays wrong; an engine that spins.
"""

from __future__ import annotations

import pytest

from kvferry.cluster.budgets import MAX_RETRY_PAUSE_S, CoordinatorConfig
from kvferry.cluster.sim.runner import simulate_many
from tests.support import cluster_groups as groups
from tests.support import cluster_world as world

pytestmark = [pytest.mark.core, pytest.mark.sim]
PER_TEST = 30


@pytest.mark.parametrize("first", range(0, 300, PER_TEST))
def test_simulated_clusters(first: int) -> None:
    summary = simulate_many(range(first, first + PER_TEST))
    shown = [f"kvferry sim --seed {report.seed}: {report.failures}" for report in summary.failed]
    assert not shown, "\n".join(shown)


def test_faults_are_observed_not_only_injected() -> None:
    """Fault: a simulator that has stopped disturbing anything finds nothing for ever."""
    observed = simulate_many(range(1000, 1120)).observed
    wanted = {
        *("group death", "gateway death", "stream cut", "link cut", "stop", "went on", "group unreachable"),
        *("link message lost", "link message repeated", "link message overtaken", "clock skew", "slow step"),
        *("frame lost", "frame repeated", "frame overtaken", "slow client", "cancel", "deadline", "preemption"),
        *("no room for a transfer", "lease lapsed", "transfer failed", "request outlived a loss", "drain"),
        *("scale up", "scale down", "role change", "rolling restart", "rank death"),
        *("draft accepted", "draft rejected"),
    }
    assert not {kind for kind in wanted if not observed[kind]}


def test_pauses_between_retries_stay_short() -> None:
    """Fault (seed 13988 of an earlier drawing): with a large budget the doubling pause grew to hours."""

    async def life() -> None:
        async with world.World(CoordinatorConfig(retry_budget=50)) as cluster:
            port = cluster.up(groups.ManualPort("m", 1, "mixed"))
            stream = cluster.coordinator.start(groups.request(max_tokens=2))
            for refusals in range(30):
                for _ in range(int(MAX_RETRY_PAUSE_S) + 1):
                    await cluster.clock.sleep(1)
                    cluster.frame(port)  # a sign of life
                assert len(port.submitted) == refusals + 1
                refused = world.event(port.submitted[-1].key, 0, None, error_label="queue_full", error_message="full")
                cluster.frame(port, refused)
            await stream.aclose()

    world.run(life())


def test_sequences_that_get_in_each_others_way_behind_a_window() -> None:
    """Fault (seed 5946): three took turns for ever, each preempted before it had a token: what they gave back of their
    windows a transfer held as well, so it made no room."""
    assert not simulate_many([5946]).failed
