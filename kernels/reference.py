"""Naive twins in float64: what the fast operations must compute. For tests; clarity is all that counts."""

from __future__ import annotations

import torch


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x: `[rows, in]`, weight: `[out, in]`, bias: `[out]`; returns float64 `[rows, out]`."""
    y = x.double() @ weight.double().T
    return y if bias is None else y + bias.double()


def linear_int8(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, fine: bool) -> torch.Tensor:
    """Integers of 8 bits, a scale for each row and each output. `fine`: also of what 8 bits leave of a row."""
    rows, scales = _steps(x.double(), x.double().abs().amax(1, keepdim=True) / 127)
    kept = rows * scales
    if fine:
        rest, rest_scales = _steps(x.double() - kept, scales / 254)
        kept += rest * rest_scales
    outputs, scales = _steps(weight.double(), weight.double().abs().amax(1, keepdim=True) / 127)
    return linear(kept, outputs * scales, bias)


def linear_int4(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """By groups of 32 inputs: rows have 8 bits and a scale, weights 4 bits, and a scale and a middle in bfloat16."""
    groups = x.double().view(len(x), -1, 32)
    rows, scales = _steps(groups, groups.abs().amax(2, keepdim=True) / 127)
    weights = weight.double().view(len(weight), -1, 32)
    least, most = weights.amin(2, keepdim=True), weights.amax(2, keepdim=True)
    step = ((most - least) / 15).clamp(min=1e-10).bfloat16().double()
    middle = (least + 8 * step).bfloat16().double()
    kept = ((weights - middle) / step).round().clamp(-8, 7) * step + middle
    return linear((rows * scales).flatten(1), kept.flatten(1), bias)


def _steps(x: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (x / scales.clamp(min=1e-30)).round(), scales


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x: `[..., D]`, weight: `[D]`; returns float64."""
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """`gate / (1 + e^-gate) * up`; returns float64."""
    gate = gate.double()
    return gate / (1 + torch.exp(-gate)) * up.double()


def rope(x: torch.Tensor, position: int, frequencies: torch.Tensor) -> torch.Tensor:
    """One token's heads `[H, D]`; the pair (i, i + D/2) turns by `position * frequencies[i]`. Returns float64."""
    x = x.double()
    half = x.shape[-1] // 2
    out = torch.empty_like(x)
    for i in range(half):
        angle = position * frequencies[i].double()
        out[:, i] = x[:, i] * angle.cos() - x[:, i + half] * angle.sin()
        out[:, i + half] = x[:, i + half] * angle.cos() + x[:, i] * angle.sin()
    return out


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_ids: list[int],
    start: int,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """One row: queries `[Q, H, D]` at positions `start, start + 1, …` over the last `window` positions up to their own.

    k_cache, v_cache: `[num_blocks, N, B, D]`; query head h reads KV head `h * N // H`. Returns float64 `[Q, H, D]`.
    """
    num_heads, num_kv_heads, block_size = q.shape[1], k_cache.shape[1], k_cache.shape[2]
    out = torch.empty(q.shape, dtype=torch.float64)
    for i in range(q.shape[0]):
        first = 0 if window is None else max(0, start + i - window + 1)
        places = [(block_ids[p // block_size], p % block_size) for p in range(first, start + i + 1)]
        for h in range(num_heads):
            n = h * num_kv_heads // num_heads
            k = torch.stack([k_cache[block, n, slot] for block, slot in places]).double()
            v = torch.stack([v_cache[block, n, slot] for block, slot in places]).double()
            scores = k @ q[i, h].double() * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            out[i, h] = torch.softmax(scores, dim=0) @ v
    return out
