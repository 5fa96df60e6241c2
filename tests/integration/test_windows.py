"""Models with sliding windows behind real processes: the same tokens as from one engine, and less to carry."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from kvferry.runtime.llm import LLM
from kvferry.runtime.request import SamplingParams
from tests.support.deployment import Deployment, serve_config
from tests.support.kinds import KINDS
from tests.support.tiny_model import VOCAB, save_tiny_model

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]


@pytest.mark.parametrize("kind", ["window", "windows"])
async def test_same_tokens_as_one_engine(kind: str, tmp_path: Path, shared_ray: str) -> None:
    """Unequal groups, a pool that cannot hold all that its sequences have been, and shared prefixes."""
    model = str(save_tiny_model(tmp_path / "model", **KINDS[kind]))
    rng = random.Random(4)
    system = [rng.randrange(1, VOCAB) for _ in range(48)]
    prompts = [system[: 16 * (i % 4)] + [rng.randrange(1, VOCAB) for _ in range(8 + 9 * i)] for i in range(8)]
    sampling = SamplingParams(temperature=0.0, max_tokens=40, seed=1, ignore_eos=True)
    options: dict[str, Any] = {"block_size": 8, "max_batch_tokens": 32}
    wanted = LLM(model, dtype="float32", threads=1, num_blocks=1000, **options).generate(prompts, sampling)
    num_blocks = 40 if kind == "window" else 90
    config = serve_config(
        model, disaggregate="always", decode_tp=2, ray_address=shared_ray, num_blocks=num_blocks, **options
    )
    async with Deployment(config) as deployment:
        calls = [deployment.client.generate(prompt, sampling, timeout_s=200) for prompt in prompts]
        outputs = await asyncio.gather(*calls)
        view = await deployment.assert_at_rest()
    assert [o.outputs[0].token_ids for o in outputs] == [w.outputs[0].token_ids for w in wanted]
    assert (view.num_finished, view.num_failed, view.num_resumed) == (len(prompts), 0, 0)
