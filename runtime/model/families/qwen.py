"""Qwen2, Qwen2.5 (biases on q, k and v) and Qwen3 (norms over the heads of q and k)."""

from __future__ import annotations

from kvferry.runtime.model.families.config import Config
from kvferry.runtime.model.families.family import Family
from kvferry.runtime.model.families.llama import llama_attention, llama_mlp, uniform
from kvferry.runtime.model.families.windows import layer_types, windowed
from kvferry.runtime.model.spec import AttentionSpec, ModelSpec


def _read(config: Config, attention: AttentionSpec) -> ModelSpec:
    config.refuse_common()
    spec = uniform(config, attention, llama_mlp(config))
    if not config.flag("use_sliding_window"):
        return spec
    window, num_layers = config.positive("sliding_window"), spec.num_layers
    first = config.get("max_window_layers", 28)  # layers below it see all
    is_local = layer_types(config, num_layers) or [i >= first for i in range(num_layers)]
    return windowed(spec, [window if local else None for local in is_local])


def _qwen2(config: Config) -> ModelSpec:
    return _read(config, llama_attention(config, qkv_bias=True, output_bias=False))


def _qwen3(config: Config) -> ModelSpec:
    bias = config.flag("attention_bias")
    return _read(config, llama_attention(config, qkv_bias=bias, output_bias=bias, qk_norm=True))


QWEN2 = Family(name="qwen2", read=_qwen2, defaults={"max_position_embeddings": 32768, "num_key_value_heads": 32})
QWEN3 = Family(
    name="qwen3",
    read=_qwen3,
    defaults={"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128},
)
