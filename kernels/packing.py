"""What quantised weights take, and which can be. Knows no torch, so that plans can be made without it."""

from __future__ import annotations

from typing import Literal

Quantization = Literal["none", "int8", "int4"]
GROUP = 32
"""Inputs that share a scale in int4."""
_OUTPUTS_INT4 = 64
"""Their number must be a multiple of it: what torch's int4 operation computes at once."""


def fits(quantization: Quantization, rows: int, columns: int) -> bool:
    """Whether a weight `[rows, columns]` can be quantised so."""
    return quantization == "int8" or (columns % GROUP == 0 and rows % _OUTPUTS_INT4 == 0)


def packed_bytes(quantization: Quantization, rows: int, columns: int, dtype_bytes: int) -> int:
    """Of a weight `[rows, columns]`. int8: scale, zero and sum of each row; int4: scale and zero of each group."""
    if quantization == "none" or not fits(quantization, rows, columns):
        return rows * columns * dtype_bytes
    if quantization == "int8":
        return rows * (columns + 4 + 8 + 4)
    return rows * columns // 2 + rows * columns // GROUP * 2 * dtype_bytes
