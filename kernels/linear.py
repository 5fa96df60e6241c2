"""A linear map whose weight lies in memory the way the device reads it fastest."""

from __future__ import annotations

import os
from typing import Protocol

import torch
import torch.nn.functional as F

from kvferry.kernels.cpu.available import kernels_for, kernels_of
from kvferry.kernels.cpu.linear import Packed
from kvferry.kernels.packing import Quantization, fits
from kvferry.kernels.quantized import QuantizedLinear

# Where torch computes, oneDNN and torch's layer over it each keep what they compiled for a shape: 1024 by default,
# together 0.6 MB a shape, and every number of tokens is one. A step needs a few dozen. Read at the first call.
for _name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    os.environ.setdefault(_name, "96")


class Linear(Protocol):
    """`x @ weight.T + bias`, more or less exactly."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: `[rows, in]` of the weight's dtype; returns a new `[rows, out]`."""


def make_linear(
    weight: torch.Tensor, bias: torch.Tensor | None = None, quantization: Quantization = "none", fine: bool = False
) -> Linear:
    """weight: `[out, in]`; bias: `[out]`. Whatever cannot be quantised so stays as it is: a `PackedLinear`.

    `fine`: inputs, where they are quantised, keep 16 bits.
    """
    lib = None if quantization == "none" else kernels_for(weight, 0)
    if lib is not None and fits(quantization, weight.shape[1]):
        return QuantizedLinear(lib, quantization, weight, bias, fine)
    return PackedLinear(weight, bias)


class PackedLinear:
    """`x @ weight.T + bias`.

    On a CPU the weight is packed once for the kernels, and a row's result depends on nothing but the row; the given
    weight is not kept then. Where there are no kernels it is `F.linear`.
    """

    __slots__ = ("bias", "packed", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """weight: `[out, in]`; bias: `[out]`, both of one dtype."""
        lib = kernels_of(weight)
        self.packed = None if lib is None else Packed(lib, weight)
        self.weight = weight if self.packed is None else self.packed.weight
        self.bias = None if bias is None else bias.contiguous()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: `[rows, in]` of the weight's dtype; returns a new `[rows, out]`."""
        return F.linear(x, self.weight, self.bias) if self.packed is None else self.packed(x, self.bias)
