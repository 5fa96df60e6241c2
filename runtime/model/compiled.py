"""The layers of a plain decoder as one step program: one native call in place of a dozen for each layer.

Plain are layers of `Attention` and a gated `MLP` between RMS norms, with linears that the kernels know, on one rank.
Whatever is not plain is called layer by layer, with the same results.

    x      what the layers add to
    y      normed x, then what is to be added to x
    wide   queries, keys and values; gate and up
    inner  what goes into the linears back to the hidden size
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence

import torch

from kvferry.kernels.cpu.available import kernels_for
from kvferry.kernels.cpu.operations import ACTIVATIONS
from kvferry.kernels.cpu.program import MAX_ATTENTIONS, Program
from kvferry.kernels.linear import Linear, PackedLinear
from kvferry.runtime.kv.storage import RankStorage
from kvferry.runtime.model.batch import Batch
from kvferry.runtime.model.layers import MLP, Attention, DecoderLayer, Norm, RMSNorm

_X, _Y, _WIDE, _INNER = range(4)


class _NotPlain(Exception):
    """Some part that a program has no operation for."""


def compile_layers(layers: Sequence[DecoderLayer], dtype: torch.dtype) -> CompiledLayers | None:
    """None if some layer is not plain, or where there are no kernels."""
    lib = kernels_for(torch.empty(0, dtype=dtype), 0)
    try:
        return None if lib is None else CompiledLayers(lib, layers, dtype)
    except _NotPlain:
        return None


class CompiledLayers:
    """Not safe for several threads. Its memory grows to what the largest step needs."""

    def __init__(self, lib: ctypes.CDLL, layers: Sequence[DecoderLayer], dtype: torch.dtype) -> None:
        """Raises `_NotPlain`."""
        self._program = Program(lib, dtype)
        self._widths = [0] * 4
        """Of the buffers' rows; x is not of this memory."""
        self._attentions = [self._layer(layer, first=i == 0) for i, layer in enumerate(layers)]
        """Their numbers in the program, and which contexts they see: query heads and window."""
        if max(layer.attention.rotation for layer in layers) >= MAX_ATTENTIONS:
            raise _NotPlain
        self._program.finish()
        self._memory = [torch.empty(0, dtype=dtype) for _ in self._widths]
        self._storage: weakref.ref[RankStorage] | None = None
        self._contexts: list[tuple[int, int, int | None]] = []
        """What a step has to bring: block group, query heads, window."""

    def takes(self, batches: Sequence[Batch], storage: RankStorage) -> bool:
        """Whether the kernels can read this storage."""
        if self._storage is None or self._storage() is not storage:
            self._place(storage)
        return len(self._contexts) <= MAX_ATTENTIONS and all(batch.contexts is not None for batch in batches)

    def run(self, x_TC: torch.Tensor, angles: Sequence[torch.Tensor], batches: Sequence[Batch]) -> torch.Tensor:
        """What is still to be added to `x_TC`; valid until the next call. Mutates x and the storage."""
        contexts = []
        for group, num_heads, window in self._contexts:
            found = batches[group].contexts
            assert found is not None  # `takes`
            contexts.append(found.address(num_heads, window))
        num_tokens = len(x_TC)
        for i, width in enumerate(self._widths):
            if self._memory[i].numel() < num_tokens * width:
                self._memory[i] = x_TC.new_empty(num_tokens * width)
        self._program.run(num_tokens, [x_TC, *self._memory[1:]], contexts, angles)
        return self._memory[_Y][: x_TC.numel()].view_as(x_TC)

    def _place(self, storage: RankStorage) -> None:
        """Tells the program where each layer's KV lies."""
        self._contexts = []
        for (attention, num_heads, window), (_, group, place) in zip(self._attentions, storage.places, strict=True):
            kind = group, num_heads, window
            if kind not in self._contexts:
                self._contexts.append(kind)
            self._program.place(attention, self._contexts.index(kind), storage.groups[group].slots[place].data_ptr())
        self._storage = weakref.ref(storage)

    def _layer(self, layer: DecoderLayer, first: bool) -> tuple[int, int, int | None]:
        attention, mlp = layer.attention, layer.mlp
        if not isinstance(attention, Attention) or not isinstance(mlp, MLP) or layer.parallel.size > 1:
            raise _NotPlain
        if not mlp.gated or mlp.activation not in ACTIVATIONS:
            raise _NotPlain
        self._norm(layer.attention_norm, _X, None if first else _Y)
        self._linear(attention.qkv, _Y, _WIDE)
        attend = self._attention(attention)
        self._linear(attention.output, _INNER, _Y)
        if layer.attention_post_norm is not None:
            self._norm(layer.attention_post_norm, _Y, None)
        self._norm(layer.mlp_norm, _X, _Y)
        inner = self._linear(mlp.up, _Y, _WIDE) // 2
        if kernels_for(layer.mlp_norm.weight, inner) is None:
            raise _NotPlain
        self._program.gated(_WIDE, inner, mlp.activation, _INNER)
        self._linear(mlp.down, _INNER, _Y)
        if layer.mlp_post_norm is not None:
            self._norm(layer.mlp_post_norm, _Y, None)
        return attend, attention.num_heads, attention.scoring.window

    def _norm(self, norm: Norm, x: int, delta: int | None) -> None:
        if not isinstance(norm, RMSNorm) or kernels_for(norm.weight, len(norm.weight)) is None:
            raise _NotPlain
        self._program.add_norm(x, delta, norm.weight, norm.eps, _Y)

    def _linear(self, linear: Linear, x: int, out: int) -> int:
        """Returns its number of outputs."""
        if not isinstance(linear, PackedLinear) or (packed := linear.packed) is None:
            raise _NotPlain
        self._widths[x] = max(self._widths[x], packed.inputs)
        self._widths[out] = max(self._widths[out], packed.outputs)
        self._program.linear(x, packed, linear.bias, out)
        return packed.outputs

    def _attention(self, attention: Attention) -> int:
        norms, eps = None, 0.0
        if attention.q_norm is not None and attention.k_norm is not None:
            norms, eps = (attention.q_norm.weight, attention.k_norm.weight), attention.q_norm.eps
        return self._program.attend(_WIDE, attention.rotation, attention.scoring, norms, eps, _INNER)
