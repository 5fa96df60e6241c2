"""Configurations of mixtures of experts and of latent attention, and where their files have the parts."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.runtime.errors import CorruptModel, InvalidArgument, UnsupportedModel
from kvferry.runtime.model.families import from_hf_config, hf_source
from kvferry.runtime.model.parts import part_shapes
from kvferry.runtime.model.spec import LatentSpec, MLPSpec, MoESpec
from tests.support.published import DEEPSEEK_V2, DEEPSEEK_V3, MIXTRAL, QWEN3_MOE

pytestmark = pytest.mark.core


def test_one_latent_per_token_is_cached() -> None:
    """DeepSeek-V3 caches 61 · 576 numbers a token, however many ranks there are: each holds them all."""
    spec = from_hf_config(DEEPSEEK_V3)
    for tp_size in (1, 2, 8):
        layout = spec.kv_layout(64, "bfloat16", tp_size)
        assert layout.bytes_per_token == 61 * 576 * 2
        assert {layout.heads(rank) for rank in range(tp_size)} == {(0, 1)}
    assert spec.max_context == 163840
    with pytest.raises(InvalidArgument, match="128 attention heads"):
        spec.check_tensor_parallel(3)


def test_keys_and_values_do_not_pass_for_latents() -> None:
    """A group with two planes of the same numbers must not exchange blocks with one that has one."""
    latent = from_hf_config(DEEPSEEK_V3).kv_layout(64, "bfloat16", 1)
    both = type(latent)(num_layers=61, num_kv_heads=1, head_dim=576, block_size=64, dtype="bfloat16")
    assert latent.fingerprint != both.fingerprint


def test_attention_is_sharper_in_a_stretched_context() -> None:
    """mscale enters the softmax twice; a model whose two mscales are equal gets it only there."""
    attention = from_hf_config(DEEPSEEK_V3).kv_shape
    assert isinstance(attention, LatentSpec)
    assert attention.scale == pytest.approx(192**-0.5 * 1.3688879454113936**2)
    assert attention.rope.scaling.attention_factor == 1.0
    plain = from_hf_config(DEEPSEEK_V3 | {"rope_scaling": None}).kv_shape
    assert isinstance(plain, LatentSpec)
    assert plain.scale == pytest.approx(192**-0.5)


def test_which_layers_have_experts() -> None:
    dense = [isinstance(layer.mlp, MLPSpec) for layer in from_hf_config(DEEPSEEK_V3).layers]
    assert dense == [True] * 3 + [False] * 58
    config = QWEN3_MOE | {"decoder_sparse_step": 2, "mlp_only_layers": [3], "num_hidden_layers": 6}
    dense = [isinstance(layer.mlp, MLPSpec) for layer in from_hf_config(config).layers]
    assert dense == [True, False, True, True, True, False]
    assert all(isinstance(layer.mlp, MoESpec) for layer in from_hf_config(MIXTRAL).layers)


def test_how_experts_are_chosen() -> None:
    """Defaults of one family that get into another."""
    v3, v2, qwen, mixtral = (
        from_hf_config(config).layers[-1].mlp for config in (DEEPSEEK_V3, DEEPSEEK_V2, QWEN3_MOE, MIXTRAL)
    )
    shared = {
        "num_experts": 256,
        "num_active": 8,
        "inner_size": 2048,
        "shared_size": 2048,
        "num_groups": 8,
        "scale": 2.5,
    }
    assert v3 == MoESpec(**shared, sigmoid=True, correction=True, num_top_groups=4, group_best=2)
    assert v2 == MoESpec(**shared, num_top_groups=3, normalised=False)
    assert qwen == MoESpec(num_experts=128, num_active=8, inner_size=768)
    assert mixtral == MoESpec(num_experts=8, num_active=2, inner_size=14336)


@pytest.mark.parametrize(
    ("config", "part", "name"),
    [
        (MIXTRAL, "layers.3.mlp.router.weight", "model.layers.3.block_sparse_moe.gate.weight"),
        (MIXTRAL, "layers.3.mlp.experts.7.up.weight", "model.layers.3.block_sparse_moe.experts.7.w3.weight"),
        (QWEN3_MOE, "layers.0.mlp.experts.12.down.weight", "model.layers.0.mlp.experts.12.down_proj.weight"),
        (DEEPSEEK_V3, "layers.3.mlp.router.correction", "model.layers.3.mlp.gate.e_score_correction_bias"),
        (DEEPSEEK_V3, "layers.3.mlp.shared.up.weight", "model.layers.3.mlp.shared_experts.up_proj.weight"),
        (DEEPSEEK_V3, "layers.0.mlp.gate.weight", "model.layers.0.mlp.gate_proj.weight"),
        (DEEPSEEK_V3, "layers.0.attention.kv_up.weight", "model.layers.0.self_attn.kv_b_proj.weight"),
    ],
)
def test_names_in_files(config: dict[str, Any], part: str, name: str) -> None:
    """The names of the published checkpoints, which transformers' own have left."""
    spec = from_hf_config(config)
    assert part in part_shapes(spec)
    assert hf_source(spec, part).name == name


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (DEEPSEEK_V3 | {"topk_method": "greedy"}, "topk_method"),
        (DEEPSEEK_V3 | {"scoring_func": "softmax"}, "scoring_func"),
        (DEEPSEEK_V3 | {"rope_interleave": False}, "rope_interleave"),
        (DEEPSEEK_V3 | {"attention_bias": True}, "attention_bias"),
        (DEEPSEEK_V3 | {"moe_layer_freq": 2}, "moe_layer_freq"),
        (DEEPSEEK_V3 | {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        (DEEPSEEK_V2 | {"norm_topk_prob": True}, "norm_topk_prob"),
        (DEEPSEEK_V2 | {"topk_method": "noaux_tc"}, "topk_method"),
        (MIXTRAL | {"sliding_window": 4096}, "sliding_window"),
    ],
)
def test_refused_by_name(config: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        from_hf_config(config)


@pytest.mark.parametrize(
    ("changes", "word"),
    [({"n_group": 7}, "groups"), ({"topk_group": 9}, "groups"), ({"num_experts_per_tok": 129}, "129 experts")],
)
def test_impossible_routing(changes: dict[str, Any], word: str) -> None:
    """A choice that cannot be made would fail in the first step, on every rank."""
    with pytest.raises(CorruptModel, match=word):
        from_hf_config(DEEPSEEK_V3 | changes)
