"""A decoder as its spec describes it: embedding, layers, norm, output head.

Tensor parallelism: query, key and value heads, MLP channels and the vocabulary of the output head are cut evenly; the
two projections back to the hidden size give partial sums that are added over the ranks. With more ranks than KV heads,
neighbouring ranks hold the same one. The embedding table is whole on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import structlog
import torch

from kvferry.kernels.linear import Linear, PackedLinear, make_linear
from kvferry.kernels.packing import Quantization
from kvferry.kernels.rope import inverse_frequencies, rope_angles, scale_llama3
from kvferry.runtime.kv.storage import KVStorage
from kvferry.runtime.model.batch import Batch
from kvferry.runtime.model.layers import MLP, Attention, DecoderLayer, RMSNorm
from kvferry.runtime.model.loader import Weights
from kvferry.runtime.model.parallel import TensorParallel
from kvferry.runtime.model.spec import AttentionSpec, LayerSpec, MLPSpec, ModelSpec, RopeSpec

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Decoder:
    spec: ModelSpec
    dtype: torch.dtype
    embedding: torch.Tensor
    """`[vocab_size, hidden_size]`."""
    frequencies: list[torch.Tensor]
    """One per kind of rope: float32 `[head_dim / 2]`, radians a position."""
    layers: list[DecoderLayer]
    norm: RMSNorm
    head: Linear
    parallel: TensorParallel

    def forward(self, batch: Batch, storage: KVStorage) -> torch.Tensor:
        """Final hidden states of the tokens of `batch.sample_index`. Mutates `storage`."""
        x = self.embedding.index_select(0, batch.token_ids)
        angles = [rope_angles(batch.positions, frequencies, self.dtype) for frequencies in self.frequencies]
        delta: torch.Tensor | None = None
        for layer, slots, spans in zip(self.layers, storage.slots, storage.spans, strict=True):
            delta = layer(x, delta, angles[layer.attention.rope], batch, slots, spans)
        wanted = batch.sample_index
        return self.norm.of_sum_(x.index_select(0, wanted), None if delta is None else delta.index_select(0, wanted))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 `[rows, vocab_size]`. Every rank must call it."""
        return self.parallel.all_gather(self.head(hidden)).float()


def build_model(
    spec: ModelSpec,
    weights: Weights,
    dtype: torch.dtype,
    rank: int,
    parallel: TensorParallel,
    device: torch.device | str = "cpu",
    quantization: Quantization = "none",
) -> Decoder:
    """Reads this rank's part of the weights, tensor by tensor. Raises `InvalidArgument` if the model cannot be cut."""
    spec.check_tensor_parallel(parallel.size)
    builder = _Builder(spec, weights, dtype, rank, parallel, device, quantization)
    embedding = builder.get("embedding.weight")
    start, stop = builder.cut(spec.vocab_size)
    head = embedding[start:stop] if spec.tied_embeddings else builder.get("head.weight", 0, start, stop)
    layers = [builder.layer(f"layers.{i}", layer) for i, layer in enumerate(spec.layers)]
    output = builder.linear(head, fine=True)  # few rows reach it, and nothing behind it evens errors out
    if builder.num_unquantized:
        _log.warning(
            "linears_not_quantized", quantization=quantization, count=builder.num_unquantized, of=builder.num_linears
        )
    return Decoder(
        spec=spec,
        dtype=dtype,
        embedding=embedding,
        frequencies=[_frequencies(rope, dim).to(embedding.device) for rope, dim in builder.ropes],
        layers=layers,
        norm=builder.norm("norm"),
        head=output,
        parallel=parallel,
    )


def _frequencies(rope: RopeSpec, dim: int) -> torch.Tensor:
    frequencies, scaling = inverse_frequencies(dim, rope.theta), rope.scaling
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "llama3":
        return scale_llama3(
            frequencies,
            scaling.factor,
            scaling.low_freq_factor,
            scaling.high_freq_factor,
            scaling.original_max_context,
        )
    return frequencies


