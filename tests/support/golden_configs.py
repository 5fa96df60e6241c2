"""Tiny configurations of every family that kvferry supports, as transformers makes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

VOCAB = 200
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 10000.0,
}
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 32}
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(4)],
    "long_factor": [1.0 + 0.5 * i for i in range(4)],
    "partial_rotary_factor": 0.5,
}
DEEPSEEK = COMMON | {
    "num_attention_heads": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 24,
}
GPT2: dict[str, Any] = {
    "vocab_size": VOCAB,
    "n_embd": 48,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 512,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
}
# Prompts and answers are several windows long.
GEMMA: dict[str, Any] = COMMON | {
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 9,
    "query_pre_attn_scalar": 24,
    "initializer_range": 0.15,
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "mha": lambda: LlamaConfig(**COMMON, num_attention_heads=4, num_key_value_heads=4),
    "gqa-tied": lambda: LlamaConfig(
        **COMMON, num_attention_heads=6, num_key_value_heads=2, head_dim=16, tie_word_embeddings=True
    ),
    "mqa": lambda: LlamaConfig(**COMMON, num_attention_heads=4, num_key_value_heads=1),
    "llama3-rope": lambda: LlamaConfig(
        **COMMON, num_attention_heads=4, num_key_value_heads=2, head_dim=32, rope_parameters=LLAMA3
    ),
    "linear-rope": lambda: LlamaConfig(
        **COMMON,
        num_attention_heads=4,
        num_key_value_heads=2,
        rope_parameters={"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0},
    ),
    "yarn-rope": lambda: LlamaConfig(
        **COMMON, num_attention_heads=4, num_key_value_heads=2, head_dim=32, rope_parameters=YARN
    ),
    "yarn-rope-other-ramp": lambda: LlamaConfig(
        **COMMON,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        rope_parameters=YARN
        | {"truncate": False, "beta_fast": 16.0, "beta_slow": 2.0, "mscale": 0.7, "mscale_all_dim": 0.3},
    ),
    # Prompts within the original context, answers beyond it: there a token's position decides, as in transformers.
    "dynamic-rope": lambda: LlamaConfig(
        **COMMON | {"max_position_embeddings": 48},
        num_attention_heads=4,
        num_key_value_heads=2,
        rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 500.0},
    ),
    "all-biases": lambda: LlamaConfig(
        **COMMON, num_attention_heads=4, num_key_value_heads=2, attention_bias=True, mlp_bias=True
    ),
    "odd-vocabulary": lambda: LlamaConfig(
        **COMMON | {"vocab_size": VOCAB + 1}, num_attention_heads=4, num_key_value_heads=4, tie_word_embeddings=True
    ),
    "mistral": lambda: MistralConfig(
        **COMMON, num_attention_heads=4, num_key_value_heads=2, head_dim=8, sliding_window=None
    ),
    "qwen2": lambda: Qwen2Config(**COMMON, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**COMMON, num_attention_heads=4, num_key_value_heads=2, head_dim=16),
    "phi3": lambda: Phi3Config(**COMMON, num_attention_heads=4, num_key_value_heads=2),
    "phi3-longrope-short": lambda: Phi3Config(
        **COMMON | {"hidden_size": 64},
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        original_max_position_embeddings=512,
        rope_parameters=LONGROPE | {"factor": 4.0},
    ),
    # An original context of one token: every sequence is a long one, in transformers as in our whole deployment.
    "phi3-longrope-long": lambda: Phi3Config(
        **COMMON | {"hidden_size": 64},
        num_attention_heads=4,
        num_key_value_heads=2,
        original_max_position_embeddings=1,
        rope_parameters=LONGROPE | {"attention_factor": 1.19},
    ),
    "mixtral": lambda: MixtralConfig(
        **COMMON | {"intermediate_size": 32}, num_attention_heads=4, num_key_value_heads=2, num_local_experts=6
    ),
    # Layers: an MLP by its number, one by the step, experts.
    "qwen3-moe-mixed": lambda: Qwen3MoeConfig(
        **COMMON | {"num_hidden_layers": 4},
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        moe_intermediate_size=24,
        num_experts=8,
        num_experts_per_tok=3,
        decoder_sparse_step=2,
        mlp_only_layers=[1],
        norm_topk_prob=False,
    ),
    "qwen3-moe-normalised": lambda: Qwen3MoeConfig(
        **COMMON,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        moe_intermediate_size=24,
        num_experts=8,
        num_experts_per_tok=3,
        norm_topk_prob=True,
    ),
    "deepseek-v2-lite": lambda: DeepseekV2Config(
        **DEEPSEEK,
        q_lora_rank=None,
        n_routed_experts=6,
        num_experts_per_tok=3,
        routed_scaling_factor=1.3,
        rms_norm_eps=1e-3,  # not that of the norms over latents
    ),
    "deepseek-v2-groups": lambda: DeepseekV2Config(
        **DEEPSEEK,
        q_lora_rank=20,
        n_routed_experts=12,
        num_experts_per_tok=3,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        routed_scaling_factor=4.0,
        rope_parameters=YARN | {"mscale": 0.7, "mscale_all_dim": 0.5},
    ),
    "deepseek-v3": lambda: DeepseekV3Config(
        **DEEPSEEK,
        q_lora_rank=20,
        n_routed_experts=12,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        n_shared_experts=1,
        num_key_value_heads=4,
        rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "deepseek-v3-one-group": lambda: DeepseekV3Config(
        **DEEPSEEK | {"first_k_dense_replace": 0},
        q_lora_rank=None,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        norm_topk_prob=False,
        num_key_value_heads=4,
    ),
    "phi3-window": lambda: Phi3Config(**COMMON, num_attention_heads=4, num_key_value_heads=2, sliding_window=9),
    "gpt2": lambda: GPT2Config(**GPT2),
    "gpt2-other-scales": lambda: GPT2Config(**GPT2, scale_attn_weights=False, scale_attn_by_inverse_layer_idx=True),
    "gemma2": lambda: Gemma2Config(**GEMMA, attn_logit_softcapping=5.0, final_logit_softcapping=8.0),
    "gemma3": lambda: Gemma3TextConfig(
        **GEMMA | {"num_key_value_heads": 1},
        layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
}
