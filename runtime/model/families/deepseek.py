"""DeepSeek-V2 (V2-Lite included) and V3: latent attention; after some layers with an MLP, mixtures of experts."""

from __future__ import annotations

from typing import Any

from kvferry.runtime.model.families.config import Config
from kvferry.runtime.model.families.family import Family, split
from kvferry.runtime.model.families.llama import llama_mlp, llama_model
from kvferry.runtime.model.families.moe import moe_source
from kvferry.runtime.model.families.rope import yarn_mscale
from kvferry.runtime.model.parts import Source
from kvferry.runtime.model.spec import LatentSpec, LayerSpec, ModelSpec, MoESpec

_ATTENTION = {
    "q": "q_proj",
    "q_down": "q_a_proj",
    "q_down_norm": "q_a_layernorm",
    "q_up": "q_b_proj",
    "kv_down": "kv_a_proj_with_mqa",
    "kv_down_norm": "kv_a_layernorm",
    "kv_up": "kv_b_proj",
    "o": "o_proj",
}


def _v2(config: Config) -> ModelSpec:
    if config.get("topk_method") not in ("greedy", "group_limited_greedy"):
        config.refuse("topk_method", "supported are greedy, group_limited_greedy")
    if config.flag("norm_topk_prob"):
        config.refuse("norm_topk_prob", "supported is false")
    routing: dict[str, Any] = {"normalised": False}
    if config.get("topk_method") == "group_limited_greedy":
        routing |= {"num_groups": config.positive("n_group"), "num_top_groups": config.positive("topk_group")}
    return _read(config, "softmax", routing)


def _v3(config: Config) -> ModelSpec:
    if config.get("topk_method", "noaux_tc") != "noaux_tc":
        config.refuse("topk_method", "supported is noaux_tc")
    if not config.flag("rope_interleave"):
        config.refuse("rope_interleave", "supported is true")
    routing = {
        "sigmoid": True,
        "correction": True,
        "normalised": config.flag("norm_topk_prob"),
        "num_groups": config.positive("n_group"),
        "num_top_groups": config.positive("topk_group"),
        "group_best": 2,
    }
    return _read(config, "sigmoid", routing)


def _read(config: Config, scores: str, routing: dict[str, Any]) -> ModelSpec:
    config.refuse_common()
    config.refuse_windows()
    for key, supported in (
        ("attention_bias", False),
        ("mlp_bias", False),
        ("moe_layer_freq", 1),
        ("scoring_func", scores),
    ):
        if config.get(key, supported) != supported:
            config.refuse(key, f"supported is {supported!r}")
    attention, dense = _attention(config), llama_mlp(config)
    inner_size = config.positive("moe_intermediate_size")
    moe = MoESpec(
        num_experts=config.positive("n_routed_experts"),
        num_active=config.positive("num_experts_per_tok"),
        inner_size=inner_size,
        shared_size=inner_size * (config.get("n_shared_experts") or 0),
        scale=config.number("routed_scaling_factor"),
        activation=dense.activation,
        **routing,
    )
    num_dense = config.get("first_k_dense_replace") or 0
    layers = [
        LayerSpec(attention=attention, mlp=dense if i < num_dense else moe)
        for i in range(config.positive("num_hidden_layers"))
    ]
    return llama_model(config, tuple(layers))


def _attention(config: Config) -> LatentSpec:
    key_dim, rope_dim = config.positive("qk_nope_head_dim"), config.positive("qk_rope_head_dim")
    rope = config.rope(rope_dim)
    scale = (key_dim + rope_dim) ** -0.5
    if rope.scaling.kind != "default":
        mscale = config.rope_values().get("mscale_all_dim") or 0.0
        scale *= yarn_mscale(rope.scaling.factor, mscale) ** 2
    return LatentSpec(
        num_heads=config.positive("num_attention_heads"),
        query_rank=None if config.get("q_lora_rank") is None else config.positive("q_lora_rank"),
        latent_rank=config.positive("kv_lora_rank"),
        key_dim=key_dim,
        rope_dim=rope_dim,
        value_dim=config.positive("v_head_dim"),
        rope=rope,
        scale=scale,
    )


def _source(spec: ModelSpec, part: str) -> Source:
    """The rows that are rotated lie behind those that are not, as pairs."""
    number, stem, suffix = split(part)
    block, _, name = stem.partition(".")
    if number is None or block != "attention":
        return moe_source(spec, part)
    where = f"model.layers.{number}.self_attn.{_ATTENTION[name]}.{suffix}"
    attention = spec.layers[number].attention
    assert isinstance(attention, LatentSpec)  # as this family's `read` made it
    if name in ("q", "q_up"):
        return Source(where, pair_rows=attention.key_dim + attention.rope_dim, unpaired_rows=attention.key_dim)
    if name == "kv_down":
        return Source(where, pair_rows=attention.head_dim, unpaired_rows=attention.latent_rank)
    return Source(where)


_DEFAULTS = {
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
}
DEEPSEEK_V2 = Family(
    name="deepseek_v2",
    read=_v2,
    source=_source,
    defaults=_DEFAULTS
    | {
        "max_position_embeddings": 2048,
        "moe_intermediate_size": 1407,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "routed_scaling_factor": 1.0,
        "topk_method": "greedy",
    },
)
DEEPSEEK_V3 = Family(
    name="deepseek_v3",
    read=_v3,
    source=_source,
    defaults=_DEFAULTS
    | {
        "max_position_embeddings": 4096,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "routed_scaling_factor": 2.5,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "first_k_dense_replace": 3,
        "rope_interleave": True,
    },
)
