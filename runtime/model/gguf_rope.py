"""Rope as a GGUF file describes it."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import numpy.typing as npt
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from kvferry.runtime.errors import CorruptModel, UnsupportedModel
from kvferry.runtime.model.families.rope import yarn_mscale
from kvferry.runtime.model.gguf_reader import GGUFReader
from kvferry.runtime.model.spec import RopeScaling, RopeSpec

# Llama 3.1 and later: the only parameters with which converters write `rope_freqs.weight`; the factor varies.
_LLAMA3 = RopeScaling(kind="llama3", low_freq_factor=1.0, high_freq_factor=4.0, original_max_context=8192)


def gguf_rope(reader: GGUFReader, head_dim: int, *, partial: bool) -> RopeSpec:
    """`partial`: whether the architecture can rotate less than a whole head."""
    dim = reader.positive("rope.dimension_count", head_dim)
    if dim != head_dim and not partial:
        raise UnsupportedModel(
            f"{reader.file.path}: rope.dimension_count={dim} is not supported; "
            f"supported is the head dimension, {head_dim}"
        )
    theta = reader.number("rope.freq_base", 10000.0)
    return RopeSpec(theta=theta, scaling=_scaling(reader, dim, theta), dim=None if dim == head_dim else dim)


def _scaling(reader: GGUFReader, dim: int, theta: float) -> RopeScaling:
    kind = reader.get("rope.scaling.type") or "none"
    if "rope_freqs.weight" in reader.file.tensors:
        return _llama3(reader, dim, theta)
    if "rope_factors_long.weight" in reader.file.tensors:
        return _longrope(reader)
    if kind == "none" and reader.get("rope.scale_linear") is None:
        return RopeScaling()
    if kind in ("none", "linear"):
        return RopeScaling(
            kind="linear", factor=reader.number("rope.scaling.factor", reader.number("rope.scale_linear", 1.0))
        )
    if kind == "yarn":
        factor = reader.number("rope.scaling.factor")
        return RopeScaling(
            kind="yarn",
            factor=factor,
            original_max_context=reader.positive("rope.scaling.original_context_length"),
            attention_factor=reader.number("rope.scaling.attn_factor", 1.0) * yarn_mscale(factor),
        )
    raise UnsupportedModel(
        f"{reader.file.path}: rope.scaling.type={kind!r}; supported are none, linear, yarn, llama3 and longrope"
    )


def _longrope(reader: GGUFReader) -> RopeScaling:
    original = reader.positive("rope.scaling.original_context_length")
    return RopeScaling(
        kind="longrope",
        factor=reader.positive("context_length") / original,
        original_max_context=original,
        short_factors=tuple(float(f) for f in _vector(reader, "rope_factors_short.weight")),
        long_factors=tuple(float(f) for f in _vector(reader, "rope_factors_long.weight")),
        attention_factor=reader.number("rope.scaling.attn_factor", 1.0),
    )


def _llama3(reader: GGUFReader, dim: int, theta: float) -> RopeScaling:
    """The parameters behind `rope_freqs.weight`, if recomputing the tensor from them gives the file's values."""
    stored = _vector(reader, "rope_freqs.weight")
    if stored.size != dim // 2:
        raise CorruptModel(f"{reader.file.path}: rope_freqs.weight has {stored.size} values, needs {dim // 2}")
    if np.all(stored == 1.0):
        return RopeScaling()
    s = msgspec.structs.replace(_LLAMA3, factor=float(str(np.float32(stored.max()))))
    wavelength = 2 * math.pi * theta ** (np.arange(0, dim, 2) / dim)
    smooth = (s.original_max_context / wavelength - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
    smooth = np.clip(smooth, 0.0, 1.0)
    if not np.allclose(stored, 1.0 / ((1.0 - smooth) / s.factor + smooth), rtol=1e-4):
        raise UnsupportedModel(
            f"{reader.file.path}: rope_freqs.weight is not llama3 scaling with low 1, high 4 and 8192 positions"
        )
    return s


def _vector(reader: GGUFReader, name: str) -> npt.NDArray[np.float64]:
    tensor = reader.file.tensors.get(name)
    if tensor is None or tensor.dtype != "F32":
        raise CorruptModel(f"{reader.file.path}: tensor {name} must be there, in F32")
    values: npt.NDArray[np.float32] = dequantize(reader.file.rows(tensor).copy(), GGMLQuantizationType.F32)
    return values.ravel().astype(np.float64)
