"""Tokens and logits against transformers: tiny random models whose logits are far from flat, float32 on both sides."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from msgspec import structs
from transformers import AutoModelForCausalLM as AutoModel
from transformers import Qwen2Config

from kvferry.runtime.ids import BlockId
from kvferry.runtime.kv.groups import one_group
from kvferry.runtime.kv.storage import RankStorage
from kvferry.runtime.model.batch import make_batches
from kvferry.runtime.model.decoder import build_model
from kvferry.runtime.model.families import from_hf_config
from kvferry.runtime.model.loader import MemoryWeights
from kvferry.runtime.model.parallel import SingleRank
from kvferry.runtime.step import Row
from tests.support.golden import BLOCK, Sequences, expected_tokens, generate, generate_in_parallel, oracle, prompts
from tests.support.golden_configs import COMMON, CONFIGS
from tests.support.kernels import torch_alone

pytestmark = pytest.mark.golden


@pytest.mark.parametrize("name", CONFIGS)
def test_logits(name: str) -> None:
    """A wrong rotation, bias or norm often leaves the first tokens alone and shows in the logits."""
    sequences = Sequences(name)
    prompt = prompts()[-1]
    rows = [Row(prompt[:i], 0, sequences.blocks(i), True) for i in (1, 7, len(prompt))]
    with torch.inference_mode():
        batches = make_batches(rows, sequences.storage)
        got = sequences.model.forward(batches, sequences.storage)[0].float()
        expected = torch.stack([oracle(name)(torch.tensor([row.token_ids])).logits[0, -1] for row in rows])
    assert expected.std() > 1.0  # else the comparison proves little
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("chunk", "stagger"), [(1000, 0), (5, 3)], ids=["whole", "chunked"])
def test_tokens(name: str, chunk: int, stagger: int) -> None:
    """Ragged batches, prompts that join beside running decodes and chunks that end inside a block change nothing."""
    assert generate(Sequences(name), chunk, stagger) == expected_tokens(name)


@pytest.mark.parametrize("name", ["gpt2", "phi3-longrope-short", "dynamic-rope", "gemma2", "gemma3"])
def test_tokens_by_torch_alone(name: str) -> None:
    """What the kernels do in one call is spelled out in torch: a norm, an angle or a window forgotten there."""
    with torch_alone():
        assert generate(Sequences(name), 5, 3) == expected_tokens(name)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("mha", 2),
        ("gqa-tied", 2),
        ("mqa", 2),
        ("mqa", 4),
        ("all-biases", 4),
        ("qwen3", 2),
        ("mixtral", 2),
        ("qwen3-moe-mixed", 4),
        ("deepseek-v2-lite", 2),
        ("deepseek-v2-groups", 4),
        ("deepseek-v3", 2),
        ("gpt2", 2),
        ("phi3", 2),
        ("phi3-longrope-short", 2),
        ("odd-vocabulary", 4),
        ("gemma2", 2),
        ("gemma3", 2),
    ],
)
def test_tokens_in_parallel(name: str, size: int) -> None:
    """Ranks that take the wrong heads, or biases that are added once per rank."""
    assert generate_in_parallel(name, size, chunk=7) == expected_tokens(name)


@pytest.mark.parametrize("without", [contextlib.nullcontext, torch_alone], ids=["kernels", "torch"])
def test_each_layer_has_its_own_window_and_scale(without: Callable[[], AbstractContextManager[None]]) -> None:
    """A layer that gets another's window, because the first that asked decided for the step."""
    config = Qwen2Config(
        **COMMON, num_attention_heads=4, num_key_value_heads=2, use_sliding_window=True, sliding_window=9
    )
    config.layer_types = ["sliding_attention", "full_attention", "sliding_attention"]
    torch.manual_seed(3)
    model = AutoModel.from_config(config, dtype=torch.float32).eval()
    model.model.layers[0].self_attn.scaling = 0.5
    spec = from_hf_config(oracle("qwen2").config.to_dict() | {"architectures": ["Qwen2ForCausalLM"]})
    changes: list[dict[str, Any]] = [{"window": 9, "scale": 0.5}, {}, {"window": 9}]
    layers = tuple(
        structs.replace(layer, attention=structs.replace(layer.attention, **change))
        for layer, change in zip(spec.layers, changes, strict=True)
    )
    spec = structs.replace(spec, layers=layers, tied_embeddings=False)
    ours = build_model(spec, MemoryWeights(dict(model.state_dict()), spec), torch.float32, 0, SingleRank())
    storage = RankStorage(one_group(spec.kv_layout(BLOCK, "float32", 1), 40), "cpu", poison=True)
    prompt, table, got = prompts()[-1], [BlockId(b) for b in range(10, 20)], []
    with without(), torch.inference_mode():
        for start, stop in [(0, 15), (15, 33), *[(i, i + 1) for i in range(33, 40)]]:
            batches = make_batches([Row(prompt[start:stop], start, table, True)], storage)
            got.append(ours.forward(batches, storage)[0].to(torch.float32, copy=True))
        expected = model(torch.tensor([prompt])).logits[0, [14, *range(32, 40)]]
    torch.testing.assert_close(torch.cat(got), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["gqa-tied", "deepseek-v3"])
def test_rows_of_one_step_share_blocks(name: str) -> None:
    """A prefix computed by one row must be readable by the others of the same step."""
    prefix = prompts()[-1][:16]
    sequences = Sequences(name)
    tails = [[7], [9, 11, 13], [15] * 6]
    shared = sequences.blocks(len(prefix))
    rows = [
        Row(tail, len(prefix), [*shared, *sequences.blocks(len(tail))], True) for tail in tails
    ]  # readers stand before the writer in the plan
    rows.append(Row(prefix, 0, shared, True))
    with torch.inference_mode():
        expected = [
            int(oracle(name)(torch.tensor([tokens])).logits[0, -1].argmax())
            for tokens in [*[prefix + tail for tail in tails], prefix]
        ]
    assert sequences.step(rows) == expected


def test_steps_without_samples_and_without_rows() -> None:
    """A chunk in the middle of a prompt wants no logits; a plan may carry transfers only."""
    sequences = Sequences("mha")
    table = sequences.blocks(8)
    assert sequences.step([]) == []
    assert sequences.step([Row([1, 2, 3], 0, table, False)]) == []
    assert len(sequences.step([Row([4], 3, table, True)])) == 1
