"""Attention over keys and values that lie in blocks.

Legend: T tokens, R rows, Q query tokens of a row, H query heads, N KV heads (G = H/N query heads share one), S gathered
slots of a row (whole blocks, padded to the longest row), B block size, D head dim.

One layer's cache is seen in two flat ways, both contiguous: as slots (one head of one token, stored in some `formats`)
and as spans `[·, E]` (one head of one block, E = B slots). What a step writes and reads is named by indices into them,
made once per step and valid for all layers.

Slots that no token has filled may hold anything, NaN included. Prefill cuts them off; decode sets them to zero after
the gather and their scores to -inf. So they never reach a result.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvferry.kernels.formats import SlotFormat

_CHUNK = 64
"""Queries scored at once: enough for the matrix units, few enough that little above the diagonal is computed."""


@dataclass(frozen=True, slots=True)
class Scoring:
    """How a query scores what it sees."""

    scale: float
    """Scores are `scale · q·k`."""
    softcap: float | None = None
    """Then `softcap · tanh(score / softcap)`."""
    window: int | None = None
    """A query at position p sees the positions `p - window + 1 … p`; None: all up to its own."""


@dataclass(frozen=True, slots=True)
class PagedRows:
    """Where the context of some rows lies."""

    spans: torch.Tensor
    """int64 `[2·R·N·S/B]`: the spans to gather, ordered keys/values, row, head, block. Padding names a filled span."""
    gathered: torch.Tensor
    """Scratch `[2·R·N·S/B, E]`; overwritten by every call."""
    unfilled: torch.Tensor
    """int64: slots of the gathered `[2·R·N·S]` that hold no token. Padding names filled ones and is not listed."""
    mask: torch.Tensor
    """`[R·N, 1, S]`: 0 where the row sees a token, else -inf."""


def write_kv(slots: torch.Tensor, index: torch.Tensor, packed_TN: torch.Tensor) -> None:
    """Stores new keys and values. Mutates `slots` `[·, slot]`.

    index: int64 `[T·2N]`; packed_TN: `[T, 2N, slot]` (keys of all heads, then values), any strides.
    """
    slots.index_copy_(0, index, packed_TN.reshape(-1, packed_TN.shape[-1]))


def gather_kv(
    spans: torch.Tensor,
    index: torch.Tensor,
    gathered: torch.Tensor,
    num_heads: int,
    stored: SlotFormat,
    unfilled: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies the context of `num_heads` heads (of one row, or of R rows) together: keys and values `[R·N, S, D]`.

    index, gathered, unfilled: as in `PagedRows`. Mutates `gathered`, in which the result may lie.
    """
    torch.index_select(spans, 0, index, out=gathered)
    kv = stored.unpack(gathered.view(-1, stored.slot))
    if unfilled is not None:
        kv.index_fill_(0, unfilled, 0.0)
    k, v = kv.view(2, num_heads, -1, stored.head_dim)
    return k, v


def paged_attention(
    q_RHD: torch.Tensor,
    spans: torch.Tensor,
    rows: PagedRows,
    num_kv_heads: int,
    scoring: Scoring,
    stored: SlotFormat,
) -> torch.Tensor:
    """Decode rows: each row's one query over what it sees, its own token included. `[R, H, D]`.

    Query heads that share a KV head form one small matrix, so keys and values are read once for all of them.
    `rows` were made for the window of `scoring`.
    """
    num_rows, num_heads, head_dim = q_RHD.shape
    k, v = gather_kv(spans, rows.spans, rows.gathered, num_rows * num_kv_heads, stored, rows.unfilled)
    q = q_RHD.reshape(num_rows * num_kv_heads, num_heads // num_kv_heads, head_dim)
    if scoring.softcap is None:
        scores = torch.baddbmm(rows.mask, q, k.transpose(1, 2), alpha=scoring.scale)
    else:
        scores = _capped(torch.bmm(q, k.transpose(1, 2)).mul_(scoring.scale), scoring.softcap).add_(rows.mask)
    return torch.bmm(torch.softmax(scores, dim=-1), v).view(num_rows, num_heads, head_dim)


def causal_attention(
    q_QHD: torch.Tensor, k_NSD: torch.Tensor, v_NSD: torch.Tensor, start: int, scoring: Scoring, first_key: int = 0
) -> torch.Tensor:
    """One prefill row: queries at positions `start, start + 1, …` over what they see. `[Q, H, D]`.

    k_NSD, v_NSD: positions `first_key, first_key + 1, …`, of which the first query's window may not begin earlier; what
    lies behind the last query is not read; any strides. The result is as long as values are.
    """
    num_queries, num_heads, head_dim = q_QHD.shape
    num_kv_heads = k_NSD.shape[0]
    group = num_heads // num_kv_heads
    q = q_QHD.view(num_queries, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
    width = v_NSD.shape[-1]
    out = torch.empty((num_queries, num_kv_heads, group, width), dtype=q.dtype, device=q.device)
    size = min(_CHUNK, num_queries)
    ahead = torch.full((size, size), float("-inf"), dtype=q.dtype, device=q.device).triu_(1)
    ignored = q.new_zeros(1)
    for first in range(0, num_queries, size):
        stop = min(first + size, num_queries)
        count, position = stop - first, start + first - first_key
        low = 0 if scoring.window is None else max(0, position - scoring.window + 1)
        keys = slice(low, position + count)
        folded = q[:, :, first:stop].reshape(num_kv_heads, group * count, head_dim)
        scores = torch.baddbmm(ignored, folded, k_NSD[:, keys].transpose(1, 2), beta=0, alpha=scoring.scale)
        if scoring.softcap is not None:
            scores = _capped(scores, scoring.softcap)
        by_query = scores.view(num_kv_heads, group, count, keys.stop - low)
        by_query[..., position - low :].add_(ahead[:count, :count])
        if scoring.window is not None:
            behind = torch.arange(count, device=q.device)[:, None] + (position - scoring.window)
            by_query.masked_fill_(torch.arange(low, keys.stop, device=q.device) <= behind, float("-inf"))
        part = torch.bmm(torch.softmax(scores, dim=-1), v_NSD[:, keys])
        out[first:stop] = part.view(num_kv_heads, group, count, width).permute(2, 0, 1, 3)
    return out.view(num_queries, num_heads, width)


def _capped(scores: torch.Tensor, softcap: float) -> torch.Tensor:
    return scores.div_(softcap).tanh_().mul_(softcap)
