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
    for key, supported in (
        ("add_cross_attention", False),
        ("scale_attn_by_inverse_layer_idx", False),
        ("scale_attn_weights", True),
    ):
        if config.flag(key, supported) != supported:
            config.refuse(key, f"supported is {str(supported).lower()}")
    hidden_size, num_heads = config.positive("n_embd"), config.positive("n_head")
    layer = LayerSpec(
        attention=AttentionSpec(
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=hidden_size // num_heads,
            rope=None,
            qkv_bias=True,
            output_bias=True,
        ),
        mlp=MLPSpec(
            inner_size=config.positive("n_inner", 4 * hidden_size),
            activation=config.activation("activation_function", "gelu_new"),
            gated=False,
            bias=True,
        ),
    )
    num_positions = config.positive("n_positions")
    return ModelSpec(
        architecture=config.architecture,
        vocab_size=config.positive("vocab_size"),
        hidden_size=hidden_size,
        layers=(layer,) * config.positive("n_layer"),
        norm=NormSpec(eps=config.number("layer_norm_epsilon", 1e-5), kind="layer"),
        tied_embeddings=config.flag("tie_word_embeddings", True),
        max_context=num_positions,
        eos_token_ids=config.eos_token_ids(),
        bos_token_id=config.get("bos_token_id"),
        dtype=config.dtype(),
        num_positions=num_positions,
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
    prefix="transformer.",
    defaults={"n_positions": 1024, "bos_token_id": 50256, "eos_token_id": 50256},
)
