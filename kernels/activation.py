"""What stands between the linears of an MLP."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from kvferry.kernels.cpu import operations as cpu
from kvferry.kernels.cpu.available import kernels_for


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """The approximation of GELU that GPT-2 brought. Source: Hendrycks & Gimpel 2016."""
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
}


def gated(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """`activation(gate) * up`, where a row of gate_up is both, one after the other.

    `[rows, 2·D]` to a new `[rows, D]`.
    """
    lib = kernels_for(gate_up, gate_up.shape[1] // 2)
    if lib is not None and activation in cpu.ACTIVATIONS and gate_up.is_contiguous():
        return cpu.gated(lib, gate_up, activation)
    gate, up = gate_up.chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate).mul_(up)
