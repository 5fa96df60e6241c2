"""Every format of numbers, KV and weights, and every speculation, with every kind of model: it computes, or is refused.

What is refused is refused from the description alone, before anything starts, in words that name option, value and
way out. What is not, computes the same tokens in a batch as alone, guessed or not, where rounding allows it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from kvferry.kernels.cpu.available import library
from kvferry.kernels.packing import Quantization
from kvferry.runtime.config import DType, KVDType, SpeculationMethod
from kvferry.runtime.errors import InvalidArgument
from kvferry.runtime.llm import LLM, engine_config
from kvferry.runtime.model.families import from_hf_config
from kvferry.runtime.model.fit import check_fit
from kvferry.runtime.request import SamplingParams
from tests.support.kinds import KINDS
from tests.support.tiny_model import CONFIG, save_tiny_model

SIZES: dict[str, Any] = {"block_size": 8, "max_batch_tokens": 32, "num_blocks": 64, "threads": 1}
PROMPTS = [[5, 6, 7], list(range(1, 60)), [7, 8, 9, 10] * 10]
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


def combinations() -> Iterator[dict[str, str]]:
    names = "dtype", "kv_dtype", "quantization", "speculation"
    for values in itertools.product(*map(get_args, (DType, KVDType, Quantization, SpeculationMethod))):
        options = dict(zip(names, values, strict=True))
        if options["dtype"] != "auto":  # here float32
            yield options


def refusal(kind: str, options: dict[str, str]) -> str | None:
    """All that does not go together."""
    dtype, kv_dtype, quantization = (options[name] for name in ("dtype", "kv_dtype", "quantization"))
    if quantization != "none" and kind in ("latent", "experts"):
        return f"quantization='{quantization}': does not go with experts or latent attention; use none"
    if quantization != "none" and dtype == "float16":
        return f"quantization='{quantization}': does not go with dtype float16; use --dtype bfloat16 or float32"
    if kv_dtype in ("int8", "int4", "fp8") and kind == "latent":
        return f"kv_dtype='{kv_dtype}': does not go with latent attention; use auto, float32, bfloat16 or float16"
    return None


@pytest.mark.parametrize("kind", KINDS)
def test_what_does_not_go_together_is_refused_from_the_description(kind: str) -> None:
    """Fault: a worker finds it out, after Ray, torch and minutes; or nobody does, and every step fails."""
    spec = from_hf_config(CONFIG | KINDS[kind])
    for options, tp_size in itertools.product(combinations(), (1, 2)):
        draft_model = "some" if options["speculation"] == "draft" else None
        config, said = engine_config(**options, draft_model=draft_model), None
        try:
            check_fit(config, spec, tp_size)
        except InvalidArgument as error:
            said = str(error)
        assert said == refusal(kind, options), options


@pytest.mark.skipif(library() is None, reason="the CPU kernels are not built or are turned off")
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_refused_computes(kind: str, tmp_path: Path) -> None:
    """Fault: a format is written as bytes and read as numbers (or the other way round) in one of the kinds."""
    model = str(save_tiny_model(tmp_path, seed=1, **KINDS[kind]))
    expected: dict[tuple[str, ...], list[list[int]]] = {}
    for options in combinations():
        plain = options["speculation"] == "none"
        if refusal(kind, options) or not (plain or (options["dtype"], options["quantization"]) == ("float32", "none")):
            continue
        llm = LLM(model, **SIZES, **options, draft_model=model if options["speculation"] == "draft" else None)
        batch = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]
        assert [len(tokens) for tokens in batch] == [GREEDY.max_tokens] * len(PROMPTS)
        if options["dtype"] == "float32":
            formats = options["kv_dtype"], options["quantization"]
            if plain:
                expected[formats] = [llm.generate(prompt, GREEDY)[0].outputs[0].token_ids for prompt in PROMPTS]
            assert batch == expected[formats], options
