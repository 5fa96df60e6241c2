"""Mixture of experts: which of them a token goes to, and one matrix product per expert over all its tokens.

Legend: T tokens, E experts, K chosen experts of a token, S = T·K rows (a token once for each), sorted by expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kvferry.kernels.linear import Linear, PackedLinear


@dataclass(frozen=True, slots=True)
class Routing:
    """How experts are chosen from a router's logits."""

    num_active: int
    sigmoid: bool
    """Scores are the logits' sigmoids, else their softmax."""
    num_groups: int
    num_top_groups: int
    """Only experts of so many groups can be chosen."""
    group_best: int
    """A group is worth the sum of so many best scores in it."""
    normalised: bool
    """The weights of a token's experts add up to 1, before `scale`."""
    scale: float

    def choose(self, logits_TE: torch.Tensor, correction_E: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Experts (int64) and their weights (float32), both `[T, K]`. All is float32.

        correction_E: added to the scores for the choice, not for the weights. Source: DeepSeek-V3 report, section 2.1.
        """
        scores = logits_TE.sigmoid() if self.sigmoid else torch.softmax(logits_TE, dim=-1)
        worth = scores if correction_E is None else scores + correction_E
        if self.num_top_groups < self.num_groups:
            worth = self._within_top_groups(worth)
        experts = worth.topk(self.num_active, dim=-1).indices
        weights = scores.gather(1, experts)
        if self.normalised:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return experts, weights * self.scale

    def _within_top_groups(self, worth_TE: torch.Tensor) -> torch.Tensor:
        grouped = worth_TE.view(len(worth_TE), self.num_groups, -1)
        of_group = grouped.topk(self.group_best, dim=-1).values.sum(dim=-1)
        kept = torch.zeros_like(of_group, dtype=torch.bool)
        kept.scatter_(1, of_group.topk(self.num_top_groups, dim=-1).indices, True)
        return grouped.masked_fill(~kept[..., None], float("-inf")).view_as(worth_TE)


@dataclass(frozen=True, slots=True)
class Dispatch:
    """A batch's tokens in the order of their experts."""

    order: torch.Tensor
    """int64 `[S]`: sorted rows, counted as token · K + choice."""
    row_of: torch.Tensor
    """int64 `[T, K]`: where each of them is among the sorted."""
    counts: torch.Tensor
    """int64 `[E]`: rows of each expert."""

    @classmethod
    def of(cls, experts_TK: torch.Tensor, num_experts: int) -> Dispatch:
        flat = experts_TK.view(-1)
        order = flat.argsort(stable=True)
        row_of = torch.empty_like(order)
        row_of[order] = torch.arange(len(order), device=order.device)
        return cls(order, row_of.view_as(experts_TK), torch.bincount(flat, minlength=num_experts))

    def rows(self, x_TC: torch.Tensor) -> torch.Tensor:
        """Each row's token: a new `[S, C]`."""
        return x_TC.index_select(0, self.order // self.row_of.shape[1])

    def sums(self, y_SC: torch.Tensor) -> torch.Tensor:
        """Adds up each token's rows, in the order in which its experts were chosen: a new `[T, C]`."""
        return y_SC.index_select(0, self.row_of.view(-1)).view(*self.row_of.shape, -1).sum(dim=1)


class GroupedLinear:
    """One linear map per expert, each applied to its own rows.

    In half precision on a GPU all of them are one call of torch's grouped product, which waits for nothing. Elsewhere
    each expert that has rows is a call.
    """

    __slots__ = ("_linears", "_stacked")

    def __init__(self, linears: Sequence[Linear]) -> None:
        """Of one shape, without biases. What is stacked does not keep the given weights."""
        weights = [one.weight for one in linears if isinstance(one, PackedLinear)]
        grouped = bool(weights) and weights[0].is_cuda and weights[0].dtype == torch.bfloat16
        self._stacked = torch.stack(weights) if grouped and hasattr(F, "grouped_mm") else None
        self._linears = list(linears) if self._stacked is None else []

    def __call__(self, x_SC: torch.Tensor, dispatch: Dispatch) -> torch.Tensor:
        """`[S, C]` to a new `[S, out]`."""
        if self._stacked is not None:
            ends = dispatch.counts.cumsum(0, dtype=torch.int32)
            out: torch.Tensor = F.grouped_mm(x_SC, self._stacked.transpose(1, 2), offs=ends)
            return out
        parts, start = [], 0
        for linear, count in zip(self._linears, dispatch.counts.tolist(), strict=True):
            if count:
                parts.append(linear(x_SC[start : start + count]))
                start += count
        return parts[0] if len(parts) == 1 else torch.cat(parts)
