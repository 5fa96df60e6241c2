"""What a GGUF file of a supported architecture means: its spec, and where the decoder's tensors are in it.

`ARCHITECTURES` is the table of what is supported. What a file cannot say about its architecture stands there.
Source: https://github.com/ggml-org/llama.cpp/blob/master/src/llama-model.cpp (what it assumes of each).
"""

from __future__ import annotations

import functools

import msgspec
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from kvferry.runtime.errors import CorruptModel, UnsupportedModel
from kvferry.runtime.model.families.family import split
from kvferry.runtime.model.families.rope import reach
from kvferry.runtime.model.gguf_file import GGUFFile
from kvferry.runtime.model.gguf_reader import GGUFReader, eos_token_ids, token_id
from kvferry.runtime.model.gguf_rope import gguf_rope
from kvferry.runtime.model.parts import Source
from kvferry.runtime.model.spec import (
    Activation,
    AttentionSpec,
    LayerSpec,
    MLPSpec,
    ModelSpec,
    NormSpec,
    RopeSpec,
    checked,
)

_TOP = {"embedding": "token_embd", "positions": "position_embd", "norm": "output_norm", "head": "output"}
_LAYER = {
    "attention_norm": "attn_norm",
    "attention_post_norm": "post_attention_norm",
    "mlp_norm": "ffn_norm",
    "mlp_post_norm": "post_ffw_norm",
    "attention.q": "attn_q",
    "attention.k": "attn_k",
    "attention.v": "attn_v",
    "attention.o": "attn_output",
    "attention.q_norm": "attn_q_norm",
    "attention.k_norm": "attn_k_norm",
    "mlp.gate": "ffn_gate",
    "mlp.up": "ffn_up",
    "mlp.down": "ffn_down",
}


class Architecture(msgspec.Struct, frozen=True, kw_only=True):
    rotated_pairs: bool = False
    """Converters put the rows of q and k into the order of rotated pairs."""
    fused: bool = False
    """q, k and v lie in one tensor; so do gate and up, where there is a gate."""
    learned_positions: bool = False
    partial_rope: bool = False
    layer_norm: bool = False
    activation: Activation = "silu"
    gated: bool = True
    post_norms: bool = False
    scaled_embedding: bool = False
    window_pattern: int | None = None
    """Of so many layers the last one sees all, the others a window; 0: all see a window. None: no windows."""
    local_theta: float | None = None
    """Rope of the layers with a window, where it differs."""
    softcapped: bool = False
    scaled_by_width_at: int | None = None
    """The one size, named by its layers, that scales queries by hidden size / heads instead of the head dimension."""


_GEMMA = Architecture(activation="gelu_tanh", post_norms=True, scaled_embedding=True)
ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(rotated_pairs=True),
    "qwen2": Architecture(),
    "qwen3": Architecture(),
    "gemma2": msgspec.structs.replace(_GEMMA, window_pattern=2, softcapped=True, scaled_by_width_at=46),
    "gemma3": msgspec.structs.replace(_GEMMA, window_pattern=6, local_theta=10000.0, scaled_by_width_at=62),
    "phi3": Architecture(fused=True, partial_rope=True, window_pattern=0),
    "gpt2": Architecture(fused=True, learned_positions=True, layer_norm=True, activation="gelu_tanh", gated=False),
}


def gguf_source(spec: ModelSpec, part: str) -> Source:
    """Where a GGUF file of this model has a part."""
    number, stem, suffix = split(part)
    if number is None:
        return Source(f"{_TOP[stem]}.{suffix}")
    architecture, layer = ARCHITECTURES[spec.architecture], spec.layers[number]
    attention, name, first_row = layer.attention, _LAYER[stem], 0
    if architecture.fused and stem in ("attention.q", "attention.k", "attention.v"):
        q, kv = attention.num_heads * attention.head_dim, attention.num_kv_heads * attention.head_dim
        name, first_row = "attn_qkv", {"attention.q": 0, "attention.k": q, "attention.v": q + kv}[stem]
    elif architecture.fused and architecture.gated and stem in ("mlp.gate", "mlp.up"):
        name, first_row = "ffn_up", 0 if stem == "mlp.gate" else layer.mlp.inner_size
    pairs = architecture.rotated_pairs and stem in ("attention.q", "attention.k")
    return Source(f"blk.{number}.{name}.{suffix}", first_row=first_row, pair_rows=attention.head_dim if pairs else 0)


