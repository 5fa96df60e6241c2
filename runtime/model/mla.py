"""Multi-head latent attention (DeepSeek-V2, V3), on the query heads of one rank; latents are whole on every rank.

Legend: T tokens, C hidden size, H query heads, and as in `kernels/mla.py`: L latent, P rotated, N unrotated, V value.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvferry.kernels.attention import write_kv
from kvferry.kernels.linear import Linear
from kvferry.kernels.mla import LatentHeads, gather_latents
from kvferry.kernels.rope import apply_rope_
from kvferry.runtime.model.batch import Batch
from kvferry.runtime.model.layers import RMSNorm

LATENT_EPS = 1e-6
"""Of the norms over latents, whatever the model's own norms have: so in DeepSeek's code and in transformers'."""


@dataclass(frozen=True, slots=True)
class LatentAttention:
    down: Linear
    """To the query's latent or, without one, to all `H·(N + P)` of it; then to `L + P`."""
    q_norm: RMSNorm | None
    q_up: Linear | None
    """From the query's latent, if there is one, to `H·(N + P)`."""
    kv_norm: RMSNorm
    heads: LatentHeads
    output: Linear
    num_heads: int
    rotation: int
    """Which of the decoder's kinds of rotation."""

    def __call__(
        self, x_TC: torch.Tensor, angles: torch.Tensor, batch: Batch, slots: torch.Tensor, spans: torch.Tensor
    ) -> torch.Tensor:
        """As `Attention`: this rank's share of the output; mutates the cache."""
        rank, rotated = len(self.kv_norm.weight), 2 * angles.shape[-1]
        q, latents_TW = self.down(x_TC).tensor_split([-(rank + rotated)], dim=1)
        if self.q_norm is not None and self.q_up is not None:
            q = self.q_up(self.q_norm(q))
        q_THD = q.view(len(q), self.num_heads, -1)
        apply_rope_(q_THD[..., -rotated:], angles)
        latents_TW[:, :rank].copy_(self.kv_norm(latents_TW[:, :rank]))
        apply_rope_(latents_TW[:, None, rank:], angles)
        packed = batch.format.pack(latents_TW)
        write_kv(slots, batch.gathers.write_index, packed[:, None])
        out = self._attend(q_THD, batch.format.unpack(packed), batch, spans)  # read as later steps will read it
        return self.output(out.flatten(1))

    def _attend(self, q_THD: torch.Tensor, latents_TW: torch.Tensor, batch: Batch, spans: torch.Tensor) -> torch.Tensor:
        found, stored = batch.gathers.parts(None), batch.format
        parts = [self.heads.decode(q_THD[part.tokens], spans, part.rows, stored) for part in found.decode]
        for part in found.prefixed:
            latents = gather_latents(spans, part.spans, part.gathered, stored)
            parts.append(self.heads.prefill(q_THD[part.tokens], latents, part.start))
        parts += [self.heads.prefill(q_THD[tokens], latents_TW[tokens], 0) for tokens in found.fresh]
        return parts[0] if len(parts) == 1 else torch.cat(parts)
