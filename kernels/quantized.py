"""Linear maps with weights of 8 or 4 bits, on a CPU. The numbers behind the choice of operations: docs/adr/0012.

int8  a scale for each output; inputs become 8-bit rows with a scale each; sums are integers, and so exact
int4  a scale and a zero for each group of 32 inputs of an output; inputs stay what they are
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from kvferry.kernels.cpu import operations as cpu
from kvferry.kernels.cpu.available import kernels_for
from kvferry.kernels.packing import GROUP, Quantization

_ZERO = 128
"""The unsigned byte that means 0: oneDNN multiplies unsigned inputs with signed weights."""

_onednn: Any = torch.ops.onednn
_aten: Any = torch.ops.aten


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """uint8 `[rows, width]` and float32 scales `[rows, 1]`: `x ≈ (bytes - 128) * scale`. NaN stays in the scale."""
    x = x.float()
    scales = x.abs().amax(dim=1, keepdim=True) / 127
    steps = (x / scales.clamp(min=1e-30)).round_().add_(_ZERO)
    return steps.clamp_(0, 255).nan_to_num_(nan=0.0).to(torch.uint8), scales


class Int8Linear:
    """`x @ weight.T + bias` by VNNI, for any number of rows. A row's result depends on nothing but the row.

    `fine`: what 8 bits leave of each input row is a second row, with a scale of its own: twice the arithmetic.
    """

    __slots__ = ("bias", "fine", "packed", "scales", "zeros")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, fine: bool = False) -> None:
        """weight: `[out, in]`; bias: `[out]`, both of one dtype."""
        self.fine = fine
        self.scales = (weight.abs().amax(dim=1).float() / 127).clamp_(min=1e-30)
        steps = torch.empty(weight.shape, dtype=torch.int8)
        for rows in _chunks(len(weight)):
            steps[rows] = (weight[rows].float() / self.scales[rows, None]).round_()
        self.packed: torch.Tensor = _onednn.qlinear_prepack(steps, None)
        self.zeros = torch.zeros(len(weight), dtype=torch.int64)
        self.bias = None if bias is None else bias.contiguous()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: `[rows, in]` of the weight's dtype; returns a new `[rows, out]`."""
        x = x.contiguous()
        if self.fine:
            return self._finely(x)
        if (lib := kernels_for(x, x.shape[1])) is None or kernels_for(x, len(self.scales)) is None:
            steps, scales = quantize_rows(x)
            y = self._multiply(steps).mul_(scales)
            return (y if self.bias is None else y.add_(self.bias)).to(x.dtype)
        steps, scales = cpu.quantize_rows(lib, x)
        return cpu.scale_rows(lib, self._multiply(steps), scales, self.bias, x.dtype)

    def _finely(self, x: torch.Tensor) -> torch.Tensor:
        steps, scales = quantize_rows(x)
        fine_steps, fine_scales = quantize_rows(x.float() - (steps.float() - _ZERO) * scales)
        coarse, fine = self._multiply(torch.cat((steps, fine_steps))).chunk(2)
        y = coarse.mul_(scales).add_(fine.mul_(fine_scales))
        return (y if self.bias is None else y.add_(self.bias)).to(x.dtype)

    def _multiply(self, steps: torch.Tensor) -> torch.Tensor:
        weights = self.packed, self.scales, self.zeros
        y: torch.Tensor = _onednn.qlinear_pointwise(
            steps, 1.0, _ZERO, *weights, None, 1.0, 0, torch.float32, "none", [], ""
        )
        return y


class Int4Linear:
    """`x @ weight.T + bias`, where the weights are read as 4 bits and multiplied as numbers."""

    __slots__ = ("bias", "packed", "scales_zeros")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """weight: `[out, in]`; bias: `[out]`, both of one dtype."""
        rows, columns = weight.shape
        groups = weight.view(rows, columns // GROUP, GROUP)
        least, most = groups.amin(-1).float(), groups.amax(-1).float()
        scales = ((most - least) / 15).clamp_(min=1e-10).bfloat16()
        zeros = (least + 8 * scales.float()).bfloat16()
        first = zeros.float() - 8 * scales.float()
        steps = torch.empty(groups.shape, dtype=torch.int32)
        for some in _chunks(rows):
            values = (groups[some].float() - first[some, :, None]) / scales[some, :, None].float()
            steps[some] = values.round_().clamp_(0, 15)
        self.packed: torch.Tensor = _aten._convert_weight_to_int4pack_for_cpu(steps.view(rows, columns), 2)
        self.scales_zeros = torch.stack((scales, zeros), dim=-1).transpose(0, 1).contiguous().to(weight.dtype)
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: `[rows, in]` of the weight's dtype; returns a new `[rows, out]`."""
        y: torch.Tensor = _aten._weight_int4pack_mm_for_cpu(x.contiguous(), self.packed, GROUP, self.scales_zeros)
        return y if self.bias is None else y.add_(self.bias)


def _chunks(rows: int) -> Iterator[slice]:
    """So many that a copy in float32 does not add much to the memory of loading."""
    return (slice(first, first + 4096) for first in range(0, rows, 4096))


@cache
def can_quantize(quantization: Quantization) -> bool:
    """Whether torch's operation exists here and computes what `F.linear` does."""
    try:
        weight = torch.arange(128 * 64, dtype=torch.float32).mul_(0.7).sin_().view(128, 64) / 4
        x = torch.arange(3 * 64, dtype=torch.float32).mul_(1.3).sin_().view(3, 64)
        for dtype in (torch.float32, torch.bfloat16):
            linear = quantized(quantization, weight.to(dtype), weight[:, 0].to(dtype))
            expected = F.linear(x, weight, weight[:, 0])
            if not torch.allclose(linear(x.to(dtype)).float(), expected, rtol=0, atol=0.3):
                return False
        return True
    except (AttributeError, RuntimeError, TypeError, NotImplementedError):
        return False


def quantized(
    quantization: Quantization, weight: torch.Tensor, bias: torch.Tensor | None = None, fine: bool = False
) -> Int8Linear | Int4Linear:
    """weight: `[out, in]`; bias: `[out]`, both of one dtype, bfloat16 or float32, on a CPU. `fine`: int8's inputs."""
    return Int8Linear(weight, bias, fine) if quantization == "int8" else Int4Linear(weight, bias)