def gguf_spec(file: GGUFFile) -> ModelSpec:
    """Raises `UnsupportedModel` naming what kvferry lacks, `CorruptModel` for a missing or impossible value."""
    reader = GGUFReader(file)
    name = file.metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        raise UnsupportedModel(
            f"{file.path}: general.architecture={name!r} is not supported; supported are {', '.join(ARCHITECTURES)}"
        )
    architecture = ARCHITECTURES[str(name)]
    _refuse_unsupported(reader, architecture)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CorruptModel(f"{file.path}: tensor token_embd.weight is missing")
    num_layers = reader.positive("block_count")
    if num_layers > len(file.tensors):  # before a list of them is made
        raise CorruptModel(f"{file.path}: the metadata says {num_layers} layers, the file has fewer")
    hidden_size = reader.positive("embedding_length")
    eps = "attention.layer_norm_epsilon" if architecture.layer_norm else "attention.layer_norm_rms_epsilon"
    spec = ModelSpec(
        architecture=str(name),
        vocab_size=embedding.shape[0],
        hidden_size=hidden_size,
        layers=_layers(reader, architecture, num_layers),
        norm=NormSpec(eps=reader.number(eps), kind="layer" if architecture.layer_norm else "rms"),
        tied_embeddings="output.weight" not in file.tensors,
        max_context=reader.positive("context_length"),
        eos_token_ids=eos_token_ids(file),
        bos_token_id=token_id(file, "bos"),
        dtype="bfloat16",
        embedding_scale=hidden_size**0.5 if architecture.scaled_embedding else 1.0,
        num_positions=reader.positive("context_length") if architecture.learned_positions else None,
        logit_softcap=reader.optional_number("final_logit_softcapping") if architecture.softcapped else None,
    )
    spec = checked(spec, file.path)
    return msgspec.structs.replace(spec, max_context=reach(spec))


def _layers(reader: GGUFReader, architecture: Architecture, num_layers: int) -> tuple[LayerSpec, ...]:
    attention = _attention(reader, architecture, num_layers)
    tensors = reader.file.tensors
    mlp = MLPSpec(
        inner_size=reader.positive("feed_forward_length"),
        activation=architecture.activation,
        gated=architecture.gated,
        bias="blk.0.ffn_up.bias" in tensors,
    )
    full = LayerSpec(attention=attention, mlp=mlp, post_norms=architecture.post_norms)
    window = reader.get("attention.sliding_window")
    if architecture.window_pattern is None or not window:
        return (full,) * num_layers
    theta = architecture.local_theta
    local_attention = msgspec.structs.replace(
        attention,
        window=reader.positive("attention.sliding_window"),
        rope=attention.rope if theta is None else RopeSpec(theta=reader.number("rope.freq_base_swa", theta)),
    )
    local = msgspec.structs.replace(full, attention=local_attention)
    listed = reader.flags("attention.sliding_window_pattern")
    if listed is not None and len(listed) != num_layers:
        raise CorruptModel(
            f"{reader.file.path}: attention.sliding_window_pattern has {len(listed)} of {num_layers} layers"
        )
    pattern = architecture.window_pattern
    is_local = listed or [pattern == 0 or (i + 1) % pattern != 0 for i in range(num_layers)]
    return tuple(local if windowed else full for windowed in is_local)


def _attention(reader: GGUFReader, architecture: Architecture, num_layers: int) -> AttentionSpec:
    hidden_size, num_heads = reader.positive("embedding_length"), reader.positive("attention.head_count")
    head_dim = reader.positive("attention.key_length", hidden_size // num_heads)
    rope = None if architecture.learned_positions else gguf_rope(reader, head_dim, partial=architecture.partial_rope)
    tensors, qkv = reader.file.tensors, "attn_qkv" if architecture.fused else "attn_q"
    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=reader.positive("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        rope=rope,
        qkv_bias=f"blk.0.{qkv}.bias" in tensors,
        output_bias="blk.0.attn_output.bias" in tensors,
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
        scale=(hidden_size / num_heads) ** -0.5 if num_layers == architecture.scaled_by_width_at else None,
        softcap=reader.optional_number("attn_logit_softcapping") if architecture.softcapped else None,
    )


def _refuse_unsupported(reader: GGUFReader, architecture: Architecture) -> None:
    def refuse(what: str) -> None:
        raise UnsupportedModel(f"{reader.file.path}: {what} is not supported")

    split = reader.file.metadata.get("split.count", 1)
    if split != 1:
        refuse(f"a model split into {split} files (split.count); merge them with gguf-split first; this")
    if reader.get("expert_count"):
        refuse(f"a mixture of experts (expert_count={reader.get('expert_count')})")
    window, limit = reader.get("attention.sliding_window"), reader.positive("context_length")
    if architecture.window_pattern is None and isinstance(window, int) and 0 < window < limit:
        refuse(f"attention.sliding_window={window} below context_length={limit}")
    for tensor in reader.file.tensors.values():
        if not _can_dequantize(tensor.dtype):
            refuse(f"type {tensor.dtype} of tensor {tensor.name}")


@functools.cache
def _can_dequantize(dtype: str) -> bool:
    quantization = GGMLQuantizationType[dtype]
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[quantization][1]), np.uint8), quantization)
    except NotImplementedError:
        return False
    return True
