"""What a decoder looks like: geometry and arithmetic, whatever it was read from. Names of families decide nothing.

ModelSpec ── norm, embeddings, output head
    └── LayerSpec, one per layer
          ├── AttentionSpec or LatentSpec ── rope
          └── MLPSpec or MoESpec
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from kvferry.runtime.errors import CorruptModel, InvalidArgument
from kvferry.runtime.kv.layout import KVLayout

DTYPES = ("float32", "bfloat16", "float16")
Activation = Literal["silu", "gelu", "gelu_tanh"]
RopeKind = Literal["default", "linear", "llama3", "yarn", "dynamic", "longrope"]


class RopeScaling(msgspec.Struct, frozen=True, kw_only=True):
    """How rotary frequencies are changed beyond `theta`; fields a kind does not use keep their defaults.

    default
    linear    all frequencies / factor
    llama3    low frequencies / factor, high ones unchanged, smooth in between
    yarn      the same, in between by index (`beta_fast`, `beta_slow`, `truncate`)
    dynamic   theta grows with a token's position beyond the original context
    longrope  each frequency / its own factor: short ones up to the original context, long ones for more (ADR 8)
    """

    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_context: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    attention_factor: float = 1.0
    """What rotated queries and keys are multiplied by (`yarn`, `longrope`)."""


class RopeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary position embedding of queries and keys; halves are rotated (HF's convention)."""

    theta: float
    scaling: RopeScaling = RopeScaling()
    dim: int | None = None
    """So many first dimensions of a head are rotated; `None`: all."""


class AttentionSpec(msgspec.Struct, frozen=True, kw_only=True):
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeSpec | None
    """`None`: positions do not enter here."""
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

    @property
    def planes(self) -> int:
        """Cached for each head: its key and its value."""
        return 2


class LatentSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Attention in which all heads share one cached vector per token (`kernels/mla.py`)."""

    num_heads: int
    query_rank: int | None
    """Queries too are computed from a latent vector, of this size; `None`: directly."""
    latent_rank: int
    key_dim: int
    """Of the part of a head's query and key that is not rotated."""
    rope_dim: int
    """Of the part that is; its key is cached rotated, for all heads."""
    value_dim: int
    rope: RopeSpec
    scale: float

    @property
    def num_kv_heads(self) -> int:
        return 1

    @property
    def head_dim(self) -> int:
        """Of the cached vector."""
        return self.latent_rank + self.rope_dim

    @property
    def planes(self) -> int:
        return 1

    @property
    def window(self) -> None:
        """A token sees all before it."""
        return


class MLPSpec(msgspec.Struct, frozen=True, kw_only=True):
    """`down(activation(gate(x)) * up(x))`, or without a gate `down(activation(up(x)))`."""

    inner_size: int
    activation: Activation = "silu"
    gated: bool = True
    bias: bool = False


class MoESpec(msgspec.Struct, frozen=True, kw_only=True):
    """A mixture of experts, each a gated MLP; a router chooses some for each token (`kernels/moe.py`)."""

    num_experts: int
    num_active: int
    inner_size: int
    """Of one expert."""
    shared_size: int = 0
    """Inner size of a further MLP that every token goes through; 0: there is none."""
    sigmoid: bool = False
    """Scores are sigmoids, else a softmax over all experts."""
    correction: bool = False
    """A stored bias takes part in the choice of experts, not in their weights."""
    num_groups: int = 1
    num_top_groups: int = 1
    """Only experts of so many groups can be chosen."""
    group_best: int = 1
    """A group is worth the sum of so many best scores in it."""
    normalised: bool = True
    """The chosen experts' weights add up to 1, before `scale`."""
    scale: float = 1.0
    activation: Activation = "silu"


class LayerSpec(msgspec.Struct, frozen=True, kw_only=True):
    attention: AttentionSpec | LatentSpec
    mlp: MLPSpec | MoESpec
    post_norms: bool = False
    """A norm also over what attention and MLP give, before it is added."""


