"""What quantised weights take, and which can be. Knows no torch, so that plans can be made without it."""

from __future__ import annotations

from typing import Literal

Quantization = Literal["none", "int8", "int4"]
GROUP = 32
"""Inputs that share a scale in int4."""


def fits(quantization: Quantization, columns: int) -> bool:
    """Whether a weight of so many inputs can be quantised so."""
    return quantization == "int8" or columns % GROUP == 0


def packed_bytes(quantization: Quantization, rows: int, columns: int, dtype_bytes: int) -> int:
    """Of a weight `[rows, columns]`. int8: scale and sum of each row; int4: two numbers of 16 bits for each group."""
    if quantization == "none" or not fits(quantization, columns):
        return rows * columns * dtype_bytes
    if quantization == "int8":
        return rows * (columns + 4 + 4)
    return rows * columns // 2 + rows * columns // GROUP * 4
