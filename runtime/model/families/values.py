"""Checked values of a `config.json`."""

from __future__ import annotations

import math
from typing import Any

from kvferry.runtime.errors import CorruptModel


def positive(values: dict[str, Any], key: str, default: int | None = None) -> int:
    value = values.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CorruptModel(f"config.json: {key}={value!r} must be a positive integer")
    return value


def number(values: dict[str, Any], key: str, default: float | None = None) -> float:
    value = values.get(key)
    value = default if value is None else value
    if not isinstance(value, int | float) or not 0.0 < value < math.inf:
        raise CorruptModel(f"config.json: {key}={value!r} must be a positive number")
    return float(value)


def numbers(values: dict[str, Any], key: str) -> tuple[float, ...]:
    value = values.get(key)
    if not isinstance(value, list) or not all(isinstance(v, int | float) and 0.0 < v < math.inf for v in value):
        raise CorruptModel(f"config.json: {key}={value!r} must be a list of positive numbers")
    return tuple(float(v) for v in value)
