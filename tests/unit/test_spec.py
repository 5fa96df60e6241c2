"""Model configurations: read as transformers reads them, refused by name where kvferry lacks something."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.runtime.errors import CorruptModel, InvalidArgument, UnsupportedModel
from kvferry.runtime.model.families import from_hf_config
from kvferry.runtime.model.parts import num_parameters
from kvferry.runtime.model.spec import ModelSpec, RopeScaling, RopeSpec

pytestmark = pytest.mark.core
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "vocab_size": 320,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
    "rope_theta": 500000.0,
}
SCALING = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


def spec(**changes: Any) -> ModelSpec:
    return from_hf_config(LLAMA | changes)


def scaling(of: ModelSpec) -> RopeScaling:
    assert of.kv_shape.rope is not None
    return of.kv_shape.rope.scaling


def test_old_and_new_config_keys_mean_the_same() -> None:
    """transformers 5 moved rope keys; a folder saved by either must give the same frequencies."""
    new = {k: v for k, v in LLAMA.items() if k not in ("rope_theta", "torch_dtype")} | {"dtype": "bfloat16"}
    assert from_hf_config(new | {"rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}}) == spec()
    old = spec(rope_scaling={"rope_type": "llama3", **SCALING})
    assert from_hf_config(new | {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **SCALING}}) == old
    assert scaling(old) == RopeScaling(
        kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_context=64
    )
    assert scaling(spec(rope_scaling={"type": "linear", "factor": 2})) == RopeScaling(kind="linear", factor=2.0)


def test_silent_config_means_what_transformers_assumes() -> None:
    """A guess of ours where a config is silent computes another model."""
    bare = {k: v for k, v in LLAMA.items() if k not in ("num_key_value_heads", "rope_theta", "max_position_embeddings")}
    read = from_hf_config(bare)
    attention, rope = read.kv_shape, read.kv_shape.rope
    assert rope is not None
    assert (attention.num_kv_heads, rope.theta, read.max_context, attention.head_dim) == (8, 10000.0, 2048, 8)
    assert not read.tied_embeddings
    assert from_hf_config(LLAMA | {"architectures": ["Qwen3ForCausalLM"]}).kv_shape.head_dim == 128


def test_families_differ_where_they_must() -> None:
    """A forgotten bias or norm changes every logit."""
    flags = {
        name: (one.attention.qkv_bias, one.attention.output_bias, one.mlp.bias, one.attention.qk_norm)
        for name in ("Llama", "Mistral", "Qwen2", "Qwen3")
        for one in spec(
            architectures=[f"{name}ForCausalLM"], attention_bias=True, mlp_bias=True, sliding_window=None
        ).layers[:1]
    }
    assert flags == {
        "Llama": (True, True, True, False),
        "Mistral": (False, False, False, False),
        "Qwen2": (True, False, False, False),
        "Qwen3": (True, True, False, True),
    }
    assert spec(architectures=["Qwen2ForCausalLM"]).kv_shape.qkv_bias


def test_names_of_earlier_phi3_files() -> None:
    """`su` and `yarn` are what longrope was called before it was published under its name."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    for kind in ("su", "yarn", "longrope"):
        phi = spec(
            architectures=["Phi3ForCausalLM"],
            original_max_position_embeddings=64,
            rope_scaling={"type": kind, **factors},
        )
        assert phi.kv_shape.rope is not None
        assert (phi.kv_shape.rope.scaling.kind, phi.kv_shape.rope.scaling.factor) == ("longrope", 4.0)


def test_gemma3_configs_of_every_age() -> None:
    """transformers 4 said rope and local layers otherwise, and the multimodal folder holds it all one level below."""
    names = ("architectures", "rope_theta", "max_position_embeddings", "hidden_act")
    bare = {k: v for k, v in LLAMA.items() if k not in names} | {"head_dim": 16, "num_hidden_layers": 7}
    scaling = {"rope_type": "linear", "factor": 8.0}
    old = bare | {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": scaling, "sliding_window": 512}
    read = from_hf_config(old | {"architectures": ["Gemma3ForCausalLM"], "sliding_window_pattern": 3})
    layers = [layer.attention for layer in read.layers]
    assert [layer.window for layer in layers] == [512, 512, None, 512, 512, None, 512]
    assert [layer.rope for layer in layers[:3]] == [
        *[RopeSpec(theta=1e4)] * 2,
        RopeSpec(theta=1e6, scaling=RopeScaling(kind="linear", factor=8.0)),
    ]
    assert (read.embedding_scale, read.norm.offset, read.tied_embeddings, read.max_context) == (8.0, 1.0, True, 131072)
    kinds = ["full_attention" if layer.window is None else "sliding_attention" for layer in layers]
    new = bare | {"sliding_window": 512, "layer_types": kinds}
    new["rope_parameters"] = {
        "full_attention": {"rope_theta": 1e6, **scaling},
        "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
    }
    assert from_hf_config(new | {"architectures": ["Gemma3ForCausalLM"]}) == read
    above = {"architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106], "vision_config": {}}
    inner = {k: v for k, v in new.items() if k not in ("eos_token_id", "torch_dtype")}
    multimodal = from_hf_config(above | {"text_config": inner, "torch_dtype": "bfloat16"})
    assert (multimodal.layers, multimodal.eos_token_ids, multimodal.dtype) == (read.layers, [1, 106], "bfloat16")


def test_eos_of_generation_config_wins() -> None:
    """Chat models list their end of turn only there; without it answers never end."""
    assert from_hf_config(LLAMA, {"eos_token_id": [5, 2]}).eos_token_ids == [5, 2]
    assert from_hf_config(LLAMA, {}).eos_token_ids == [2]
    assert spec(eos_token_id=None).eos_token_ids == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["MambaForCausalLM"]},
            r"architectures=\['MambaForCausalLM'\].*supported are DeepseekV2ForCausalLM.*LlamaForCausalLM",
        ),
        ({"architectures": None}, "architectures=None"),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": ["chunked_attention"] * 2,
            },
            "layer_types=.*full_attention and sliding",
        ),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"rope_scaling": {"rope_type": "axial", "factor": 4.0}}, "rope type 'axial'.*yarn, longrope"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope that differs between layers"),
        ({"hidden_act": "relu"}, "hidden_act='relu'.*silu"),
        ({"architectures": ["GPT2LMHeadModel"], "add_cross_attention": True}, "add_cross_attention=True"),
        ({"architectures": ["Gemma3ForCausalLM"], "attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        ({"architectures": ["Gemma2ForCausalLM"], "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"architectures": ["Gemma3ForCausalLM"], "layer_types": ["full_attention"]}, r"layer_types=.*supported are 2"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"torch_dtype": "float64"}, "dtype='float64'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    ],
)
def test_unsupported_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    """Loading it anyway gives fluent nonsense."""
    with pytest.raises(UnsupportedModel, match=message):
        spec(**changes)


