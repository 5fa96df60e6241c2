"""The decoder of the Llama family: Llama, Mistral, Qwen2, Qwen3 (they differ in biases, norms and rope).

Tensor parallelism: query, key and value heads, MLP channels and the vocabulary of the output head are cut evenly; the
two projections back to the hidden size give partial sums that are added over the ranks. With more ranks than KV heads,
neighbouring ranks hold the same one. The embedding table is whole on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvferry.kernels.linear import PackedLinear
from kvferry.kernels.rope import inverse_frequencies, rope_angles, scale_llama3
from kvferry.runtime.kv.storage import KVStorage
from kvferry.runtime.model.batch import Batch
from kvferry.runtime.model.layers import MLP, Attention, DecoderLayer, RMSNorm
from kvferry.runtime.model.loader import Weights
from kvferry.runtime.model.parallel import TensorParallel
from kvferry.runtime.model.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Llama:
    spec: ModelSpec
    dtype: torch.dtype
    embedding: torch.Tensor
    """`[vocab_size, hidden_size]`."""
    frequencies: torch.Tensor
    """float32 `[head_dim / 2]`, radians a position."""
    layers: list[DecoderLayer]
    norm: RMSNorm
    head: PackedLinear
    parallel: TensorParallel

    def forward(self, batch: Batch, storage: KVStorage) -> torch.Tensor:
        """Final hidden states of the tokens of `batch.sample_index`. Mutates `storage`."""
        x = self.embedding.index_select(0, batch.token_ids)
        angles = rope_angles(batch.positions, self.frequencies, self.dtype)
        delta: torch.Tensor | None = None
        for layer, slots, spans in zip(self.layers, storage.slots, storage.spans, strict=True):
            delta = layer(x, delta, angles, batch, slots, spans)
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
) -> Llama:
    """Reads this rank's part of the weights, tensor by tensor. Raises `InvalidArgument` if the model cannot be cut."""
    spec.check_tensor_parallel(parallel.size)
    reader = _Reader(spec, weights, dtype, rank, parallel, device)
    embedding = reader.get("model.embed_tokens.weight")
    start, stop = reader.cut(spec.vocab_size)
    head = embedding[start:stop] if spec.tied_embeddings else reader.get("lm_head.weight", 0, start, stop)
    return Llama(
        spec=spec,
        dtype=dtype,
        embedding=embedding,
        frequencies=_frequencies(spec).to(embedding.device),
        layers=[reader.layer(i) for i in range(spec.num_layers)],
        norm=reader.norm("model.norm"),
        head=PackedLinear(head),
        parallel=parallel,
    )


def _frequencies(spec: ModelSpec) -> torch.Tensor:
    frequencies, scaling = inverse_frequencies(spec.head_dim, spec.rope_theta), spec.rope_scaling
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


class _Reader:
    """Takes one rank's slices out of the whole model's tensors."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        dtype: torch.dtype,
        rank: int,
        parallel: TensorParallel,
        device: torch.device | str,
    ) -> None:
        self._spec, self._weights, self._dtype, self._device = spec, weights, dtype, device
        self._rank, self._parallel = rank, parallel
        self._kv_heads = spec.kv_layout(1, spec.dtype, parallel.size).heads(rank)

    def get(self, name: str, dim: int | None = None, start: int = 0, stop: int | None = None) -> torch.Tensor:
        return self._weights.get(name, self._dtype, dim, start, stop).to(self._device)

    def cut(self, count: int) -> tuple[int, int]:
        """This rank's even share of `count` rows."""
        share = count // self._parallel.size
        return self._rank * share, (self._rank + 1) * share

    def norm(self, name: str) -> RMSNorm:
        return RMSNorm(self.get(f"{name}.weight"), self._spec.rms_eps)

    def layer(self, index: int) -> DecoderLayer:
        spec, prefix = self._spec, f"model.layers.{index}."
        q, inner = self.cut(spec.num_heads * spec.head_dim), self.cut(spec.intermediate_size)
        kv = self._kv_heads[0] * spec.head_dim, self._kv_heads[1] * spec.head_dim
        qkv = [(f"{prefix}self_attn.{name}_proj", *cut) for name, cut in (("q", q), ("k", kv), ("v", kv))]
        gate_up = [(f"{prefix}mlp.{name}_proj", *inner) for name in ("gate", "up")]
        attention = Attention(
            qkv=self._columns(qkv, spec.attention_bias),
            output=self._rows(f"{prefix}self_attn.o_proj", *q, spec.output_bias),
            q_norm=self.norm(f"{prefix}self_attn.q_norm") if spec.qk_norm else None,
            k_norm=self.norm(f"{prefix}self_attn.k_norm") if spec.qk_norm else None,
            num_heads=spec.num_heads // self._parallel.size,
            num_kv_heads=self._kv_heads[1] - self._kv_heads[0],
            head_dim=spec.head_dim,
        )
        return DecoderLayer(
            attention_norm=self.norm(f"{prefix}input_layernorm"),
            attention=attention,
            mlp_norm=self.norm(f"{prefix}post_attention_layernorm"),
            mlp=MLP(
                gate_up=self._columns(gate_up, spec.mlp_bias),
                down=self._rows(f"{prefix}mlp.down_proj", *inner, spec.mlp_bias),
            ),
            parallel=self._parallel,
        )

    def _columns(self, parts: Sequence[tuple[str, int, int]], bias: bool) -> PackedLinear:
        """Output channels `[start, stop)` of several linears, as one."""
        weight = torch.cat([self.get(f"{name}.weight", 0, start, stop) for name, start, stop in parts])
        if not bias:
            return PackedLinear(weight)
        return PackedLinear(
            weight, torch.cat([self.get(f"{name}.bias", 0, start, stop) for name, start, stop in parts])
        )

    def _rows(self, name: str, start: int, stop: int, bias: bool) -> PackedLinear:
        """Input channels `[start, stop)`: a partial sum; so only one rank may add the bias."""
        weight = self.get(f"{name}.weight", 1, start, stop)
        return PackedLinear(weight, self.get(f"{name}.bias") if bias and self._rank == 0 else None)
