"""The parts of a decoder layer, on the heads and channels of one rank.

Legend: T tokens of the batch, C hidden size, H query heads, N KV heads, D head dim (heads of this rank).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from kvferry.kernels.activation import ACTIVATIONS, gated
from kvferry.kernels.attention import Scoring, causal_attention, gather_kv, paged_attention, write_kv
from kvferry.kernels.linear import Linear
from kvferry.kernels.norm import add_norm_, layer_norm, rms_norm
from kvferry.kernels.rope import apply_rope_
from kvferry.runtime.model.batch import Batch
from kvferry.runtime.model.parallel import TensorParallel
from kvferry.runtime.model.spec import Activation


@dataclass(frozen=True, slots=True)
class RMSNorm:
    weight: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)

    def of_sum_(self, x: torch.Tensor, delta: torch.Tensor | None) -> torch.Tensor:
        """Adds delta, if any, to x (mutates x); returns the norm of the sum."""
        return self(x) if delta is None else add_norm_(x, delta, self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class LayerNorm:
    weight: torch.Tensor
    bias: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps)

    def of_sum_(self, x: torch.Tensor, delta: torch.Tensor | None) -> torch.Tensor:
        """As `RMSNorm.of_sum_`."""
        return self(x if delta is None else x.add_(delta))


Norm = RMSNorm | LayerNorm


@dataclass(frozen=True, slots=True)
class Attention:
    qkv: Linear
    """To `(H + 2N)·D`: query heads, key heads, value heads."""
    output: Linear
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotation: int
    """Which of the decoder's kinds of rotation."""
    scoring: Scoring

    def __call__(
        self, x_TC: torch.Tensor, angles: torch.Tensor, batch: Batch, slots: torch.Tensor, spans: torch.Tensor
    ) -> torch.Tensor:
        """This rank's share of the output. Mutates the cache: all rows' KV is written before any row reads."""
        heads = self.num_heads
        qkv = self.qkv(x_TC).view(-1, heads + 2 * self.num_kv_heads, self.head_dim)
        if batch.contexts is None:
            out = self._gathered(qkv, angles, batch, slots, spans)
        elif self.q_norm is None or self.k_norm is None:
            out = batch.contexts.attend(qkv, angles, slots, self.scoring)
        else:
            norms = self.q_norm.weight, self.k_norm.weight
            out = batch.contexts.attend(qkv, angles, slots, self.scoring, *norms, self.q_norm.eps)
        return self.output(out.view(-1, heads * self.head_dim))

    def _gathered(
        self, qkv: torch.Tensor, angles: torch.Tensor, batch: Batch, slots: torch.Tensor, spans: torch.Tensor
    ) -> torch.Tensor:
        """The same by torch's operations, which need the context of a row in one piece. Contiguous `[T, H, D]`."""
        heads = self.num_heads
        q, kv = qkv[:, :heads], qkv[:, heads:]
        if self.q_norm is not None and self.k_norm is not None:
            q.copy_(self.q_norm(q))
            kv[:, : self.num_kv_heads].copy_(self.k_norm(kv[:, : self.num_kv_heads]))
        apply_rope_(qkv[:, : heads + self.num_kv_heads], angles)
        stored, num_kv_heads, scoring = batch.format, self.num_kv_heads, self.scoring
        if stored.turned:
            q = stored.turn(q)
            kv.copy_(stored.turn(kv))
        packed = stored.pack(kv.transpose(0, 1)).transpose(0, 1)
        write_kv(slots, batch.gathers.write_index, packed)
        found = batch.gathers.parts(scoring.window)
        parts = [
            paged_attention(q[part.tokens], spans, part.rows, num_kv_heads, scoring, stored) for part in found.decode
        ]
        for part in found.prefixed:
            k, v = gather_kv(spans, part.spans, part.gathered, num_kv_heads, stored)
            parts.append(causal_attention(q[part.tokens], k, v, part.start, scoring, part.first_key))
        for tokens in found.fresh:  # read as later steps will read it
            k, v = stored.unpack(packed[tokens].transpose(0, 1)).chunk(2)
            parts.append(causal_attention(q[tokens], k, v, 0, scoring))
        return stored.turn(parts[0] if len(parts) == 1 else torch.cat(parts))


class AnyAttention(Protocol):
    """`Attention`, or `LatentAttention` of `mla.py`."""

    @property
    def rotation(self) -> int: ...

    def __call__(
        self, x_TC: torch.Tensor, angles: torch.Tensor, batch: Batch, slots: torch.Tensor, spans: torch.Tensor
    ) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class MLP:
    up: Linear
    """With a gate: both, the gate first."""
    down: Linear
    activation: Activation
    gated: bool

    def __call__(self, x_TC: torch.Tensor) -> torch.Tensor:
        """This rank's share of the output."""
        inner = self.up(x_TC)
        return self.down(gated(inner, self.activation) if self.gated else ACTIVATIONS[self.activation](inner))


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    attention_norm: Norm
    attention: AnyAttention
    attention_post_norm: Norm | None
    mlp_norm: Norm
    mlp: Callable[[torch.Tensor], torch.Tensor]
    """`MLP` or `MoE`."""
    mlp_post_norm: Norm | None
    parallel: TensorParallel

    def __call__(
        self,
        x_TC: torch.Tensor,
        delta_TC: torch.Tensor | None,
        angles: torch.Tensor,
        batch: Batch,
        slots: torch.Tensor,
        spans: torch.Tensor,
    ) -> torch.Tensor:
        """Takes the sum of both (None: nothing to add yet); returns what is still to be added. Mutates `x_TC`.

        So each sum and the norm after it are one operation.
        """
        normed = self.attention_norm.of_sum_(x_TC, delta_TC)
        delta = self.parallel.all_reduce_(self.attention(normed, angles, batch, slots, spans))
        if self.attention_post_norm is not None:
            delta = self.attention_post_norm(delta)
        delta = self.parallel.all_reduce_(self.mlp(self.mlp_norm.of_sum_(x_TC, delta)))
        return delta if self.mlp_post_norm is None else self.mlp_post_norm(delta)
