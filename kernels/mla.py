"""Attention whose keys and values are projections of one latent vector per token, from blocks that hold the latents.

    cached, per token    latent (L) │ rotated part of the key (P), for all heads
    key of a head        up_key @ latent (N) │ rotated part (P)
    value of a head      up_value @ latent (V)

Two ways to the same result. Expanded: compute the keys and values of all positions, then attend as usual. Absorbed:
since `q·(up_key @ latent) = (up_key.T @ q)·latent`, bring the queries into the latents' space, attend to the latents
themselves as if they were the only KV head, and project what comes out. Source: DeepSeek-V2 report, section 2.1.

Legend: T tokens, R rows, Q query tokens of a row, S positions of its context, H query heads; L, P, N, V as above;
W = L + P: what is cached.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kvferry.kernels.attention import PagedRows, Scoring, causal_attention
from kvferry.kernels.formats import SlotFormat


@dataclass(frozen=True, slots=True)
class LatentHeads:
    up: torch.Tensor
    """Contiguous `[H, N + V, L]`: to each head's key (without its rotated part), then to its value."""
    key_dim: int
    """N."""
    scoring: Scoring

    def decode(self, q_RHD: torch.Tensor, spans: torch.Tensor, rows: PagedRows, stored: SlotFormat) -> torch.Tensor:
        """Each row's one query over its whole context, its own token included. `[R, H, V]`.

        q_RHD: `[R, H, N + P]`, the last P rotated. Mutates `rows.gathered`.
        """
        q_RHW = self._absorbed(q_RHD)
        latents = gather_latents(spans, rows.spans, rows.gathered, stored).index_fill_(0, rows.unfilled, 0.0)
        latents = latents.view(len(q_RHW), -1, q_RHW.shape[-1])
        scores = torch.baddbmm(rows.mask, q_RHW, latents.transpose(1, 2), alpha=self.scoring.scale)
        return self._values(torch.bmm(torch.softmax(scores, dim=-1), latents[..., : self._rank]))

    def prefill(self, q_QHD: torch.Tensor, latents_SW: torch.Tensor, start: int) -> torch.Tensor:
        """One row: queries at `start, start + 1, …` over all positions up to their own. `[Q, H, V]`.

        latents_SW: positions `0, 1, …`, at least up to the last query; any strides.
        """
        latents = latents_SW[: start + len(q_QHD)]
        return (self.absorbed if self.absorbs(start, len(q_QHD)) else self.expanded)(q_QHD, latents, start)

    def absorbs(self, start: int, num_queries: int) -> bool:
        """Whether absorbing takes fewer multiplications: few queries behind a long context."""
        expanding = start * self._rank
        longer_scores = num_queries * (start + num_queries // 2) * (2 * self._rank - self.up.shape[1])
        return expanding * self.up.shape[1] > longer_scores

    def absorbed(self, q_QHD: torch.Tensor, latents_SW: torch.Tensor, start: int) -> torch.Tensor:
        """As `prefill`."""
        key, value = latents_SW[None], latents_SW[None, :, : self._rank]
        return self._values(causal_attention(self._absorbed(q_QHD), key, value, start, self.scoring))

    def expanded(self, q_QHD: torch.Tensor, latents_SW: torch.Tensor, start: int) -> torch.Tensor:
        """As `prefill`."""
        num_heads, width, rank = self.up.shape
        both = F.linear(latents_SW[:, :rank], self.up.view(-1, rank)).view(-1, num_heads, width).transpose(0, 1)
        rotated = latents_SW[None, :, rank:].expand(num_heads, -1, -1)
        key = torch.cat((both[..., : self.key_dim], rotated), dim=-1)
        value = both[..., self.key_dim :].contiguous()  # on a CPU, products with strided ones take four times as long
        return causal_attention(q_QHD, key, value, start, self.scoring)

    @property
    def _rank(self) -> int:
        """L."""
        return self.up.shape[2]

    def _absorbed(self, q_THD: torch.Tensor) -> torch.Tensor:
        """`[T, H, W]`."""
        keys = torch.bmm(q_THD[..., : self.key_dim].transpose(0, 1), self.up[:, : self.key_dim])
        return torch.cat((keys.transpose(0, 1), q_THD[..., self.key_dim :]), dim=-1)

    def _values(self, out_THL: torch.Tensor) -> torch.Tensor:
        """`[T, H, V]`."""
        return torch.bmm(out_THL.transpose(0, 1), self.up[:, self.key_dim :].transpose(1, 2)).transpose(0, 1)


def gather_latents(
    spans: torch.Tensor, index: torch.Tensor, gathered: torch.Tensor, stored: SlotFormat
) -> torch.Tensor:
    """Copies the context of one row or several together: `[S, W]`. Mutates `gathered`, in which the result may lie."""
    torch.index_select(spans, 0, index, out=gathered)
    return stored.unpack(gathered.view(-1, stored.slot))
