"""`kvferry chaos` against a tiny real deployment; and against one that answers wrongly."""

from __future__ import annotations

import pytest

from kvferry.cluster.chaos.plan import ChaosConfig, FaultKind
from kvferry.cluster.chaos.processes import LocalProcesses
from kvferry.cluster.chaos.run import Chaos
from kvferry.cluster.client import AsyncClient
from tests.support.deployment import Deployment, serve_config

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]
CONFIG = ChaosConfig(seconds=12, clients=8, every_s=0.8, num_prompts=3, max_tokens=400)


def quiet(_said: str) -> None: ...


async def test_streams_survive_all_kinds_of_faults(tiny_model: str, shared_ray: str) -> None:
    """Faults: a stream fails or changes; a fault that was only injected is counted; something stays behind."""
    config = serve_config(
        tiny_model, decode=2, disaggregate="always", ray_address=shared_ray, block_size=8, num_blocks=512
    )
    async with Deployment(config) as deployment:
        chaos = Chaos(CONFIG, deployment.target, AsyncClient, LocalProcesses(deployment.target), quiet)
        report = await chaos.run()
        costs = {cost.kind: cost for cost in report.costs}
        assert report.faults() == [], report
        assert all(costs[kind].num_observed > 0 for kind in FaultKind), costs
        assert report.num_complete > 8
        assert sum(cost.num_resumed for cost in report.costs) > 0, costs
