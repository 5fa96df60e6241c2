"""Phi-3 and Phi-4: Llama's layers with fused projections; only part of a head may be rotated."""

from __future__ import annotations

from kvferry.runtime.model.families.config import Config
from kvferry.runtime.model.families.family import Family, split, usual_source
from kvferry.runtime.model.families.llama import llama_mlp, uniform
from kvferry.runtime.model.parts import Source
from kvferry.runtime.model.spec import AttentionSpec, ModelSpec


def _read(config: Config) -> ModelSpec:
    config.refuse_common()
    config.refuse_windows()
    num_heads = config.positive("num_attention_heads")
    head_dim = config.positive("head_dim", config.positive("hidden_size") // num_heads)
    attention = AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=config.positive("num_key_value_heads", num_heads),
        head_dim=head_dim,
        rope=config.rope(head_dim, partial=True),
        window=None if config.get("sliding_window") is None else config.positive("sliding_window"),
    )
    return uniform(config, attention, llama_mlp(config))


def _source(spec: ModelSpec, part: str) -> Source:
    number, stem, suffix = split(part)
    if number is None:
        return usual_source(spec, part)
    attention, inner = spec.layers[number].attention, spec.layers[number].mlp.inner_size
    q, kv = attention.num_heads * attention.head_dim, attention.num_kv_heads * attention.head_dim
    fused = {
        "attention.q": ("self_attn.qkv_proj", 0),
        "attention.k": ("self_attn.qkv_proj", q),
        "attention.v": ("self_attn.qkv_proj", q + kv),
        "mlp.gate": ("mlp.gate_up_proj", 0),
        "mlp.up": ("mlp.gate_up_proj", inner),
    }
    if stem not in fused:
        return usual_source(spec, part)
    name, first_row = fused[stem]
    return Source(f"model.layers.{number}.{name}.{suffix}", first_row=first_row)


PHI3 = Family(
    name="phi3",
    read=_read,
    source=_source,
    defaults={"max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
)
