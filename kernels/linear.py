"""A linear map whose weight lies in memory the way the device reads it fastest."""

from __future__ import annotations

import os
from functools import cache
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from kvferry.kernels.cpu.available import kernels_for
from kvferry.kernels.cpu.operations import DTYPES
from kvferry.kernels.packing import Quantization, fits
from kvferry.kernels.quantized import can_quantize, quantized

# oneDNN and torch's layer over it each keep what they compiled for a shape: 1024 shapes by default, together 0.6 MB a
# shape, and every number of tokens is one. A step needs a few dozen. Read at the first call, so set before it.
for _name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    os.environ.setdefault(_name, "96")

_ops: Any = torch.ops.mkldnn  # present in every CPU build with oneDNN; `can_prepack` finds out what it holds


@cache
def can_prepack() -> bool:
    """Whether oneDNN's prepacked bfloat16 linear exists here and computes what `F.linear` does."""
    try:
        weight = torch.arange(-512, 512, dtype=torch.float32).view(32, 32).mul_(0.01).bfloat16()
        x = torch.linspace(-1, 1, 64).view(2, 32).bfloat16()
        bias = torch.linspace(0, 1, 32).bfloat16()
        packed = _apply_packed(x, _ops._reorder_linear_weight(weight, None), bias)
        return bool(torch.allclose(packed.float(), F.linear(x, weight, bias).float(), rtol=0.02, atol=0.05))
    except (AttributeError, RuntimeError, TypeError, NotImplementedError):
        return False


def _apply_packed(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    y: torch.Tensor = _ops._linear_pointwise(x, weight, bias, "none", [], "")
    return y


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
    if quantization != "none" and fits(quantization, *weight.shape) and can_quantize(quantization):
        return quantized(quantization, weight, bias, fine)
    if kernels_for(weight, weight.shape[1]):
        return NativeLinear(weight, bias)
    return PackedLinear(weight, bias)


class NativeLinear:
    __slots__ = ("bias", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight, self.bias = weight.contiguous(), bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        lib = kernels_for(x, x.shape[1])
        if lib is None:
            return F.linear(x, self.weight, self.bias)
        x = x.contiguous()
        out = x.new_empty((len(x), len(self.weight)))
        lib.kvferry_linear(
            DTYPES[x.dtype],
            x.data_ptr(),
            self.weight.data_ptr(),
            None if self.bias is None else self.bias.data_ptr(),
            out.data_ptr(),
            len(x),
            x.shape[1],
            len(self.weight),
            torch.get_num_threads(),
        )
        return out


class PackedLinear:
    """`x @ weight.T + bias`.

    bfloat16 on a CPU is reordered once into oneDNN's blocked layout (a plain call would read the weights at less than
    half of the memory's speed); the given weight is not kept then. Everything else is `F.linear`.
    """

    __slots__ = ("bias", "packed", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """weight: `[out, in]`; bias: `[out]`, both of one dtype."""
        self.packed = weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and can_prepack()
        self.weight: torch.Tensor = _ops._reorder_linear_weight(weight.contiguous(), None) if self.packed else weight
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: `[rows, in]` of the weight's dtype; returns a new `[rows, out]`."""
        if self.packed:
            return _apply_packed(x, self.weight, self.bias)
        return F.linear(x, self.weight, self.bias)
