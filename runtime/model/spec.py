"""What a decoder looks like: geometry and arithmetic, whatever it was read from. Names of families decide nothing.

ModelSpec ── norm, embeddings, output head
    └── LayerSpec, one per layer
          ├── AttentionSpec ── rope
          └── MLPSpec
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from kvferry.runtime.errors import CorruptModel, InvalidArgument
from kvferry.runtime.kv.layout import KVLayout

DTYPES = ("float32", "bfloat16", "float16")
Activation = Literal["silu", "gelu", "gelu_tanh"]


class RopeScaling(msgspec.Struct, frozen=True, kw_only=True):
    """How rotary frequencies are changed beyond `theta`; fields a kind does not use keep their defaults."""

    kind: str = "default"
    """`default`, `linear` (all frequencies / factor) or `llama3` (low frequencies / factor, smooth in between)."""
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_context: int = 8192


class RopeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary position embedding of queries and keys; halves are rotated (HF's convention)."""

    theta: float
    scaling: RopeScaling = RopeScaling()


class AttentionSpec(msgspec.Struct, frozen=True, kw_only=True):
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeSpec
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    """A norm over each head of q and k before rotation."""
    scale: float | None = None
    """What scores are multiplied with; None: `head_dim**-0.5`."""
    softcap: float | None = None
    """Then scores become `softcap * tanh(score / softcap)`."""
    window: int | None = None
    """A token sees so many positions, its own included; None: all up to its own."""


class MLPSpec(msgspec.Struct, frozen=True, kw_only=True):
    """`down(activation(gate(x)) * up(x))`."""

    inner_size: int
    activation: Activation = "silu"
    bias: bool = False


class LayerSpec(msgspec.Struct, frozen=True, kw_only=True):
    attention: AttentionSpec
    mlp: MLPSpec


class NormSpec(msgspec.Struct, frozen=True, kw_only=True):
    """RMS norm."""

    eps: float


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    architecture: str
    """The family's name in `families.FAMILIES`: it knows how the files spell the parts."""
    vocab_size: int
    """Rows of the embedding; token ids are below it."""
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm: NormSpec
    tied_embeddings: bool
    max_context: int
    eos_token_ids: list[int]
    bos_token_id: int | None
    dtype: str
    """Of the files: `float32`, `bfloat16` or `float16` (`bfloat16` for a quantised file)."""

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def kv_shape(self) -> AttentionSpec:
        """Whose KV geometry all layers share."""
        return self.layers[0].attention

    def kv_layout(self, block_size: int, dtype: str, tp_size: int) -> KVLayout:
        return KVLayout(
            num_layers=self.num_layers,
            num_kv_heads=self.kv_shape.num_kv_heads,
            head_dim=self.kv_shape.head_dim,
            block_size=block_size,
            dtype=dtype,
            tp_size=tp_size,
        )

    def check_tensor_parallel(self, tp_size: int) -> None:
        """Raises `InvalidArgument` unless the model can be cut into `tp_size` equal parts (KV heads may repeat)."""
        if self._fault_of(tp_size) is None:
            return
        most = max(layer.attention.num_heads for layer in self.layers)
        sizes = [str(n) for n in range(1, most + 1) if self._fault_of(n) is None]
        raise InvalidArgument(
            "tensor parallel size", tp_size, f"must {self._fault_of(tp_size)}", f"use one of {', '.join(sizes)}"
        )

    def _fault_of(self, tp_size: int) -> str | None:
        if tp_size < 1:
            return "be at least 1"
        for what, count in self._evenly_cut():
            if count % tp_size:
                return f"divide the model's {count} {what}"
        for layer in dict.fromkeys(self.layers):
            num_kv_heads = layer.attention.num_kv_heads
            small, large = sorted((num_kv_heads, tp_size))
            if large % small:
                return f"divide the model's {num_kv_heads} KV heads, or be a multiple of them"
        return None

    def _evenly_cut(self) -> Iterator[tuple[str, int]]:
        for layer in dict.fromkeys(self.layers):
            yield "attention heads", layer.attention.num_heads
            yield "intermediate channels", layer.mlp.inner_size
        yield "vocabulary entries", self.vocab_size


def checked(spec: ModelSpec, source: str) -> ModelSpec:
    """Raises `CorruptModel` when the numbers of `source` contradict each other."""
    for attention in dict.fromkeys(layer.attention for layer in spec.layers):
        if attention.num_heads % attention.num_kv_heads:
            raise CorruptModel(
                f"{source}: {attention.num_heads} attention heads are no multiple of {attention.num_kv_heads} KV heads"
            )
        if attention.head_dim % 2:
            raise CorruptModel(f"{source}: head dimension {attention.head_dim} must be even for rotary embedding")
    for token in spec.eos_token_ids:
        if not 0 <= token < spec.vocab_size:
            raise CorruptModel(f"{source}: eos token {token} is outside the vocabulary [0, {spec.vocab_size})")
    return spec
