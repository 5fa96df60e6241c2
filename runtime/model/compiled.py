"""A plain decoder as one step program: one native call in place of a dozen for each layer.

Plain are layers of `Attention` and a gated `MLP` between RMS norms, with linears that the kernels know, on one
rank or on several that share memory.
Whatever is not plain is called layer by layer, with the same results.

    x       what the layers add to
    y       normed x, then what is to be added to x
    wide    queries, keys and values; gate and up
    inner   what goes into the linears back to the hidden size, and into the head
    steps   rows of integers, for quantised weights
    logits

Rows whose logits are not wanted end at the last layer's keys and values.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence

import torch

from kvferry.kernels.cpu.available import kernels_for, kernels_with
from kvferry.kernels.cpu.linear import PackedIntegers
from kvferry.kernels.cpu.operations import ACTIVATIONS
from kvferry.kernels.cpu.program import MAX_ATTENTIONS, Program
from kvferry.kernels.embedding import Embedding
from kvferry.kernels.linear import Linear, PackedLinear
from kvferry.kernels.quantized import QuantizedLinear
from kvferry.kernels.sampling import Largest
from kvferry.runtime.kv.storage import RankStorage
from kvferry.runtime.model.batch import Batch
from kvferry.runtime.model.layers import MLP, Attention, DecoderLayer, Norm, RMSNorm
from kvferry.runtime.model.parallel import Ranks, TensorParallel
from kvferry.runtime.model.shm_parallel import ShmExchange

_X, _Y, _WIDE, _INNER, _STEPS, _LOGITS = range(6)
_ROWS = 64
"""By so many rows buffers grow: not anew for every size of a batch."""


class _NotPlain(Exception):
    """Some part that a program has no operation for."""


def compile_decoder(
    embedding: Embedding, layers: Sequence[DecoderLayer], norm: Norm, head: Linear, finds: bool
) -> CompiledDecoder | None:
    """None if some part is not plain, or where there are no kernels. finds: it finds the largest logits as well."""
    lib = kernels_with(embedding.dtype, embedding.device, embedding.width)
    try:
        return None if lib is None else CompiledDecoder(lib, embedding, layers, norm, head, finds)
    except _NotPlain:
        return None


class CompiledDecoder:
    """Not safe for several threads. Its memory grows to what the largest step needs."""

    def __init__(
        self,
        lib: ctypes.CDLL,
        embedding: Embedding,
        layers: Sequence[DecoderLayer],
        norm: Norm,
        head: Linear,
        finds: bool,
    ) -> None:
        """Raises `_NotPlain`."""
        dtype, hidden = embedding.dtype, embedding.width
        self._program = Program(lib, dtype)
        self._exchange: ShmExchange | None = None
        self._widths = [hidden, hidden, 0, 0, 0, 0]
        """Of the buffers' rows."""
        self._program.embed(embedding, _X)
        self._attentions = [
            self._layer(layer, first=i == 0, last=i == len(layers) - 1) for i, layer in enumerate(layers)
        ]
        """Their numbers in the program, and which contexts they see: query heads and window."""
        if not layers or max(layer.attention.rotation for layer in layers) >= MAX_ATTENTIONS:
            raise _NotPlain
        self._norm(norm, _X, _Y, _INNER)
        self._linear(head, _INNER, _LOGITS)
        self.finds = finds
        """Whether `run` gives whole logits, and what is largest in them."""
        if finds:
            self._program.argmax(_LOGITS, self._widths[_LOGITS])
        self._program.finish()
        self._memory = [torch.empty(0, dtype=torch.int32 if i == _STEPS else dtype) for i in range(_LOGITS + 1)]
        """Kept between steps: megabytes that come and go each time leave holes in the heap, as large as they are."""
        self._storage: weakref.ref[RankStorage] | None = None
        self._contexts: list[tuple[int, int, int | None]] = []
        """What a step has to bring: block group, query heads, window."""
        self._bound: Sequence[Batch] | None = None
        """Batches that the program will find where it found them last."""
        self._logits = self._memory[_LOGITS]

    def follows(self, batches: Sequence[Batch], storage: RankStorage) -> bool:
        """Whether these are the batches of the last step, one token further: then `run` needs nothing else."""
        return self._bound is batches and self._storage is not None and self._storage() is storage

    def takes(self, batches: Sequence[Batch], storage: RankStorage) -> bool:
        """Whether the kernels can read this storage."""
        if self._storage is None or self._storage() is not storage:
            self._place(storage)
        return len(self._contexts) <= MAX_ATTENTIONS and all(batch.contexts is not None for batch in batches)

    def bind(self, angles: Sequence[torch.Tensor], batches: Sequence[Batch]) -> None:
        """What `run` works on: batches in the storage that it `takes`."""
        contexts = []
        for group, num_heads, window in self._contexts:
            found = batches[group].contexts
            assert found is not None  # `takes`
            contexts.append(found.address(num_heads, window))
        batch, memory = batches[0], self._memory
        num_wanted, vocab = len(batch.sample_index), self._widths[_LOGITS]
        for i, kept in enumerate(memory):
            rows = num_wanted if i == _LOGITS else len(batch.token_ids)
            if len(kept) < rows * self._widths[i]:
                memory[i] = kept.new_empty(-(-rows // _ROWS) * _ROWS * self._widths[i])
        self._program.bind(batch.token_ids, batch.sample_index, memory, contexts, angles)
        self._logits = memory[_LOGITS][: num_wanted * vocab].view(num_wanted, vocab)
        moves = any(window is not None for _, _, window in self._contexts)  # and its contexts are made anew
        self._bound = None if moves else batches

    def run(self) -> tuple[torch.Tensor, Largest | None]:
        """This rank's part of the logits, and what is largest in them. Mutates the storage.

        The next call writes over the logits. Raises `DeviceError` if another rank of the group is gone.
        """
        largest = self._program.run()
        if self._exchange is not None:
            self._exchange.check()
        return self._logits, largest

    def _place(self, storage: RankStorage) -> None:
        """Tells the program where each layer's KV lies."""
        self._contexts = []
        for (attention, num_heads, window), (_, group, place) in zip(self._attentions, storage.places, strict=True):
            kind = group, num_heads, window
            if kind not in self._contexts:
                self._contexts.append(kind)
            self._program.place(attention, self._contexts.index(kind), storage.groups[group].slots[place].data_ptr())
        self._storage = weakref.ref(storage)

    def _layer(self, layer: DecoderLayer, first: bool, last: bool) -> tuple[int, int, int | None]:
        attention, mlp = layer.attention, layer.mlp
        if not isinstance(attention, Attention) or not isinstance(mlp, MLP):
            raise _NotPlain
        if not mlp.gated or mlp.activation not in ACTIVATIONS:
            raise _NotPlain
        self._norm(layer.attention_norm, _X, None if first else _Y)
        self._linear(attention.qkv, _Y, _WIDE)
        attend = self._attention(attention, wanted=last)
        if last:
            self._program.select(_INNER, attention.num_heads * attention.head_dim, _WIDE)
        self._linear(attention.output, _WIDE if last else _INNER, _Y)
        self._reduce(layer.parallel)
        if layer.attention_post_norm is not None:
            self._norm(layer.attention_post_norm, _Y, None)
        self._norm(layer.mlp_norm, _X, _Y)
        inner = self._linear(mlp.up, _Y, _WIDE) // 2
        if kernels_for(layer.mlp_norm.weight, inner) is None:
            raise _NotPlain
        self._program.gated(_WIDE, inner, mlp.activation, _INNER)
        self._linear(mlp.down, _INNER, _Y)
        self._reduce(layer.parallel)
        if layer.mlp_post_norm is not None:
            self._norm(layer.mlp_post_norm, _Y, None)
        return attend, attention.num_heads, attention.scoring.window

    def _reduce(self, parallel: TensorParallel) -> None:
        if parallel.size == 1:
            return
        if not isinstance(parallel, Ranks) or not isinstance(parallel.exchange, ShmExchange):
            raise _NotPlain
        self._exchange = parallel.exchange
        self._program.reduce(_Y, self._widths[_X], self._exchange.state)

    def _norm(self, norm: Norm, x: int, delta: int | None, out: int = _Y) -> None:
        if not isinstance(norm, RMSNorm):
            raise _NotPlain
        self._program.add_norm(x, delta, norm.weight, norm.eps, out, of_all=x == _X)

    def _linear(self, linear: Linear, x: int, out: int) -> int:
        """Returns its number of outputs."""
        if not isinstance(linear, PackedLinear | QuantizedLinear) or (packed := linear.packed) is None:
            raise _NotPlain
        if isinstance(packed, PackedIntegers):
            self._widths[_STEPS] = max(self._widths[_STEPS], packed.row_units)
        self._widths[x] = max(self._widths[x], packed.inputs)
        self._widths[out] = max(self._widths[out], packed.outputs)
        self._program.linear(x, packed, linear.bias, out, _STEPS)
        return packed.outputs

    def _attention(self, attention: Attention, wanted: bool) -> int:
        norms, eps = None, 0.0
        if attention.q_norm is not None and attention.k_norm is not None:
            norms, eps = (attention.q_norm.weight, attention.k_norm.weight), attention.q_norm.eps
        return self._program.attend(_WIDE, attention.rotation, attention.scoring, norms, eps, _INNER, wanted=wanted)
