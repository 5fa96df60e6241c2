"""Linear maps with weights of 8 or 4 bits, by the CPU kernels. How they are laid out: `cpu/linear_quantized.h`.

int8  a scale for each output; inputs become 8-bit rows with a scale each; sums are integers, and so exact
int4  a scale and a middle for each group of 32 inputs of an output; each such group of a row becomes 8-bit integers
      with a scale

A row's result depends on nothing but the row.
"""

from __future__ import annotations

import ctypes

import torch

from kvferry.kernels.cpu.linear import Form, PackedIntegers
from kvferry.kernels.packing import GROUP, Quantization

_ROWS_AT_ONCE = 4096
"""So many that a copy in float32 does not add much to the memory of loading."""


class QuantizedLinear:
    """`x @ weight.T + bias`."""

    __slots__ = ("bias", "packed")

    def __init__(
        self,
        lib: ctypes.CDLL,
        quantization: Quantization,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        fine: bool = False,
    ) -> None:
        """weight: `[out, in]`, not kept; bias: `[out]`, both of one dtype, bfloat16 or float32, on a CPU.

        `fine`: in int8, what 8 bits leave of each input row is a second row: twice the arithmetic.
        """
        units_of = byte_units if quantization == "int8" else nibble_units
        units = (units_of(some) for some in torch.split(weight, _ROWS_AT_ONCE))
        form: Form = "nibbles" if quantization == "int4" else "fine bytes" if fine else "bytes"
        self.packed = PackedIntegers(lib, form, weight.shape, units, weight.dtype)
        self.bias = None if bias is None else bias.contiguous()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: `[rows, in]` of the weight's dtype; returns a new `[rows, out]`."""
        return self.packed(x, self.bias)


def byte_units(weight: torch.Tensor) -> torch.Tensor:
    """int32 `[rows, units]`: a scale (float32), -128 times the sum of the steps, four steps a unit."""
    weight = weight.float()
    scales = (weight.abs().amax(dim=1, keepdim=True) / 127).clamp_(min=1e-30)
    units = torch.zeros((len(weight), 2 + -(-weight.shape[1] // 4)), dtype=torch.int32)
    steps = (weight / scales).round_()
    units[:, :1] = scales.view(torch.int32)
    units[:, 1] = steps.sum(dim=1).to(torch.int32) * -128
    units.view(torch.int8)[:, 8 : 8 + weight.shape[1]] = steps
    return units


def nibble_units(weight: torch.Tensor) -> torch.Tensor:
    """int32 `[rows, units]`, of each group: scale and middle (bfloat16), then eight steps a unit (see above)."""
    groups = weight.float().view(len(weight), -1, GROUP)
    least, most = groups.amin(-1), groups.amax(-1)
    scales = ((most - least) / 15).clamp_(min=1e-10).bfloat16()
    middles = (least + 8 * scales.float()).bfloat16()
    first = middles.float() - 8 * scales.float()
    steps = ((groups - first[..., None]) / scales[..., None].float()).round_().clamp_(0, 15).to(torch.uint8)
    units = torch.empty((*groups.shape[:2], 1 + GROUP // 8), dtype=torch.int32)
    units.view(torch.bfloat16)[..., 0], units.view(torch.bfloat16)[..., 1] = scales, middles
    low, high = steps.view(*groups.shape[:2], GROUP // 8, 2, 4).unbind(3)
    units.view(torch.uint8)[..., 4:] = (low | high << 4).flatten(2)
    return units.flatten(1)
