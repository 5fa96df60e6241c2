"""What a GGUF file of a supported architecture means: its spec, and where the decoder's tensors are in it."""

from __future__ import annotations

import functools
import math

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from kvferry.runtime.errors import CorruptModel, UnsupportedModel
from kvferry.runtime.model.families.family import split
from kvferry.runtime.model.gguf_file import GGUFArray, GGUFFile, Value
from kvferry.runtime.model.parts import Source
from kvferry.runtime.model.spec import (
    AttentionSpec,
    LayerSpec,
    MLPSpec,
    ModelSpec,
    NormSpec,
    RopeScaling,
    RopeSpec,
    checked,
)

ARCHITECTURES = ("llama", "qwen2", "qwen3")
_TOP = {"embedding": "token_embd", "norm": "output_norm", "head": "output"}
_LAYER = {
    "attention_norm": "attn_norm",
    "mlp_norm": "ffn_norm",
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
_ROTATED_PAIRS = ("llama",)
"""Architectures whose converters put the rows of q and k into the order of rotated pairs."""
# Llama 3.1 and later: the only parameters with which converters write `rope_freqs.weight`; the factor varies.
_LLAMA3 = RopeScaling(kind="llama3", low_freq_factor=1.0, high_freq_factor=4.0, original_max_context=8192)


def gguf_source(spec: ModelSpec, part: str) -> Source:
    """Where a GGUF file of this model has a part."""
    number, stem, suffix = split(part)
    if number is None:
        return Source(f"{_TOP[stem]}.{suffix}")
    pairs = spec.architecture in _ROTATED_PAIRS and stem in ("attention.q", "attention.k")
    head_dim = spec.layers[number].attention.head_dim
    return Source(f"blk.{number}.{_LAYER[stem]}.{suffix}", pair_rows=head_dim if pairs else 0)


def gguf_spec(file: GGUFFile) -> ModelSpec:
    """Raises `UnsupportedModel` naming what kvferry lacks, `CorruptModel` for a missing or impossible value."""
    reader = _Reader(file)
    architecture = file.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise UnsupportedModel(
            f"{file.path}: general.architecture={architecture!r} is not supported; supported are {ARCHITECTURES}"
        )
    _refuse_unsupported(reader)
    hidden_size, num_heads = reader.positive("embedding_length"), reader.positive("attention.head_count")
    head_dim = reader.positive("attention.key_length", hidden_size // num_heads)
    if reader.positive("rope.dimension_count", head_dim) != head_dim:
        raise UnsupportedModel(
            f"{file.path}: rope.dimension_count={reader.get('rope.dimension_count')} is not supported; "
            f"supported is the head dimension, {head_dim}"
        )
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CorruptModel(f"{file.path}: tensor token_embd.weight is missing")
    attention = AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=reader.positive("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        rope=RopeSpec(theta=reader.number("rope.freq_base", 10000.0), scaling=_rope_scaling(reader, head_dim)),
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
    )
    mlp = MLPSpec(inner_size=reader.positive("feed_forward_length"), bias="blk.0.ffn_gate.bias" in file.tensors)
    num_layers = reader.positive("block_count")
    if num_layers > len(file.tensors):  # before a list of them is made
        raise CorruptModel(f"{file.path}: the metadata says {num_layers} layers, the file has fewer")
    return checked(
        ModelSpec(
            architecture=str(architecture),
            vocab_size=embedding.shape[0],
            hidden_size=hidden_size,
            layers=(LayerSpec(attention=attention, mlp=mlp),) * num_layers,
            norm=NormSpec(eps=reader.number("attention.layer_norm_rms_epsilon")),
            tied_embeddings="output.weight" not in file.tensors,
            max_context=reader.positive("context_length"),
            eos_token_ids=eos_token_ids(file),
            bos_token_id=token_id(file, "bos"),
            dtype="bfloat16",
        ),
        file.path,
    )


def token_id(file: GGUFFile, name: str) -> int | None:
    value = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
    return value if isinstance(value, int) else None


def eos_token_ids(file: GGUFFile) -> list[int]:
    """Ends of sequence, turn and message, each once."""
    found = [token_id(file, name) for name in ("eos", "eot", "eom")]
    return list(dict.fromkeys(token for token in found if token is not None))


class _Reader:
    """Typed access to the architecture's own metadata."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self._prefix = f"{file.metadata.get('general.architecture')}."

    def get(self, key: str) -> Value | None:
        return self.file.metadata.get(self._prefix + key)

    def positive(self, key: str, default: int | None = None) -> int:
        value = default if self.get(key) is None else self.get(key)
        if isinstance(value, GGUFArray):
            values = set(self.file.numbers(self._prefix + key))
            value = int(values.pop()) if len(values) == 1 else value
        if isinstance(value, GGUFArray):
            raise UnsupportedModel(f"{self.file.path}: {self._prefix}{key} differs between layers")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise CorruptModel(f"{self.file.path}: {self._prefix}{key}={value!r} must be a positive integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = default if self.get(key) is None else self.get(key)
        if not isinstance(value, int | float) or not 0.0 < value < math.inf:
            raise CorruptModel(f"{self.file.path}: {self._prefix}{key}={value!r} must be a positive number")
        # Files hold 32-bit floats; the shortest decimal that means the same is what the model's author wrote.
        return float(str(np.float32(value)))


def _refuse_unsupported(reader: _Reader) -> None:
    def refuse(what: str) -> None:
        raise UnsupportedModel(f"{reader.file.path}: {what} is not supported")

    split = reader.file.metadata.get("split.count", 1)
    if split != 1:
        refuse(f"a model split into {split} files (split.count); merge them with gguf-split first; this")
    if reader.get("expert_count"):
        refuse(f"a mixture of experts (expert_count={reader.get('expert_count')})")
    window, limit = reader.get("attention.sliding_window"), reader.positive("context_length")
    if isinstance(window, int) and 0 < window < limit:
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


def _rope_scaling(reader: _Reader, head_dim: int) -> RopeScaling:
    kind = reader.get("rope.scaling.type") or "none"
    if "rope_freqs.weight" in reader.file.tensors:
        return _llama3_scaling(reader, head_dim)
    if kind == "none" and reader.get("rope.scale_linear") is None:
        return RopeScaling()
    if kind in ("none", "linear"):
        return RopeScaling(
            kind="linear", factor=reader.number("rope.scaling.factor", reader.number("rope.scale_linear", 1.0))
        )
    raise UnsupportedModel(f"{reader.file.path}: rope.scaling.type={kind!r}; supported are none, linear and llama3")


def _llama3_scaling(reader: _Reader, head_dim: int) -> RopeScaling:
    """The parameters behind `rope_freqs.weight`, if recomputing the tensor from them gives the file's values."""
    raw = reader.file.rows(reader.file.tensors["rope_freqs.weight"])
    stored = dequantize(raw.copy(), GGMLQuantizationType.F32).ravel().astype(np.float64)
    if stored.size != head_dim // 2:
        raise CorruptModel(f"{reader.file.path}: rope_freqs.weight has {stored.size} values, needs {head_dim // 2}")
    if np.all(stored == 1.0):
        return RopeScaling()
    s = RopeScaling(
        kind="llama3",
        factor=float(str(np.float32(stored.max()))),
        low_freq_factor=_LLAMA3.low_freq_factor,
        high_freq_factor=_LLAMA3.high_freq_factor,
        original_max_context=_LLAMA3.original_max_context,
    )
    theta = reader.number("rope.freq_base", 10000.0)
    wavelength = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = (s.original_max_context / wavelength - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
    smooth = np.clip(smooth, 0.0, 1.0)
    if not np.allclose(stored, 1.0 / ((1.0 - smooth) / s.factor + smooth), rtol=1e-4):
        raise UnsupportedModel(
            f"{reader.file.path}: rope_freqs.weight is not llama3 scaling with low 1, high 4 and 8192 positions"
        )
    return s
