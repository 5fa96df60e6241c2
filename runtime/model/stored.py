"""A tensor as it lies in a file."""

from __future__ import annotations

import msgspec


class StoredTensor(msgspec.Struct, frozen=True):
    name: str
    """As the file spells it."""
    path: str
    dtype: str
    """The file format's own word: `BF16`, `Q4_1`, …"""
    shape: tuple[int, ...]
    """Rows first."""
    offset: int
    """Of the first byte, from the file's beginning."""
    num_bytes: int