class _Builder:
    """Takes one rank's slices out of the whole model's parts."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        dtype: torch.dtype,
        rank: int,
        parallel: TensorParallel,
        device: torch.device | str,
        quantization: Quantization,
    ) -> None:
        self._spec, self._weights, self._dtype, self._device = spec, weights, dtype, device
        self._rank, self._parallel, self._quantization = rank, parallel, quantization
        self.num_linears = self.num_unquantized = 0
        self._kv_heads = spec.kv_layout(1, spec.dtype, parallel.size).heads(rank)
        self.ropes: list[tuple[RopeSpec, int]] = []
        """Kinds of rope with their dimensions, in the order in which layers came to need them."""

    def get(self, part: str, dim: int | None = None, start: int = 0, stop: int | None = None) -> torch.Tensor:
        return self._weights.get(part, self._dtype, dim, start, stop).to(self._device)

    def cut(self, count: int) -> tuple[int, int]:
        """This rank's even share of `count` rows."""
        share = count // self._parallel.size
        return self._rank * share, (self._rank + 1) * share

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None, fine: bool = False) -> Linear:
        made = make_linear(weight, bias, self._quantization, fine)
        self.num_linears += 1
        self.num_unquantized += self._quantization != "none" and isinstance(made, PackedLinear)
        return made

    def norm(self, part: str) -> RMSNorm:
        return RMSNorm(self.get(f"{part}.weight"), self._spec.norm.eps)

    def layer(self, part: str, layer: LayerSpec) -> DecoderLayer:
        return DecoderLayer(
            attention_norm=self.norm(f"{part}.attention_norm"),
            attention=self._attention(f"{part}.attention", layer.attention),
            mlp_norm=self.norm(f"{part}.mlp_norm"),
            mlp=self._mlp(f"{part}.mlp", layer.mlp),
            parallel=self._parallel,
        )

    def _attention(self, part: str, spec: AttentionSpec) -> Attention:
        q = self.cut(spec.num_heads * spec.head_dim)
        kv = self._kv_heads[0] * spec.head_dim, self._kv_heads[1] * spec.head_dim
        qkv = [(f"{part}.{name}", *cut) for name, cut in (("q", q), ("k", kv), ("v", kv))]
        return Attention(
            qkv=self._columns(qkv, spec.qkv_bias),
            output=self._rows(f"{part}.o", *q, spec.output_bias),
            q_norm=self.norm(f"{part}.q_norm") if spec.qk_norm else None,
            k_norm=self.norm(f"{part}.k_norm") if spec.qk_norm else None,
            num_heads=spec.num_heads // self._parallel.size,
            num_kv_heads=self._kv_heads[1] - self._kv_heads[0],
            head_dim=spec.head_dim,
            rope=self._rope(spec),
        )

    def _rope(self, spec: AttentionSpec) -> int:
        kind = spec.rope, spec.head_dim
        if kind not in self.ropes:
            self.ropes.append(kind)
        return self.ropes.index(kind)

    def _mlp(self, part: str, spec: MLPSpec) -> MLP:
        inner = self.cut(spec.inner_size)
        return MLP(
            gate_up=self._columns([(f"{part}.{name}", *inner) for name in ("gate", "up")], spec.bias),
            down=self._rows(f"{part}.down", *inner, spec.bias),
        )

    def _columns(self, parts: Sequence[tuple[str, int, int]], bias: bool) -> Linear:
        """Output channels `[start, stop)` of several linears, as one."""
        weight = torch.cat([self.get(f"{part}.weight", 0, start, stop) for part, start, stop in parts])
        if not bias:
            return self.linear(weight)
        return self.linear(weight, torch.cat([self.get(f"{part}.bias", 0, start, stop) for part, start, stop in parts]))

    def _rows(self, part: str, start: int, stop: int, bias: bool) -> Linear:
        """Input channels `[start, stop)`: a partial sum; so only one rank may add the bias."""
        weight = self.get(f"{part}.weight", 1, start, stop)
        return self.linear(weight, self.get(f"{part}.bias") if bias and self._rank == 0 else None)
