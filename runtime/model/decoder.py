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
import torch.nn.functional as F

from kvferry.kernels.attention import Scoring
from kvferry.kernels.embedding import Embedding
from kvferry.kernels.linear import Linear, PackedLinear, make_linear
from kvferry.kernels.mla import LatentHeads
from kvferry.kernels.moe import GroupedLinear
from kvferry.kernels.packing import Quantization
from kvferry.kernels.sampling import Largest
from kvferry.runtime.kv.storage import RankStorage
from kvferry.runtime.model.batch import Batch
from kvferry.runtime.model.compiled import CompiledDecoder, compile_decoder
from kvferry.runtime.model.layers import MLP, Attention, DecoderLayer, LayerNorm, Norm, RMSNorm
from kvferry.runtime.model.loader import Weights
from kvferry.runtime.model.mla import LATENT_EPS, LatentAttention
from kvferry.runtime.model.moe import MoE, make_routing
from kvferry.runtime.model.parallel import TensorParallel
from kvferry.runtime.model.rotation import Rotation, make_rotation, rotated_order
from kvferry.runtime.model.spec import AttentionSpec, LatentSpec, LayerSpec, MLPSpec, ModelSpec, MoESpec, RopeSpec

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Decoder:
    spec: ModelSpec
    dtype: torch.dtype
    embedding: Embedding
    positions: torch.Tensor | None
    """`[num_positions, hidden_size]`."""
    rotations: list[Rotation]
    layers: list[DecoderLayer]
    norm: Norm
    head: Linear
    parallel: TensorParallel
    compiled: CompiledDecoder | None
    """`forward` in one call, if it can be."""

    def forward(self, batches: Sequence[Batch], storage: RankStorage) -> tuple[torch.Tensor, Largest | None]:
        """Logits of the tokens of `sample_index`, and what is largest in them, if that was found on the way.

        Logits `[rows, vocab_size]` are as the head gives them, in the model's dtype; if they are capped, in float32.
        `batches`: by block group. Every rank must call it. Mutates `storage`.
        """
        compiled = self.compiled
        if compiled is not None and compiled.finds and compiled.follows(batches, storage):
            return compiled.run()  # the caches are full of weights: whatever else is called takes long
        return self._forward(batches, storage)

    @torch.inference_mode()
    def _forward(self, batches: Sequence[Batch], storage: RankStorage) -> tuple[torch.Tensor, Largest | None]:
        compiled, largest = self.compiled, None
        if compiled is not None and (compiled.follows(batches, storage) or self._bind(compiled, batches, storage)):
            logits, largest = compiled.run()
        else:
            logits = self.head(self._hidden(batches, storage))
        logits = self.parallel.all_gather(logits)
        if logits.shape[-1] > self.spec.vocab_size:
            logits = logits[..., : self.spec.vocab_size].contiguous()
        if (cap := self.spec.logit_softcap) is not None:
            logits = (logits.float() / cap).tanh_().mul_(cap)
        return logits, largest

    def _bind(self, compiled: CompiledDecoder, batches: Sequence[Batch], storage: RankStorage) -> bool:
        """False: the program cannot compute this step."""
        if not compiled.takes(batches, storage):
            return False
        compiled.bind([rotation.table(batches[0].num_positions, self.dtype) for rotation in self.rotations], batches)
        return True

    def _hidden(self, batches: Sequence[Batch], storage: RankStorage) -> torch.Tensor:
        """Final hidden states of the tokens of `sample_index`, layer by layer."""
        batch = batches[0]
        x = self.embedding(batch.token_ids)
        if self.positions is not None:
            x.add_(self.positions.index_select(0, batch.positions))
        if batch.contexts is None:
            angles = [rotation.angles(batch.positions, self.dtype) for rotation in self.rotations]
        else:
            angles = [rotation.table(batch.num_positions, self.dtype) for rotation in self.rotations]
        delta: torch.Tensor | None = None
        for layer, (_, group, place) in zip(self.layers, storage.places, strict=True):
            memory = storage.groups[group]
            slots, spans = memory.slots[place], memory.spans[place]
            delta = layer(x, delta, angles[layer.attention.rotation], batches[group], slots, spans)
        wanted = batch.sample_index
        return self.norm.of_sum_(x.index_select(0, wanted), None if delta is None else delta.index_select(0, wanted))


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
    embedding, head = builder.ends()
    layers = [builder.layer(f"layers.{i}", layer) for i, layer in enumerate(spec.layers)]
    norm = builder.norm("norm")
    if builder.num_unquantized:
        _log.warning(
            "linears_not_quantized", quantization=quantization, count=builder.num_unquantized, of=builder.num_linears
        )
    positions = None if spec.num_positions is None else builder.get("positions.weight")
    finds = parallel.size == 1 and spec.logit_softcap is None
    return Decoder(
        spec=spec,
        dtype=dtype,
        embedding=embedding,
        positions=positions,
        rotations=[make_rotation(rope, dim, spec.max_context, embedding.device) for rope, dim in builder.ropes],
        layers=layers,
        norm=norm,
        head=head,
        parallel=parallel,
        compiled=None if positions is not None else compile_decoder(embedding, layers, norm, head, finds),
    )


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
        self.ropes: list[tuple[RopeSpec | None, int]] = []
        """Kinds of rope with their dimensions, in the order in which layers came to need them."""

    def get(self, part: str, dim: int | None = None, start: int = 0, stop: int | None = None) -> torch.Tensor:
        return self._weights.get(part, self._dtype, dim, start, stop).to(self._device)

    def cut(self, count: int) -> tuple[int, int]:
        """This rank's even share of `count` rows."""
        share = count // self._parallel.size
        return self._rank * share, (self._rank + 1) * share

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, fine: bool = False) -> Linear:
        made = make_linear(weight, bias, self._quantization, fine)
        self.num_linears += 1
        self.num_unquantized += self._quantization != "none" and isinstance(made, PackedLinear)
        return made

    def norm(self, part: str, order: list[int] | None = None) -> Norm:
        """`order`: of the weights, if not the files'."""
        spec = self._spec.norm
        weight = self._weights.get(f"{part}.weight", torch.float32) + spec.offset
        weight = (weight if order is None else weight[order]).to(self._device, self._dtype)
        if spec.kind == "rms":
            return RMSNorm(weight, spec.eps)
        return LayerNorm(weight, self.get(f"{part}.bias"), spec.eps)

    def ends(self) -> tuple[Embedding, Linear]:
        """Embedding and head. Of the head as many rows on every rank: the last ones are filled up with zeros."""
        spec, size, tied = self._spec, self._parallel.size, self._spec.tied_embeddings
        table = self.get("embedding.weight")
        share = -(-spec.vocab_size // size)
        start, stop = (min(rank * share, spec.vocab_size) for rank in (self._rank, self._rank + 1))
        weight = table[start:stop] if tied else self.get("head.weight", 0, start, stop)
        whole = weight if len(weight) == share else F.pad(weight, (0, 0, 0, share - len(weight)))
        head = self.linear(whole, fine=True)  # few rows reach it, and nothing behind it evens errors out
        scale = torch.tensor(spec.embedding_scale).to(self._dtype).item()
        return Embedding(table, scale, head if tied and size == 1 else None), head

    def layer(self, part: str, layer: LayerSpec) -> DecoderLayer:
        return DecoderLayer(
            attention_norm=self.norm(f"{part}.attention_norm"),
            attention=self._any_attention(f"{part}.attention", layer.attention),
            attention_post_norm=self.norm(f"{part}.attention_post_norm") if layer.post_norms else None,
            mlp_norm=self.norm(f"{part}.mlp_norm"),
            mlp=self._mlp(f"{part}.mlp", layer.mlp)
            if isinstance(layer.mlp, MLPSpec)
            else self._moe(f"{part}.mlp", layer.mlp),
            mlp_post_norm=self.norm(f"{part}.mlp_post_norm") if layer.post_norms else None,
            parallel=self._parallel,
        )

    def _any_attention(self, part: str, spec: AttentionSpec | LatentSpec) -> Attention | LatentAttention:
        return self._attention(part, spec) if isinstance(spec, AttentionSpec) else self._latent(part, spec)

    def _attention(self, part: str, spec: AttentionSpec) -> Attention:
        q = self.cut(spec.num_heads * spec.head_dim)
        kv = self._kv_heads[0] * spec.head_dim, self._kv_heads[1] * spec.head_dim
        order = rotated_order(spec.rope, spec.head_dim)
        qkv = [(f"{part}.{name}", *cut) for name, cut in (("q", q), ("k", kv), ("v", kv))]
        return Attention(
            qkv=self._columns(qkv, spec.qkv_bias, [order, order, None]),
            output=self._rows(f"{part}.o", *q, spec.output_bias),
            q_norm=self._head_norm(f"{part}.q_norm", order) if spec.qk_norm else None,
            k_norm=self._head_norm(f"{part}.k_norm", order) if spec.qk_norm else None,
            num_heads=spec.num_heads // self._parallel.size,
            num_kv_heads=self._kv_heads[1] - self._kv_heads[0],
            head_dim=spec.head_dim,
            rotation=self._rotation(spec.rope, spec.head_dim),
            scoring=Scoring(spec.head_dim**-0.5 if spec.scale is None else spec.scale, spec.softcap, spec.window),
        )

    def _head_norm(self, part: str, order: list[int] | None) -> RMSNorm:
        norm = self.norm(part, order)
        assert isinstance(norm, RMSNorm)  # `spec.checked`: the kernels know no other over heads
        return norm

    def _latent(self, part: str, spec: LatentSpec) -> LatentAttention:
        width = spec.key_dim + spec.value_dim
        q, kv, values = (self.cut(spec.num_heads * n) for n in (spec.key_dim + spec.rope_dim, width, spec.value_dim))
        direct = spec.query_rank is None
        first = (f"{part}.q", *q) if spec.query_rank is None else (f"{part}.q_down", 0, spec.query_rank)
        up = self.get(f"{part}.kv_up.weight", 0, *kv)
        return LatentAttention(
            down=self._columns([first, (f"{part}.kv_down", 0, spec.head_dim)], False),
            q_norm=None if direct else RMSNorm(self.get(f"{part}.q_down_norm.weight"), LATENT_EPS),
            q_up=None if direct else self._columns([(f"{part}.q_up", *q)], False),
            kv_norm=RMSNorm(self.get(f"{part}.kv_down_norm.weight"), LATENT_EPS),
            heads=LatentHeads(up.view(-1, width, spec.latent_rank), spec.key_dim, Scoring(spec.scale)),
            output=self._rows(f"{part}.o", *values, False),
            num_heads=spec.num_heads // self._parallel.size,
            rotation=self._rotation(spec.rope, spec.rope_dim),
        )

    def _rotation(self, rope: RopeSpec | None, dim: int) -> int:
        kind = rope, dim
        if kind not in self.ropes:
            self.ropes.append(kind)
        return self.ropes.index(kind)

    def _mlp(self, part: str, spec: MLPSpec) -> MLP:
        inner = self.cut(spec.inner_size)
        names = ("gate", "up") if spec.gated else ("up",)
        return MLP(
            up=self._columns([(f"{part}.{name}", *inner) for name in names], spec.bias),
            down=self._rows(f"{part}.down", *inner, spec.bias),
            activation=spec.activation,
            gated=spec.gated,
        )

    def _moe(self, part: str, spec: MoESpec) -> MoE:
        """Every rank has a slice of each expert."""
        expert = MLPSpec(inner_size=spec.inner_size, activation=spec.activation)
        shared = MLPSpec(inner_size=spec.shared_size, activation=spec.activation)
        experts = [self._mlp(f"{part}.experts.{i}", expert) for i in range(spec.num_experts)]
        return MoE(
            router=self._float32(f"{part}.router.weight"),
            correction=self._float32(f"{part}.router.correction") if spec.correction else None,
            routing=make_routing(spec),
            gate_up=GroupedLinear([one.up for one in experts]),
            down=GroupedLinear([one.down for one in experts]),
            activation=spec.activation,
            shared=self._mlp(f"{part}.shared", shared) if spec.shared_size else None,
        )

    def _float32(self, part: str) -> torch.Tensor:
        return self._weights.get(part, torch.float32).to(self._device)

    def _columns(
        self, parts: Sequence[tuple[str, int, int]], bias: bool, orders: Sequence[list[int] | None] | None = None
    ) -> Linear:
        """Output channels `[start, stop)` of several linears, as one; `orders`: within each head, if not the files'."""
        orders = orders or [None] * len(parts)
        tensors = [
            torch.cat(
                [
                    _reordered(self.get(f"{part}.{kind}", 0, start, stop), order)
                    for (part, start, stop), order in zip(parts, orders, strict=True)
                ]
            )
            for kind in (("weight", "bias") if bias else ("weight",))
        ]
        return self.linear(*tensors)

    def _rows(self, part: str, start: int, stop: int, bias: bool) -> Linear:
        """Input channels `[start, stop)`: a partial sum; so only one rank may add the bias."""
        weight = self.get(f"{part}.weight", 1, start, stop)
        return self.linear(weight, self.get(f"{part}.bias") if bias and self._rank == 0 else None)


def _reordered(rows: torch.Tensor, order: list[int] | None) -> torch.Tensor:
    """Rows of each head in another order."""
    if order is None:
        return rows
    heads = rows.view(-1, len(order), *rows.shape[1:])
    return heads[:, order].reshape(rows.shape)
