"""What a decoder of the Llama family looks like, read from its files. Everything unknown is refused by name."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from kvferry.runtime.errors import CorruptModel, InvalidArgument, UnsupportedModel
from kvferry.runtime.kv.layout import KVLayout

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
# What transformers assumes where a config.json of that architecture is silent.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"max_position_embeddings": 4096 * 32, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"max_position_embeddings": 32768, "num_key_value_heads": 32},
    "qwen3": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128},
}
DTYPES = ("float32", "bfloat16", "float16")


class RopeScaling(msgspec.Struct, frozen=True, kw_only=True):
    """How rotary frequencies are changed beyond `rope_theta`; fields a kind does not use keep their defaults."""

    kind: str = "default"
    """`default`, `linear` (all frequencies / factor) or `llama3` (low frequencies / factor, smooth in between)."""
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_context: int = 8192


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Geometry and arithmetic of one model. Rotary embedding always rotates halves (HF's convention)."""

    architecture: str
    """One of `ARCHITECTURES`' values."""
    vocab_size: int
    """Rows of the embedding; token ids are below it."""
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float
    rope_theta: float
    rope_scaling: RopeScaling
    tied_embeddings: bool
    attention_bias: bool
    """Of the q, k and v projections."""
    output_bias: bool
    """Of the o projection."""
    mlp_bias: bool
    qk_norm: bool
    """RMS norm over each head of q and k before rotation."""
    max_context: int
    eos_token_ids: list[int]
    bos_token_id: int | None
    dtype: str
    """Of the files: `float32`, `bfloat16` or `float16` (`bfloat16` for a quantised file)."""

    def kv_layout(self, block_size: int, dtype: str, tp_size: int) -> KVLayout:
        return KVLayout(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            block_size=block_size,
            dtype=dtype,
            tp_size=tp_size,
        )

    def check_tensor_parallel(self, tp_size: int) -> None:
        """Raises `InvalidArgument` unless the model can be cut into `tp_size` equal parts (KV heads may repeat)."""
        if self._fault_of(tp_size) is None:
            return
        sizes = [str(n) for n in range(1, self.num_heads + 1) if self._fault_of(n) is None]
        raise InvalidArgument(
            "tensor parallel size", tp_size, f"must {self._fault_of(tp_size)}", f"use one of {', '.join(sizes)}"
        )

    def _fault_of(self, tp_size: int) -> str | None:
        if tp_size < 1:
            return "be at least 1"
        parts = {
            "attention heads": self.num_heads,
            "intermediate channels": self.intermediate_size,
            "vocabulary entries": self.vocab_size,
        }
        for what, count in parts.items():
            if count % tp_size:
                return f"divide the model's {count} {what}"
        small, large = sorted((self.num_kv_heads, tp_size))
        return f"divide the model's {self.num_kv_heads} KV heads, or be a multiple of them" if large % small else None

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor the model needs, by its Hugging Face name."""
        hidden, inner = self.hidden_size, self.intermediate_size
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        linears = {
            "self_attn.q_proj": (q, hidden, self.attention_bias),
            "self_attn.k_proj": (kv, hidden, self.attention_bias),
            "self_attn.v_proj": (kv, hidden, self.attention_bias),
            "self_attn.o_proj": (hidden, q, self.output_bias),
            "mlp.gate_proj": (inner, hidden, self.mlp_bias),
            "mlp.up_proj": (inner, hidden, self.mlp_bias),
            "mlp.down_proj": (hidden, inner, self.mlp_bias),
        }
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, hidden)}
        for layer in range(self.num_layers):
            prefix = f"model.layers.{layer}."
            for norm in ("input_layernorm", "post_attention_layernorm"):
                shapes[f"{prefix}{norm}.weight"] = (hidden,)
            for name, (rows, columns, bias) in linears.items():
                shapes[f"{prefix}{name}.weight"] = (rows, columns)
                if bias:
                    shapes[f"{prefix}{name}.bias"] = (rows,)
            if self.qk_norm:
                for norm in ("q_norm", "k_norm"):
                    shapes[f"{prefix}self_attn.{norm}.weight"] = (self.head_dim,)
        shapes["model.norm.weight"] = (hidden,)
        if not self.tied_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        return shapes

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.tensor_shapes().values())


def from_hf_config(config: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelSpec:
    """From `config.json` (of any transformers version) and, if there is one, `generation_config.json`.

    Raises `UnsupportedModel` naming what kvferry lacks, `CorruptModel` for a missing or impossible value.
    """
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if name not in ARCHITECTURES:
        raise UnsupportedModel(
            f"config.json: architectures={names!r} is not supported; supported are {', '.join(ARCHITECTURES)}"
        )
    architecture = ARCHITECTURES[name]
    config = _DEFAULTS[architecture] | config
    _refuse_unsupported(config, architecture)
    num_heads = _positive(config, "num_attention_heads")
    hidden_size = _positive(config, "hidden_size")
    theta, scaling = _rope(config)
    bias = architecture != "mistral" and bool(config.get("attention_bias", False))
    return checked(
        ModelSpec(
            architecture=architecture,
            vocab_size=_positive(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_positive(config, "intermediate_size"),
            num_layers=_positive(config, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=_positive(config, "num_key_value_heads", num_heads),
            head_dim=_positive(config, "head_dim", hidden_size // num_heads),
            rms_eps=_number(config, "rms_norm_eps", 1e-6),
            rope_theta=theta,
            rope_scaling=scaling,
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            attention_bias=architecture == "qwen2" or bias,
            output_bias=architecture != "qwen2" and bias,
            mlp_bias=architecture == "llama" and bool(config.get("mlp_bias", False)),
            qk_norm=architecture == "qwen3",
            max_context=_positive(config, "max_position_embeddings"),
            eos_token_ids=hf_eos_token_ids(config, generation or {}),
            bos_token_id=config.get("bos_token_id"),
            dtype=_dtype(config),
        ),
        "config.json",
    )


def checked(spec: ModelSpec, source: str) -> ModelSpec:
    """Raises `CorruptModel` when the numbers of `source` contradict each other."""
    if spec.num_heads % spec.num_kv_heads:
        raise CorruptModel(
            f"{source}: {spec.num_heads} attention heads are no multiple of {spec.num_kv_heads} KV heads"
        )
    if spec.head_dim % 2:
        raise CorruptModel(f"{source}: head dimension {spec.head_dim} must be even for rotary embedding")
    for token in spec.eos_token_ids:
        if not 0 <= token < spec.vocab_size:
            raise CorruptModel(f"{source}: eos token {token} is outside the vocabulary [0, {spec.vocab_size})")
    return spec


def _refuse_unsupported(config: dict[str, Any], architecture: str) -> None:
    def refuse(field: str, why: str) -> None:
        raise UnsupportedModel(f"config.json: {field}={config.get(field)!r} is not supported; {why}")

    if config.get("quantization_config") is not None:
        refuse("quantization_config", "use an unquantised folder or a .gguf file")
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        refuse("hidden_act", "supported is silu")
    if config.get("partial_rotary_factor", 1.0) != 1.0:
        refuse("partial_rotary_factor", "supported is 1.0")
    if "sliding_attention" in (config.get("layer_types") or []):
        refuse("layer_types", "supported is full attention in every layer")
    if architecture == "mistral":
        limit = _positive(config, "max_position_embeddings")
        if config["sliding_window"] is not None and _positive(config, "sliding_window") < limit:
            refuse("sliding_window", f"supported is null, or at least max_position_embeddings={limit}")
    elif architecture in ("qwen2", "qwen3") and config.get("use_sliding_window"):
        refuse("use_sliding_window", "supported is false")


def _rope(config: dict[str, Any]) -> tuple[float, RopeScaling]:
    # transformers 4 has `rope_theta` and `rope_scaling`; transformers 5 holds both in `rope_parameters`.
    rope: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        value = config.get(key) or {}
        if not isinstance(value, dict):
            raise CorruptModel(f"config.json: {key}={value!r} must be an object")
        if any(isinstance(part, dict) for part in value.values()):
            raise UnsupportedModel(f"config.json: {key}={value!r}: rope that differs between layers is not supported")
        rope |= value
    theta = _number(rope if "rope_theta" in rope else config, "rope_theta", 10000.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModel(f"config.json: partial_rotary_factor={rope['partial_rotary_factor']!r} is not supported")
    if kind == "default":
        return theta, RopeScaling()
    if kind == "linear":
        return theta, RopeScaling(kind="linear", factor=_number(rope, "factor"))
    if kind == "llama3":
        return theta, RopeScaling(
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


def _dtype(config: dict[str, Any]) -> str:
    dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
    if dtype not in DTYPES:
        raise UnsupportedModel(f"config.json: dtype={dtype!r} is not supported; supported are {', '.join(DTYPES)}")
    return str(dtype)


def _positive(config: dict[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CorruptModel(f"config.json: {key}={value!r} must be a positive integer")
    return value


def _number(config: dict[str, Any], key: str, default: float | None = None) -> float:
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int | float) or not 0.0 < value < math.inf:
        raise CorruptModel(f"config.json: {key}={value!r} must be a positive number")
    return float(value)