@pytest.mark.parametrize(
    ("name", "changes", "windows"),
    [
        ("Mistral", {"sliding_window": 128}, [128, 128]),
        ("Mistral", {"sliding_window": None}, [None, None]),
        ("Mistral", {"max_position_embeddings": 8192}, [4096, 4096]),
        ("Mistral", {}, [None, None]),  # 4096 unless it says otherwise, and that is more than it can take
        ("Qwen2", {"sliding_window": 128}, [None, None]),
        ("Qwen2", {"sliding_window": 128, "use_sliding_window": True}, [None, None]),
        ("Qwen2", {"sliding_window": 128, "use_sliding_window": True, "max_window_layers": 1}, [None, 128]),
        (
            "Qwen3",
            {
                "sliding_window": 128,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            [128, None],
        ),
    ],
)
def test_windows_of_layers(name: str, changes: dict[str, Any], windows: list[int | None]) -> None:
    """Fault: a window that is ignored is right until the first prompt that is longer."""
    read = spec(architectures=[f"{name}ForCausalLM"], **changes)
    assert [layer.attention.window for layer in read.layers] == windows


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "hidden_size=None must be a positive integer"),
        ({"vocab_size": "320"}, "vocab_size='320'"),
        ({"num_hidden_layers": True}, "num_hidden_layers=True"),
        ({"num_key_value_heads": 3}, "8 attention heads are no multiple of 3 KV heads"),
        ({"head_dim": 7}, "head dimension 7 must be even"),
        ({"rope_scaling": [1]}, r"rope_scaling=\[1\] must be an object"),
        ({"rms_norm_eps": 0}, "rms_norm_eps=0"),
        ({"eos_token_id": 320}, r"eos token 320 is outside the vocabulary \[0, 320\)"),
        ({"eos_token_id": "</s>"}, "eos_token_id='</s>'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor=None"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "factor=None"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": ["a"]}}, r"short_factor=\['a'\]"),
        ({"architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 0.4}, "3 rotated dimensions must be even"),
    ],
)
def test_impossible_values_are_named(changes: dict[str, Any], message: str) -> None:
    """A damaged config must not become an exception deep in torch."""
    with pytest.raises(CorruptModel, match=message):
        spec(**changes)


def test_tensor_parallel_sizes() -> None:
    """Uneven shards would lose rows; KV heads may repeat."""
    read = spec()
    for size in (1, 2, 4, 8):
        read.check_tensor_parallel(size)
        assert read.kv_layout(16, "float32", size).rank_heads == max(1, 2 // size)
    with pytest.raises(InvalidArgument, match=r"size=3: must divide the model's 8 attention heads.*1, 2, 4, 8"):
        read.check_tensor_parallel(3)
    with pytest.raises(InvalidArgument, match="at least 1"):
        read.check_tensor_parallel(0)
    with pytest.raises(InvalidArgument, match="100 intermediate channels"):
        spec(intermediate_size=100).check_tensor_parallel(8)
    with pytest.raises(InvalidArgument, match="6 KV heads, or be a multiple"):
        spec(num_attention_heads=12, num_key_value_heads=6, hidden_size=96).check_tensor_parallel(4)


def test_parameters_are_counted_once_when_tied() -> None:
    untied, tied = spec(), spec(tie_word_embeddings=True)
    assert num_parameters(untied) - num_parameters(tied) == 320 * 64
    layer = 64 * 64 * 2 + 16 * 64 * 2 + 3 * 64 * 96 + 2 * 64
    assert num_parameters(tied) == 320 * 64 + 2 * layer + 64
