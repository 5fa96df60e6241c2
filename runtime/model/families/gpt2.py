"""GPT-2: learned positions, layer norms, an MLP without a gate, weights stored as `[in, out]`."""

from __future__ import annotations

from kvferry.runtime.model.families.config import Config
from kvferry.runtime.model.families.family import Family, split
from kvferry.runtime.model.parts import Source
from kvferry.runtime.model.spec import AttentionSpec, LayerSpec, MLPSpec, ModelSpec, NormSpec

_TOP = {"embedding": "transformer.wte", "positions": "transformer.wpe", "norm": "transformer.ln_f", "head": "lm_head"}
_LAYER = {
    "attention_norm": "ln_1",
    "mlp_norm": "ln_2",
    "attention.q": "attn.c_attn",
    "attention.k": "attn.c_attn",
    "attention.v": "attn.c_attn",
    "attention.o": "attn.c_proj",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}


def _read(config: Config) -> ModelSpec:
    config.refuse_common()
    if config.flag("add_cross_attention"):
        config.refuse("add_cross_attention", "supported is false")
    hidden_size, num_positions = config.positive("n_embd"), config.positive("n_positions")
    mlp = MLPSpec(
        inner_size=config.positive("n_inner", 4 * hidden_size),
        activation=config.activation("activation_function", "gelu_new"),
        gated=False,
        bias=True,
    )
    return ModelSpec(
        architecture=config.architecture,
        vocab_size=config.positive("vocab_size"),
        hidden_size=hidden_size,
        layers=tuple(LayerSpec(attention=_attention(config, i), mlp=mlp) for i in range(config.positive("n_layer"))),
        norm=NormSpec(eps=config.number("layer_norm_epsilon", 1e-5), kind="layer"),
        tied_embeddings=config.flag("tie_word_embeddings", True),
        max_context=num_positions,
        eos_token_ids=config.eos_token_ids(),
        bos_token_id=config.get("bos_token_id"),
        dtype=config.dtype(),
        num_positions=num_positions,
    )


def _attention(config: Config, number: int) -> AttentionSpec:
    num_heads = config.positive("n_head")
    head_dim = config.positive("n_embd") // num_heads
    scale = head_dim**-0.5 if config.flag("scale_attn_weights", True) else 1.0
    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        rope=None,
        qkv_bias=True,
        output_bias=True,
        scale=scale / (number + 1) if config.flag("scale_attn_by_inverse_layer_idx") else scale,
    )


def _source(spec: ModelSpec, part: str) -> Source:
    number, stem, suffix = split(part)
    if number is None:
        return Source(f"{_TOP[stem]}.{suffix}")
    fused = {"attention.k": spec.hidden_size, "attention.v": 2 * spec.hidden_size}
    return Source(
        f"transformer.h.{number}.{_LAYER[stem]}.{suffix}",
        first_row=fused.get(stem, 0),
        transposed=suffix == "weight" and not stem.endswith("norm"),
    )


GPT2 = Family(
    name="gpt2",
    read=_read,
    source=_source,
    renames=(("transformer.", "transformer."), ("lm_head.", "lm_head."), ("", "transformer.")),
    defaults={"n_positions": 1024, "bos_token_id": 50256, "eos_token_id": 50256},
)
