"""Draws tokens by the kernels, see `sample.h`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch

from kvferry.kernels.cpu.operations import DTYPES, threads_for

_WEIGHT = 16
"""An element of a row that is drawn from costs as much as so many of other operations."""


class DrawRow(ctypes.Structure):
    """As `DrawRow` of `api.h`: how a token is drawn from a row of logits."""

    _fields_ = [
        ("row", ctypes.c_int64),
        ("seed", ctypes.c_uint64),
        ("sequence", ctypes.c_uint32),
        ("position", ctypes.c_uint32),
        ("min_p", ctypes.c_double),
        ("top_p", ctypes.c_double),
        ("top_k", ctypes.c_int64),
        ("temperature", ctypes.c_float),
    ]


def draw(lib: ctypes.CDLL, logits: torch.Tensor, rows: Sequence[DrawRow]) -> list[int]:
    """A token for each of `rows`; logits: contiguous `[·, vocabulary]`, whose largest numbers are finite."""
    count, width = len(rows), logits.shape[1]
    threads = min(count, threads_for(count * width * _WEIGHT))
    scratch = np.empty((threads, lib.kvferry_draw_bytes(width)), dtype=np.uint8)
    ids = np.empty(count, dtype=np.int64)
    table = (DrawRow * count)(*rows)
    lib.kvferry_draw(
        DTYPES[logits.dtype], logits.data_ptr(), width, table, count, ids.ctypes.data, scratch.ctypes.data, threads
    )
    tokens: list[int] = ids.tolist()
    return tokens
