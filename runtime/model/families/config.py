"""Typed reading of a `config.json`: every fault names the field and its value."""

from __future__ import annotations

import math
from typing import Any, NoReturn

from kvferry.runtime.errors import CorruptModel, UnsupportedModel
from kvferry.runtime.model.spec import DTYPES, RopeScaling, RopeSpec


class Config:
    """A `config.json` with its family's defaults filled in, and the `generation_config.json` beside it."""

    def __init__(self, values: dict[str, Any], generation: dict[str, Any], architecture: str) -> None:
        self.values = values
        self.generation = generation
        self.architecture = architecture

    def get(self, key: str, default: Any = None) -> Any:
        return self.values.get(key, default)

    def refuse(self, key: str, why: str) -> NoReturn:
        raise UnsupportedModel(f"config.json: {key}={self.get(key)!r} is not supported; {why}")

    def positive(self, key: str, default: int | None = None) -> int:
        return _positive(self.values, key, default)

    def number(self, key: str, default: float | None = None) -> float:
        return _number(self.values, key, default)

    def flag(self, key: str, default: bool = False) -> bool:
        return bool(self.get(key, default))

    def refuse_common(self) -> None:
        """What no family understands yet. Raises `UnsupportedModel`."""
        if self.get("quantization_config") is not None:
            self.refuse("quantization_config", "use an unquantised folder or a .gguf file")
        if self.get("hidden_act", "silu") not in ("silu", "swish"):
            self.refuse("hidden_act", "supported is silu")
        if self.get("partial_rotary_factor", 1.0) != 1.0:
            self.refuse("partial_rotary_factor", "supported is 1.0")

    def refuse_windows(self) -> None:
        """For families whose layers are all alike. Raises `UnsupportedModel`."""
        if "sliding_attention" in (self.get("layer_types") or []):
            self.refuse("layer_types", "supported is full attention in every layer")

    def rope(self) -> RopeSpec:
        """transformers 4 has `rope_theta` and `rope_scaling`; transformers 5 holds both in `rope_parameters`."""
        rope: dict[str, Any] = {}
        for key in ("rope_scaling", "rope_parameters"):
            value = self.get(key) or {}
            if not isinstance(value, dict):
                raise CorruptModel(f"config.json: {key}={value!r} must be an object")
            if any(isinstance(part, dict) for part in value.values()):
                raise UnsupportedModel(
                    f"config.json: {key}={value!r}: rope that differs between layers is not supported"
                )
            rope |= value
        if rope.get("partial_rotary_factor", 1.0) != 1.0:
            raise UnsupportedModel(
                f"config.json: partial_rotary_factor={rope['partial_rotary_factor']!r} is not supported"
            )
        theta = _number(rope if "rope_theta" in rope else self.values, "rope_theta", 10000.0)
        return RopeSpec(theta=theta, scaling=_scaling(rope))

    def eos_token_ids(self) -> list[int]:
        """`generation_config.json` overrules `config.json`, as in transformers."""
        return hf_eos_token_ids(self.values, self.generation)

    def dtype(self) -> str:
        dtype = self.get("dtype") or self.get("torch_dtype") or "float32"
        if dtype not in DTYPES:
            raise UnsupportedModel(f"config.json: dtype={dtype!r} is not supported; supported are {', '.join(DTYPES)}")
        return str(dtype)


def _scaling(rope: dict[str, Any]) -> RopeScaling:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return RopeScaling()
    if kind == "linear":
        return RopeScaling(kind="linear", factor=_number(rope, "factor"))
    if kind == "llama3":
        return RopeScaling(
            kind="llama3",
            factor=_number(rope, "factor"),
            low_freq_factor=_number(rope, "low_freq_factor"),
            high_freq_factor=_number(rope, "high_freq_factor"),
            original_max_context=_positive(rope, "original_max_position_embeddings"),
        )
    raise UnsupportedModel(f"config.json: rope type {kind!r} is not supported; supported are default, linear, llama3")


def hf_eos_token_ids(config: dict[str, Any], generation: dict[str, Any]) -> list[int]:
    """`generation_config.json` overrules `config.json`, as in transformers."""
    value = generation.get("eos_token_id", config.get("eos_token_id"))
    if value is None:
        value = config.get("eos_token_id")
    values = value if isinstance(value, list) else [] if value is None else [value]
    for token in values:
        if not isinstance(token, int):
            raise CorruptModel(f"config.json: eos_token_id={value!r} must be an integer or a list of integers")
    return list(values)


def _positive(values: dict[str, Any], key: str, default: int | None = None) -> int:
    value = values.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CorruptModel(f"config.json: {key}={value!r} must be a positive integer")
    return value


def _number(values: dict[str, Any], key: str, default: float | None = None) -> float:
    value = values.get(key)
    value = default if value is None else value
    if not isinstance(value, int | float) or not 0.0 < value < math.inf:
        raise CorruptModel(f"config.json: {key}={value!r} must be a positive number")
    return float(value)
