"""The benchmark that changes a deployment under load, in short: no answer may fail or change."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_deaths import OPTIONS, tokens
from tests.support.deployment import Deployment, serve_config

BENCH = Path(__file__).resolve().parents[2] / "examples" / "bench"
pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]
SECONDS, CLIENTS, NEW_TOKENS = 20.0, 16, 120


@pytest.fixture(scope="module")
def resize() -> Any:
    """The scripts import each other from their own folder, so that is how they are imported here."""
    sys.path.insert(0, str(BENCH))
    try:
        return importlib.import_module("resize")
    finally:
        sys.path.remove(str(BENCH))


async def test_nothing_fails_or_changes(resize: Any, tiny_model: str, shared_ray: str) -> None:
    """Fault: any of the operations costs a request, or a token."""
    prompts = [tokens(24 + 3 * i, 700 + i) for i in range(24)]
    calls = resize.with_answers(tiny_model, prompts, NEW_TOKENS, threads=1, **OPTIONS)
    async with Deployment(serve_config(tiny_model, disaggregate="always", ray_address=shared_ray, **OPTIONS)) as there:
        result = await resize.Resize(there.client, calls).run(SECONDS, CLIENTS)
        view = await there.assert_at_rest()
    assert (result.failed, result.num_changed, result.findings) == ([], 0, [])
    assert result.num_answers > 5 * CLIENTS
    assert (view.num_failed, view.num_resumed) == (0, 0)
    assert sum(cost.num_moved for cost in result.costs) > 0
    assert [cost.num_answers > 0 for cost in result.costs] == [True] * 4
    assert {(g.group, g.role, g.state) for g in view.groups} == {
        ("prefill-0", "decode", "live"),
        ("decode-0", "prefill", "live"),
        ("decode-1", "decode", "live"),
    }
