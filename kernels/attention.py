"""Attention over keys and values that lie in blocks.

Legend: T tokens, R rows, Q query tokens of a row, H query heads, N KV heads (G = H/N query heads share one), S gathered
slots of a row (whole blocks, padded to the longest row), B block size, D head dim, E = B·D.

One layer's cache is seen in two flat ways, both contiguous: as slots `[·, D]` (one head of one token) and as spans
`[·, E]` (one head of one block). What a step writes and reads is named by indices into them, made once per step and
valid for all layers.

Slots that no token has filled may hold anything, NaN included. They are set to zero after the gather and their scores
to -inf, so they never reach a result.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True, slots=True)
class PagedRows:
    """Where rows of equal query length find their context."""

    spans: torch.Tensor
    """int64 `[2·R·N·S/B]`: the spans to gather, ordered keys/values, row, head, block. Padding names a filled span."""
    unfilled: torch.Tensor
    """int64: slots of the gathered `[2·R·N·S, D]` that hold no token; padding that names filled spans is not listed."""
    mask: torch.Tensor
    """0 where a query may look, else -inf. Decode rows: `[R·N, 1, S]`; one prefill row: `[Q, S]`."""
    gathered: torch.Tensor
    """Scratch `[2·R·N·S/B, E]`; overwritten by every call."""


def write_kv(slots: torch.Tensor, index: torch.Tensor, kv_TND: torch.Tensor) -> None:
    """Stores new keys and values. Mutates `slots` `[·, D]`.

    index: int64 `[T·2N]`; kv_TND: `[T, 2N, D]` (keys of all heads, then values), any strides.
    """
    slots.index_copy_(0, index, kv_TND.reshape(-1, kv_TND.shape[-1]))


def paged_attention(q_RHD: torch.Tensor, spans: torch.Tensor, rows: PagedRows, num_kv_heads: int) -> torch.Tensor:
    """Decode rows: each row's one query over its whole context, its own token included. `[R, H, D]`.

    Query heads that share a KV head form one small matrix, so keys and values are read once for all of them. On a CPU
    two batched products are 2-3 times as fast as the fused kernel, which is made for long queries.
    """
    num_rows, num_heads, head_dim = q_RHD.shape
    k, v = _gather(spans, rows, num_rows * num_kv_heads, head_dim)
    q = q_RHD.reshape(num_rows * num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = torch.baddbmm(rows.mask, q, k.transpose(1, 2), alpha=head_dim**-0.5)
    return torch.bmm(torch.softmax(scores, dim=-1), v).view(num_rows, num_heads, head_dim)


def paged_prefill_attention(
    q_QHD: torch.Tensor, spans: torch.Tensor, row: PagedRows, num_kv_heads: int
) -> torch.Tensor:
    """One prefill row behind a cached prefix: Q queries over prefix and new tokens, causally. `[Q, H, D]`."""
    k, v = _gather(spans, row, num_kv_heads, q_QHD.shape[-1])
    return _fused(q_QHD, k, v, mask=row.mask)


def fresh_attention(q_QHD: torch.Tensor, kv_QND: torch.Tensor) -> torch.Tensor:
    """One prefill row without cached prefix, from the keys and values just computed (`[Q, 2N, D]`). `[Q, H, D]`."""
    k, v = kv_QND.chunk(2, dim=1)
    return _fused(q_QHD, k.transpose(0, 1), v.transpose(0, 1), mask=None)


def _gather(spans: torch.Tensor, rows: PagedRows, num_heads: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values `[R·N, S, D]`, free of what no token wrote."""
    torch.index_select(spans, 0, rows.spans, out=rows.gathered)
    rows.gathered.view(-1, head_dim).index_fill_(0, rows.unfilled, 0.0)
    k, v = rows.gathered.view(2, num_heads, -1, head_dim)
    return k, v


def _fused(q_QHD: torch.Tensor, k_NSD: torch.Tensor, v_NSD: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Causal without a mask."""
    out = F.scaled_dot_product_attention(
        q_QHD.transpose(0, 1)[None],
        k_NSD[None],
        v_NSD[None],
        attn_mask=mask,
        is_causal=mask is None,
        enable_gqa=q_QHD.shape[1] != k_NSD.shape[0],
    )
    return out[0].transpose(0, 1)
