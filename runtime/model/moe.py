"""A layer's mixture of experts, on the channels of one rank. The router is whole on every rank.

Legend: T tokens, C hidden size, K chosen experts of a token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kvferry.kernels.activation import gated
from kvferry.kernels.moe import Dispatch, GroupedLinear, Routing
from kvferry.runtime.model.layers import MLP
from kvferry.runtime.model.spec import Activation, MoESpec


@dataclass(frozen=True, slots=True)
class MoE:
    router: torch.Tensor
    """float32 `[experts, C]`. Ranks must choose alike: they have the same input and compute the same, bit for bit."""
    correction: torch.Tensor | None
    routing: Routing
    gate_up: GroupedLinear
    down: GroupedLinear
    activation: Activation
    shared: MLP | None

    def __call__(self, x_TC: torch.Tensor) -> torch.Tensor:
        """This rank's share of the output."""
        experts, weights_TK = self.routing.choose(F.linear(x_TC.float(), self.router), self.correction)
        dispatch = Dispatch.of(experts, len(self.router))
        inner = gated(self.gate_up(dispatch.rows(x_TC), dispatch), self.activation)
        inner.mul_(weights_TK.view(-1)[dispatch.order, None].to(x_TC.dtype))  # here, where a row is shortest
        out = dispatch.sums(self.down(inner, dispatch))
        return out if self.shared is None else out.add_(self.shared(x_TC))


def make_routing(spec: MoESpec) -> Routing:
    return Routing(
        num_active=spec.num_active,
        sigmoid=spec.sigmoid,
        num_groups=spec.num_groups,
        num_top_groups=spec.num_top_groups,
        group_best=spec.group_best,
        normalised=spec.normalised,
        scale=spec.scale,
    )
