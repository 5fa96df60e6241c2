"""Typed reading of a `config.json`: every fault names the field and its value."""

from __future__ import annotations

from typing import Any, NoReturn

from kvferry.runtime.errors import CorruptModel, UnsupportedModel
from kvferry.runtime.model.families.rope import read_rope
from kvferry.runtime.model.families.values import number, positive
from kvferry.runtime.model.spec import DTYPES, Activation, RopeSpec

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


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
        return positive(self.values, key, default)

    def number(self, key: str, default: float | None = None) -> float:
        return number(self.values, key, default)

    def flag(self, key: str, default: bool = False) -> bool:
        return bool(self.get(key, default))

    def refuse_common(self) -> None:
        """What no family understands yet. Raises `UnsupportedModel`."""
        if self.get("quantization_config") is not None:
            self.refuse("quantization_config", "use an unquantised folder or a .gguf file")

    def refuse_windows(self) -> None:
        """For families whose layers are all alike. Raises `UnsupportedModel`."""
        if "sliding_attention" in (self.get("layer_types") or []):
            self.refuse("layer_types", "supported is full attention in every layer")

    def activation(self, key: str, default: str) -> Activation:
        name = self.get(key, default)
        if name not in _ACTIVATIONS:
            self.refuse(key, f"supported are {', '.join(_ACTIVATIONS)}")
        return _ACTIVATIONS[name]

    def rope(self, head_dim: int, *, partial: bool = False) -> RopeSpec:
        """transformers 4 has `rope_theta` and `rope_scaling`; transformers 5 holds both in `rope_parameters`.

        `partial`: whether the family can rotate less than a whole head.
        """
        rope = self.rope_values()
        nested = {key: value for key, value in rope.items() if isinstance(value, dict)}
        if nested:
            raise UnsupportedModel(f"config.json: rope that differs between layers is not supported here: {nested!r}")
        share = rope.get("partial_rotary_factor") or self.get("partial_rotary_factor") or 1.0
        rope["partial_rotary_factor"] = share
        if share != 1.0 and not partial:
            raise UnsupportedModel(f"config.json: partial_rotary_factor={share!r} is not supported; supported is 1.0")
        return self.rope_from(rope, head_dim)

    def rope_from(self, rope: dict[str, Any], head_dim: int) -> RopeSpec:
        return read_rope(rope, self.values, head_dim)

    def rope_values(self) -> dict[str, Any]:
        rope: dict[str, Any] = {}
        for key in ("rope_scaling", "rope_parameters"):
            value = self.get(key) or {}
            if not isinstance(value, dict):
                raise CorruptModel(f"config.json: {key}={value!r} must be an object")
            rope |= value
        return rope

    def eos_token_ids(self) -> list[int]:
        """`generation_config.json` overrules `config.json`, as in transformers."""
        return hf_eos_token_ids(self.values, self.generation)

    def dtype(self) -> str:
        dtype = self.get("dtype") or self.get("torch_dtype") or "float32"
        if dtype not in DTYPES:
            raise UnsupportedModel(f"config.json: dtype={dtype!r} is not supported; supported are {', '.join(DTYPES)}")
        return str(dtype)


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