class NormSpec(msgspec.Struct, frozen=True, kw_only=True):
    eps: float
    kind: Literal["rms", "layer"] = "rms"
    """`layer` subtracts the mean and has a bias."""
    offset: float = 0.0
    """To be added to the stored weights."""


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
    """Tokens of the longest sequence: what the files say, or the lower limit of a deployment."""
    eos_token_ids: list[int]
    bos_token_id: int | None
    dtype: str
    """Of the files: `float32`, `bfloat16` or `float16` (`bfloat16` for a quantised file)."""
    embedding_scale: float = 1.0
    """What token embeddings are multiplied by (rounded to the weights' dtype)."""
    num_positions: int | None = None
    """Rows of a learned embedding of positions, added to that of tokens."""
    logit_softcap: float | None = None
    """Logits become `cap · tanh(logits / cap)`."""

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def kv_shape(self) -> AttentionSpec | LatentSpec:
        """Whose KV geometry all layers share."""
        return self.layers[0].attention

    @property
    def content_fields(self) -> dict[str, str]:
        """What makes KV of the same files differ between deployments, for the hash root."""
        longer = {is_long(layer.attention.rope, self.max_context) for layer in self.layers}
        return {"rope factors": "long" if True in longer else "short"} if longer - {None} else {}

    def kv_layout(self, block_size: int, dtype: str, tp_size: int) -> KVLayout:
        return KVLayout(
            num_layers=self.num_layers,
            num_kv_heads=self.kv_shape.num_kv_heads,
            head_dim=self.kv_shape.head_dim,
            block_size=block_size,
            dtype=dtype,
            tp_size=tp_size,
            planes=self.kv_shape.planes,
        )

    def check_tensor_parallel(self, tp_size: int, name: str = "tensor parallel size") -> None:
        """Raises `InvalidArgument` unless the model can be cut into `tp_size` equal parts (KV heads may repeat)."""
        if self._fault_of(tp_size) is None:
            return
        most = max(layer.attention.num_heads for layer in self.layers)
        sizes = [str(n) for n in range(1, most + 1) if self._fault_of(n) is None]
        raise InvalidArgument(name, tp_size, f"must {self._fault_of(tp_size)}", f"use one of {', '.join(sizes)}")

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
            if isinstance(layer.mlp, MoESpec):
                yield "intermediate channels of shared experts", layer.mlp.shared_size


def is_long(rope: RopeSpec | None, max_context: int) -> bool | None:
    """Whether longrope's long factors hold, for all sequences of a deployment; `None` for other kinds of rope."""
    if rope is None or rope.scaling.kind != "longrope":
        return None
    return max_context > rope.scaling.original_max_context


def checked(spec: ModelSpec, source: str) -> ModelSpec:
    """Raises `CorruptModel` when the numbers of `source` contradict each other."""
    for attention in dict.fromkeys(layer.attention for layer in spec.layers):
        if isinstance(attention, LatentSpec):
            if attention.rope_dim % 2:
                raise CorruptModel(f"{source}: {attention.rope_dim} rotated dimensions must be even")
            continue
        if attention.num_heads % attention.num_kv_heads:
            raise CorruptModel(
                f"{source}: {attention.num_heads} attention heads are no multiple of {attention.num_kv_heads} KV heads"
            )
        if attention.head_dim % 2:
            raise CorruptModel(f"{source}: head dimension {attention.head_dim} must be even for rotary embedding")
        _check_rope(attention, source)
        if attention.qk_norm and spec.norm.kind != "rms":
            raise CorruptModel(f"{source}: norms over heads must be RMS norms")
    for mlp in dict.fromkeys(layer.mlp for layer in spec.layers):
        if isinstance(mlp, MoESpec):
            _check_experts(mlp, source)
    for token in spec.eos_token_ids:
        if not 0 <= token < spec.vocab_size:
            raise CorruptModel(f"{source}: eos token {token} is outside the vocabulary [0, {spec.vocab_size})")
    return spec


def _check_rope(attention: AttentionSpec, source: str) -> None:
    rope = attention.rope
    if rope is None:
        return
    dim, scaling = rope.dim or attention.head_dim, rope.scaling
    least = 4 if scaling.kind == "dynamic" else 2
    if dim % 2 or not least <= dim <= attention.head_dim:
        raise CorruptModel(f"{source}: {dim} rotated dimensions must be even, from {least} to {attention.head_dim}")
    for name, factors in (("short", scaling.short_factors), ("long", scaling.long_factors)):
        if scaling.kind == "longrope" and len(factors) != dim // 2:
            raise CorruptModel(f"{source}: longrope has {len(factors)} {name} factors, needs {dim // 2}")


def _check_experts(moe: MoESpec, source: str) -> None:
    if moe.num_experts % moe.num_groups:
        raise CorruptModel(f"{source}: {moe.num_experts} experts do not divide into {moe.num_groups} groups")
    per_group = moe.num_experts // moe.num_groups
    if not 1 <= moe.num_top_groups <= moe.num_groups or moe.group_best > per_group:
        raise CorruptModel(
            f"{source}: the top {moe.num_top_groups} of {moe.num_groups} groups, by the best {moe.group_best} of "
            f"{per_group} experts, cannot be chosen"
        )
    if moe.num_active > moe.num_top_groups * per_group:
        raise CorruptModel(
            f"{source}: {moe.num_active} experts for each token are more than the {moe.num_top_groups * per_group} "
            "to choose from"
        )
