"""Options together, behind real processes: formats of KV and weights, speculation, kinds of models, unequal groups.

Whatever is combined, the tokens are those that one engine with the same formats draws alone, one request after another.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvferry.runtime.config import SpeculationConfig
from kvferry.runtime.llm import LLM
from kvferry.runtime.request import RequestOutput, SamplingParams
from tests.support.deployment import Deployment, serve_config
from tests.support.kinds import KINDS
from tests.support.tiny_model import VOCAB, save_tiny_model

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=24, seed=11, ignore_eos=True)
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, seed=1, ignore_eos=True)
SIZES: dict[str, Any] = {"block_size": 8, "max_batch_tokens": 32}


class Case(msgspec.Struct, frozen=True, kw_only=True):
    kind: str
    formats: dict[str, Any] = {}
    speculation: str = "none"
    draft: str = "dense"
    """The kind of the draft model."""
    deployment: dict[str, Any] = {}


CASES = [
    Case(kind="dense", formats={"kv_dtype": "int8"}, speculation="ngram", deployment={"decode_tp": 2}),
    Case(
        kind="dense",
        formats={"kv_dtype": "int4", "quantization": "int8"},
        speculation="draft",
        deployment={"transport": "gloo"},
    ),
    Case(kind="dense", formats={"kv_dtype": "fp8", "quantization": "int4"}, speculation="draft", draft="latent"),
    Case(kind="window", formats={"kv_dtype": "fp8", "quantization": "int8"}, speculation="draft", draft="window"),
    Case(kind="windows", formats={"kv_dtype": "int4"}, speculation="ngram", deployment={"prefill_tp": 2}),
    Case(kind="latent", formats={"kv_dtype": "bfloat16"}, speculation="draft", deployment={"decode_tp": 2}),
    Case(
        kind="experts",
        formats={"kv_dtype": "int8"},
        speculation="draft",
        draft="experts",
        deployment={"prefill_tp": 2, "transport": "gloo"},
    ),
]


def named(case: Case) -> str:
    return " ".join([case.kind, *case.formats.values(), case.speculation, *map(str, case.deployment.values())])


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """One of each kind, all with one vocabulary."""
    root = tmp_path_factory.mktemp("kinds")
    return {kind: str(save_tiny_model(root / kind, seed=3, **changes)) for kind, changes in KINDS.items()}


def make_prompts() -> list[list[int]]:
    """Some begin alike; some are longer than a window, a chunk, or both; some repeat themselves."""
    rng = random.Random(4)
    system = [rng.randrange(1, VOCAB) for _ in range(40)]
    fresh = [system[: 16 * (i % 3)] + [rng.randrange(1, VOCAB) for _ in range(5 + 13 * i)] for i in range(5)]
    return [*fresh, [7, 8, 9, 10] * 9]


@pytest.mark.parametrize("case", CASES, ids=named)
async def test_same_tokens_as_one_engine(case: Case, models: dict[str, str], tmp_path: Path, shared_ray: str) -> None:
    """Faults: a slot's bytes cut at the wrong place between unequal ranks; a layer, a head or a draft that reads what
    another format means; blocks of two block groups mixed up on the way.
    """
    model, prompts = models[case.kind], make_prompts()
    alone = LLM(model, dtype="float32", threads=1, num_blocks=500, **SIZES, **case.formats)
    wanted = [alone.generate(p, s)[0] for p in prompts for s in (GREEDY, SAMPLED)]
    draft_model = models[case.draft] if case.speculation == "draft" else None
    config = serve_config(
        model,
        disaggregate="always",
        ray_address=shared_ray,
        num_blocks=300,
        speculation=SpeculationConfig(method=case.speculation, max_tokens=4, draft_model=draft_model),  # type: ignore[arg-type]
        **SIZES,
        **case.formats,
        **case.deployment,
    )
    async with Deployment(config) as deployment:
        for wave in ("computed", "cached"):
            calls = [deployment.client.generate(p, s, timeout_s=200) for p in prompts for s in (GREEDY, SAMPLED)]
            outputs = await asyncio.gather(*calls)
            assert [tokens(output) for output in outputs] == [tokens(want) for want in wanted], wave
        assert sum(output.num_cached_tokens for output in outputs) > 100
        view = await deployment.assert_at_rest()
    assert (view.num_finished, view.num_failed, view.num_resumed) == (2 * len(wanted), 0, 0)
    decode = next(group for group in view.groups if group.role == "decode")
    assert decode.received_bytes > 0
    assert decode.drafted_tokens > 0 or case.speculation == "ngram", "random text seldom repeats itself"


def tokens(output: RequestOutput) -> list[int]:
    return output.outputs[0].token_ids
