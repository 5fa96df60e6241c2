"""Rope as configs describe it. Defaults and derived values are those of transformers' `modeling_rope_utils.py`."""

from __future__ import annotations

import math
from typing import Any

from kvferry.runtime.errors import UnsupportedModel
from kvferry.runtime.model.families.values import number, numbers, positive
from kvferry.runtime.model.spec import ModelSpec, RopeScaling, RopeSpec

_KINDS = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")


def read_rope(rope: dict[str, Any], config: dict[str, Any], head_dim: int) -> RopeSpec:
    """`rope`: the part of the config about it; `config`: the whole, for what may stand outside.

    Raises `UnsupportedModel` for an unknown kind, `CorruptModel` for missing or impossible numbers.
    """
    theta = number(rope if rope.get("rope_theta") is not None else config, "rope_theta", 10000.0)
    dim = int(head_dim * number(rope, "partial_rotary_factor", 1.0))
    return RopeSpec(theta=theta, scaling=_scaling(rope, config), dim=None if dim == head_dim else dim)


def _scaling(rope: dict[str, Any], config: dict[str, Any]) -> RopeScaling:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "su" or (kind == "yarn" and "short_factor" in rope):  # names of earlier Phi-3 files
        kind = "longrope"
    if kind == "default":
        return RopeScaling()
    if kind == "linear":
        return RopeScaling(kind="linear", factor=number(rope, "factor"))
    if kind == "dynamic":
        limit = positive(config, "max_position_embeddings")
        return RopeScaling(kind="dynamic", factor=number(rope, "factor"), original_max_context=limit)
    if kind == "llama3":
        return RopeScaling(
            kind="llama3",
            factor=number(rope, "factor"),
            low_freq_factor=number(rope, "low_freq_factor"),
            high_freq_factor=number(rope, "high_freq_factor"),
            original_max_context=_original(rope, config),
        )
    if kind in ("yarn", "longrope"):
        return (_yarn if kind == "yarn" else _longrope)(rope, config)
    raise UnsupportedModel(f"config.json: rope type {kind!r} is not supported; supported are {', '.join(_KINDS)}")


def _original(rope: dict[str, Any], config: dict[str, Any]) -> int:
    """The context a model was first trained for. What stands outside of the rope's part wins, as in transformers."""
    key = "original_max_position_embeddings"
    holder = config if config.get(key) is not None else rope
    return positive(holder, key, positive(config, "max_position_embeddings"))


def _factor(rope: dict[str, Any], config: dict[str, Any]) -> float:
    return number(rope, "factor", positive(config, "max_position_embeddings") / _original(rope, config))


def _yarn(rope: dict[str, Any], config: dict[str, Any]) -> RopeScaling:
    factor = _factor(rope, config)
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        usual = yarn_mscale(factor, number(rope, "mscale")) / yarn_mscale(factor, number(rope, "mscale_all_dim"))
    else:
        usual = yarn_mscale(factor)
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_max_context=_original(rope, config),
        beta_fast=number(rope, "beta_fast", 32.0),
        beta_slow=number(rope, "beta_slow", 1.0),
        truncate=bool(rope.get("truncate", True)),
        attention_factor=number(rope, "attention_factor", usual),
    )


def yarn_mscale(factor: float, weight: float = 1.0) -> float:
    """How much sharper attention has to be in a context stretched by `factor`. Source: YaRN, section 3.4."""
    return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0


def _longrope(rope: dict[str, Any], config: dict[str, Any]) -> RopeScaling:
    factor, original = _factor(rope, config), _original(rope, config)
    usual = 1.0
    if factor > 1.0 and original > 1:
        usual = math.sqrt(1 + math.log(factor) / math.log(original))
    return RopeScaling(
        kind="longrope",
        factor=factor,
        original_max_context=original,
        short_factors=numbers(rope, "short_factor"),
        long_factors=numbers(rope, "long_factor"),
        attention_factor=number(rope, "attention_factor", usual),
    )


def reach(spec: ModelSpec) -> int:
    """Tokens of the longest sequence: kinds of rope that stretch a context say so beside `max_position_embeddings`."""
    scalings = [layer.attention.rope.scaling for layer in spec.layers if layer.attention.rope is not None]
    stretched = [int(s.original_max_context * s.factor) for s in scalings if s.kind in ("dynamic", "yarn")]
    return max(spec.max_context, *stretched) if stretched else spec.max_context
