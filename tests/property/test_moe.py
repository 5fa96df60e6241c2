"""Mixture of experts against a naive twin: one token at a time, one expert after the other."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.kernels.linear import PackedLinear
from kvferry.kernels.moe import Dispatch, GroupedLinear, Routing

GROUP_SIZE = 4


@st.composite
def routings(draw: st.DrawFn) -> tuple[Routing, int]:
    """With the number of experts."""
    num_groups = draw(st.integers(1, 4))
    num_top_groups = draw(st.integers(1, num_groups))
    routing = Routing(
        num_active=draw(st.integers(1, num_top_groups * GROUP_SIZE)),
        sigmoid=draw(st.booleans()),
        num_groups=num_groups,
        num_top_groups=num_top_groups,
        group_best=draw(st.integers(1, 2)),
        normalised=draw(st.booleans()),
        scale=draw(st.sampled_from([1.0, 2.5])),
    )
    return routing, num_groups * GROUP_SIZE


def chosen(routing: Routing, logits: torch.Tensor, correction: torch.Tensor | None) -> dict[int, float]:
    """Of one token."""
    scores = logits.sigmoid() if routing.sigmoid else logits.exp() / logits.exp().sum()
    worth = (scores if correction is None else scores + correction).tolist()
    groups = [range(first, first + GROUP_SIZE) for first in range(0, len(worth), GROUP_SIZE)]
    groups.sort(key=lambda group: -sum(sorted((worth[e] for e in group), reverse=True)[: routing.group_best]))
    candidates = [e for group in groups[: routing.num_top_groups] for e in group]
    candidates.sort(key=lambda e: -worth[e])
    weights = {e: float(scores[e]) for e in candidates[: routing.num_active]}
    total = sum(weights.values()) if routing.normalised else 1.0
    return {e: weight / total * routing.scale for e, weight in weights.items()}


@given(routings(), st.booleans(), st.integers(0, 1000))
@settings(max_examples=100, deadline=None)
def test_choice(case: tuple[Routing, int], corrected: bool, seed: int) -> None:
    """Guards against a bias that gets into the weights, and experts of groups that were not chosen."""
    routing, num_experts = case
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn((5, num_experts), generator=generator) * 2
    correction = torch.randn(num_experts, generator=generator) if corrected else None
    experts, weights = routing.choose(logits, correction)
    assert experts.shape == weights.shape == (5, routing.num_active)
    for row in range(5):
        expected = chosen(routing, logits[row], correction)
        got = dict(zip(experts[row].tolist(), weights[row].tolist(), strict=True))
        assert got == pytest.approx(expected, rel=1e-5)


@given(num_tokens=st.integers(1, 150), num_experts=st.integers(1, 12), dtype=st.sampled_from(["float32", "bfloat16"]))
@settings(max_examples=40, deadline=None)
def test_rows_meet_their_expert(num_tokens: int, num_experts: int, dtype: str) -> None:
    """Guards against rows of a neighbouring expert, numbers of rows that are rounded up, experts without rows."""
    kind = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(num_tokens)
    num_active = min(3, num_experts)
    # skewed, so that many experts stay without rows
    experts = (torch.rand((num_tokens, num_experts), generator=generator) ** 4 * torch.arange(num_experts)).topk(
        num_active
    )
    weights = [torch.randn((24, 16), generator=generator).to(kind) for _ in range(num_experts)]
    x = torch.randn((num_tokens, 16), generator=generator).to(kind)
    dispatch = Dispatch.of(experts.indices, num_experts)
    out = GroupedLinear([PackedLinear(weight) for weight in weights])(dispatch.rows(x), dispatch)
    got = dispatch.sums(out).float()
    expected = torch.stack(
        [
            torch.stack([F.linear(token, weights[e]).float() for e in row]).sum(0)
            for token, row in zip(x, experts.indices.tolist(), strict=True)
        ]
    )
    tolerance = 1e-5 if dtype == "float32" else 0.02
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance * 20)


def test_routing_without_groups_ignores_what_makes_them() -> None:
    """All groups kept is no choice at all: their worth must not matter."""
    logits = torch.randn((7, 16), generator=torch.Generator().manual_seed(0))
    plain = Routing(
        num_active=3, sigmoid=False, num_groups=1, num_top_groups=1, group_best=1, normalised=True, scale=1.0
    )
    grouped = dataclasses.replace(plain, num_groups=4, num_top_groups=4, group_best=2)
    for one, other in zip(plain.choose(logits, None), grouped.choose(logits, None), strict=True):
        assert torch.equal(one, other)
