"""Qwen3-MoE: Qwen3's attention; some layers have a mixture of experts, some may have an MLP."""

from __future__ import annotations

from kvferry.runtime.model.families.config import Config
from kvferry.runtime.model.families.family import Family
from kvferry.runtime.model.families.llama import llama_attention, llama_mlp, llama_model
from kvferry.runtime.model.families.moe import moe_source
from kvferry.runtime.model.spec import LayerSpec, ModelSpec, MoESpec


def _read(config: Config) -> ModelSpec:
    config.refuse_common()
    config.refuse_windows()
    if config.get("use_sliding_window"):
        config.refuse("use_sliding_window", "supported is false")
    bias = config.flag("attention_bias")
    attention = llama_attention(config, qkv_bias=bias, output_bias=bias, qk_norm=True)
    dense = llama_mlp(config)
    moe = MoESpec(
        # transformers 5 saves it under the second name
        num_experts=config.positive("num_experts", config.positive("num_local_experts", 128)),
        num_active=config.positive("num_experts_per_tok"),
        inner_size=config.positive("moe_intermediate_size"),
        activation=dense.activation,
        normalised=config.flag("norm_topk_prob"),
    )
    step, without = config.positive("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    return llama_model(
        config,
        tuple(
            LayerSpec(attention=attention, mlp=dense if i in without or (i + 1) % step else moe)
            for i in range(config.positive("num_hidden_layers"))
        ),
    )


QWEN3_MOE = Family(
    name="qwen3_moe",
    read=_read,
    source=moe_source,
    defaults={
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "intermediate_size": 6144,
    },
)
