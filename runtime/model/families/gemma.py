"""Gemma 2 and Gemma 3 (text): local and global layers, norms before and after each part, scaled embeddings.

Norm weights are stored without their 1. The multimodal Gemma 3 is read as its text model.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvferry.runtime.errors import CorruptModel
from kvferry.runtime.model.families.config import Config
from kvferry.runtime.model.families.family import Family, split, usual_source
from kvferry.runtime.model.families.windows import layer_types
from kvferry.runtime.model.parts import Source
from kvferry.runtime.model.spec import AttentionSpec, LayerSpec, MLPSpec, ModelSpec, NormSpec, RopeSpec

_NORMS = {
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}


def _gemma2(config: Config) -> ModelSpec:
    rope = config.rope(config.positive("head_dim"))
    softcap = None if config.get("attn_logit_softcapping") is None else config.number("attn_logit_softcapping")
    return _model(config, _attention(config, rope, softcap=softcap), _attention(config, rope, softcap=softcap))


def _gemma3(config: Config) -> ModelSpec:
    if config.get("attn_logit_softcapping") is not None:
        config.refuse("attn_logit_softcapping", "supported is null, since transformers does not apply it")
    head_dim, rope = config.positive("head_dim"), config.rope_values()
    full = {"rope_theta": config.number("rope_theta", 1e6), **_part(rope, "full_attention")}
    full |= {key: value for key, value in (config.get("rope_scaling") or {}).items() if not isinstance(value, dict)}
    local = {"rope_theta": config.number("rope_local_base_freq", 1e4), **_part(rope, "sliding_attention")}
    return _model(
        config,
        _attention(config, config.rope_from(local, head_dim), qk_norm=True),
        _attention(config, config.rope_from(full, head_dim), qk_norm=True),
    )


def _part(rope: dict[str, Any], kind: str) -> dict[str, Any]:
    value = rope.get(kind) or {}
    if not isinstance(value, dict):
        raise CorruptModel(f"config.json: rope of {kind}={value!r} must be an object")
    return value


def _gemma3_in_multimodal(config: Config) -> ModelSpec:
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise CorruptModel(f"config.json: text_config={text!r} must be an object")
    shared = {key: value for key, value in config.values.items() if key not in ("text_config", "vision_config")}
    return _gemma3(Config(GEMMA3.defaults | shared | text, config.generation, config.architecture))


def _attention(config: Config, rope: RopeSpec, *, softcap: float | None = None, qk_norm: bool = False) -> AttentionSpec:
    bias = config.flag("attention_bias")
    return AttentionSpec(
        num_heads=config.positive("num_attention_heads"),
        num_kv_heads=config.positive("num_key_value_heads"),
        head_dim=config.positive("head_dim"),
        rope=rope,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=qk_norm,
        scale=config.number("query_pre_attn_scalar") ** -0.5,
        softcap=softcap,
    )


def _model(config: Config, local: AttentionSpec, full: AttentionSpec) -> ModelSpec:
    config.refuse_common()
    if config.flag("use_bidirectional_attention"):
        config.refuse("use_bidirectional_attention", "supported is false")
    mlp = MLPSpec(
        inner_size=config.positive("intermediate_size"),
        activation=config.activation("hidden_activation", "gelu_pytorch_tanh"),
    )
    local = msgspec.structs.replace(local, window=config.positive("sliding_window"))
    local_layer, full_layer = (LayerSpec(attention=a, mlp=mlp, post_norms=True) for a in (local, full))
    hidden_size = config.positive("hidden_size")
    softcap = None if config.get("final_logit_softcapping") is None else config.number("final_logit_softcapping")
    return ModelSpec(
        architecture=config.architecture,
        vocab_size=config.positive("vocab_size"),
        hidden_size=hidden_size,
        layers=tuple(local_layer if is_local else full_layer for is_local in _local_layers(config)),
        norm=NormSpec(eps=config.number("rms_norm_eps"), offset=1.0),
        tied_embeddings=config.flag("tie_word_embeddings", True),
        max_context=config.positive("max_position_embeddings"),
        eos_token_ids=config.eos_token_ids(),
        bos_token_id=config.get("bos_token_id"),
        dtype=config.dtype(),
        embedding_scale=hidden_size**0.5,
        logit_softcap=softcap,
    )


def _local_layers(config: Config) -> list[bool]:
    """By name, or every layer but the last of each `sliding_window_pattern`."""
    num_layers = config.positive("num_hidden_layers")
    if (listed := layer_types(config, num_layers)) is not None:
        return listed
    pattern = config.positive("sliding_window_pattern")
    return [(i + 1) % pattern != 0 for i in range(num_layers)]


def _source(spec: ModelSpec, part: str) -> Source:
    number, stem, suffix = split(part)
    if stem not in _NORMS:
        return usual_source(spec, part)
    return Source(f"model.layers.{number}.{_NORMS[stem]}.{suffix}")


_DEFAULTS: dict[str, Any] = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
GEMMA2 = Family(
    name="gemma2",
    read=_gemma2,
    source=_source,
    defaults=_DEFAULTS
    | {
        "vocab_size": 256000,
        "max_position_embeddings": 8192,
        "sliding_window_pattern": 2,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
)
GEMMA3 = Family(
    name="gemma3",
    read=_gemma3,
    source=_source,
    defaults=_DEFAULTS | {"vocab_size": 262208, "max_position_embeddings": 131072, "sliding_window_pattern": 6},
)
GEMMA3_MULTIMODAL = Family(
    name="gemma3-multimodal",
    read=_gemma3_in_multimodal,
    source=_source,
    renames=(
        ("language_model.model.", "model."),
        ("model.language_model.", "model."),
        ("language_model.lm_head.", "lm_head."),
    ),
)
