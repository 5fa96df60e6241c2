"""Llama 1 to 3.x, SmolLM2: the decoder from which the others differ by a few words."""

from __future__ import annotations

from kvferry.runtime.model.families.config import Config
from kvferry.runtime.model.families.family import Family
from kvferry.runtime.model.spec import AttentionSpec, LayerSpec, MLPSpec, ModelSpec, MoESpec, NormSpec


def llama_attention(config: Config, *, qkv_bias: bool, output_bias: bool, qk_norm: bool = False) -> AttentionSpec:
    num_heads = config.positive("num_attention_heads")
    head_dim = config.positive("head_dim", config.positive("hidden_size") // num_heads)
    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=config.positive("num_key_value_heads", num_heads),
        head_dim=head_dim,
        rope=config.rope(head_dim),
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        qk_norm=qk_norm,
    )


def llama_mlp(config: Config, *, bias: bool = False) -> MLPSpec:
    return MLPSpec(
        inner_size=config.positive("intermediate_size"), activation=config.activation("hidden_act", "silu"), bias=bias
    )


def llama_model(config: Config, layers: tuple[LayerSpec, ...]) -> ModelSpec:
    """All around the layers as Llama has it."""
    return ModelSpec(
        architecture=config.architecture,
        vocab_size=config.positive("vocab_size"),
        hidden_size=config.positive("hidden_size"),
        layers=layers,
        norm=NormSpec(eps=config.number("rms_norm_eps", 1e-6)),
        tied_embeddings=config.flag("tie_word_embeddings"),
        max_context=config.positive("max_position_embeddings"),
        eos_token_ids=config.eos_token_ids(),
        bos_token_id=config.get("bos_token_id"),
        dtype=config.dtype(),
    )


def uniform(config: Config, attention: AttentionSpec, mlp: MLPSpec | MoESpec) -> ModelSpec:
    """All layers alike."""
    layer = LayerSpec(attention=attention, mlp=mlp)
    return llama_model(config, (layer,) * config.positive("num_hidden_layers"))


def _read(config: Config) -> ModelSpec:
    config.refuse_common()
    config.refuse_windows()
    bias = config.flag("attention_bias")
    mlp = llama_mlp(config, bias=config.flag("mlp_bias"))
    return uniform(config, llama_attention(config, qkv_bias=bias, output_bias=bias), mlp)


LLAMA = Family(name="llama", read=_read, defaults={"max_position_embeddings": 2048})
