"""Frequencies of every kind of rope against transformers, at the sizes of published models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kvferry.runtime.errors import CorruptModel
from kvferry.runtime.model.families import from_hf_config
from kvferry.runtime.model.rotation import Rotation, make_rotation
from kvferry.runtime.model.spec import ModelSpec

pytestmark = pytest.mark.golden
BASE: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 64,
    "rms_norm_eps": 1e-6,
}
LONG = {"long_factor": [1.0 + 0.9 * i for i in range(48)], "short_factor": [1.0 + 0.05 * i for i in range(48)]}
# name: (family, max_position_embeddings, rope's part of the config)
PUBLISHED: dict[str, tuple[str, int, dict[str, Any]]] = {
    "Llama-3.1": (
        "Llama",
        131072,
        {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "Qwen2.5-128k": (
        "Qwen2",
        32768,
        {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768},
    ),
    "yarn-by-ratio": (
        "Llama",
        65536,
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "original_max_position_embeddings": 4096},
    ),
    "DeepSeek-like": (
        "Llama",
        163840,
        {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 40.0,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 0.8,
            "original_max_position_embeddings": 4096,
        },
    ),
    "gpt-oss-like": (
        "Llama",
        131072,
        {
            "rope_type": "yarn",
            "rope_theta": 15e4,
            "factor": 32.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    ),
    "linear": ("Llama", 16384, {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}),
    "dynamic": ("Llama", 2048, {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
    "Phi-4-mini": (
        "Phi3",
        131072,
        {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 4096,
            **LONG,
        },
    ),
}


def read(name: str) -> ModelSpec:
    family, limit, rope = PUBLISHED[name]
    config = BASE | {"architectures": [f"{family}ForCausalLM"], "max_position_embeddings": limit}
    return from_hf_config(config | {"rope_parameters": rope})


def rotation(spec: ModelSpec) -> Rotation:
    return make_rotation(spec.kv_shape.rope, spec.kv_shape.head_dim, spec.max_context, torch.device("cpu"))


def expected(name: str, length: int | None) -> tuple[torch.Tensor, float]:
    import transformers

    family, limit, rope = PUBLISHED[name]
    config = getattr(transformers, f"{family}Config")(
        **BASE, max_position_embeddings=limit, rope_parameters=dict(rope), pad_token_id=0
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"), seq_len=length)
    return frequencies, factor


@pytest.mark.parametrize("name", PUBLISHED)
def test_angles_equal_transformers(name: str) -> None:
    """A ramp that is shifted by an index, or a wrong default, shows only in long prompts."""
    spec = read(name)
    length = spec.max_context
    frequencies, factor = expected(name, length)
    last = torch.tensor([length - 1])
    cos, sin = rotation(spec).angles(last, torch.float32)[:, 0, 0]
    angle = (length - 1) * frequencies.double()
    rotated = len(frequencies)
    # float32 cannot tell an angle of 100 000 radians better than to 0.01
    tolerance = (length * 4e-7 + 1e-6) * factor
    torch.testing.assert_close(cos[:rotated].double(), angle.cos() * factor, rtol=0, atol=tolerance)
    torch.testing.assert_close(sin[:rotated].double(), angle.sin() * factor, rtol=0, atol=tolerance)
    assert torch.equal(cos[rotated:], torch.ones(len(cos) - rotated))
    assert torch.equal(sin[rotated:], torch.zeros(len(sin) - rotated))
    if name != "dynamic":
        torch.testing.assert_close(rotation(spec).frequencies[:rotated], frequencies, rtol=2e-6, atol=0)


def test_contexts_are_stretched_as_published() -> None:
    """Refusing the prompts for which a model is scaled, or admitting ones that it cannot tell apart."""
    reached = {name: read(name).max_context for name in PUBLISHED}
    assert reached["Qwen2.5-128k"] == 131072
    assert reached["dynamic"] == 4096
    assert reached["linear"] == 16384
    assert reached["Phi-4-mini"] == 131072


@pytest.mark.parametrize("name", ["dynamic", "Phi-4-mini", "Qwen2.5-128k"])
def test_angles_depend_on_the_position_alone(name: str) -> None:
    """KV that depends on what follows it cannot be shared, moved or resumed: the same tokens, other answers."""
    rope = rotation(read(name))
    positions = torch.tensor([0, 1, 2047, 2048, 3000, 4095])
    together = rope.angles(positions, torch.float32)
    for i, position in enumerate(positions):
        assert torch.equal(rope.angles(position[None], torch.float32)[:, 0], together[:, i])


def test_dynamic_changes_nothing_within_the_original_context() -> None:
    rope = rotation(read("dynamic"))
    positions = torch.arange(2048)
    plain = Rotation(rope.frequencies)
    assert torch.equal(rope.angles(positions, torch.float32), plain.angles(positions, torch.float32))
    assert not torch.equal(
        rope.angles(positions + 1, torch.float32)[:, -1], plain.angles(positions + 1, torch.float32)[:, -1]
    )


def test_longrope_factors_hold_for_a_deployment() -> None:
    """Two deployments of one folder with different factors that take each other's blocks for their own."""
    import msgspec

    spec = read("Phi-4-mini")
    short = msgspec.structs.replace(spec, max_context=4096)
    for deployment, length, word in ((spec, 4097, "long"), (short, 4096, "short")):
        torch.testing.assert_close(
            rotation(deployment).frequencies[:48], expected("Phi-4-mini", length)[0], rtol=2e-6, atol=0
        )
        assert deployment.content_fields == {"rope factors": word}
    assert read("Qwen2.5-128k").content_fields == {}


def test_factors_that_do_not_fit_are_named() -> None:
    """A broadcast over too few factors would compute another model."""
    family, limit, rope = PUBLISHED["Phi-4-mini"]
    config = BASE | {"architectures": [f"{family}ForCausalLM"], "max_position_embeddings": limit}
    with pytest.raises(CorruptModel, match="longrope has 2 long factors, needs 48"):
        from_hf_config(config | {"rope_parameters": rope | {"long_factor": [1.0, 2.0]}})
