"""Mixtral: Mistral's attention, a mixture of experts in every layer."""

from __future__ import annotations

from kvferry.runtime.model.families.config import Config
from kvferry.runtime.model.families.family import Family, split, usual_source
from kvferry.runtime.model.families.llama import llama_attention, uniform
from kvferry.runtime.model.families.mistral import refuse_window
from kvferry.runtime.model.parts import Source
from kvferry.runtime.model.spec import ModelSpec, MoESpec

_EXPERT = {"gate": "w1", "up": "w3", "down": "w2"}


def _read(config: Config) -> ModelSpec:
    config.refuse_common()
    config.refuse_windows()
    refuse_window(config)
    moe = MoESpec(
        num_experts=config.positive("num_local_experts"),
        num_active=config.positive("num_experts_per_tok"),
        inner_size=config.positive("intermediate_size"),
        activation=config.activation("hidden_act", "silu"),
    )
    return uniform(config, llama_attention(config, qkv_bias=False, output_bias=False), moe)


def _source(spec: ModelSpec, part: str) -> Source:
    number, stem, suffix = split(part)
    where = f"model.layers.{number}.block_sparse_moe"
    if stem == "mlp.router":
        return Source(f"{where}.gate.{suffix}")
    if stem.startswith("mlp.experts."):
        _, _, expert, name = stem.split(".")
        return Source(f"{where}.experts.{expert}.{_EXPERT[name]}.{suffix}")
    return usual_source(spec, part)


MIXTRAL = Family(
    name="mixtral",
    read=_read,
    source=_source,
    defaults={
        "max_position_embeddings": 4096 * 32,
        "num_key_value_heads": 8,
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
    },
)
