"""Attention of all rows of a step straight from their blocks, with what comes before it: norms, rotation, KV write.

Legend: T tokens, R rows, H query heads, N KV heads (G = H/N query heads share one), D head dim, B block size.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from kvferry.kernels.attention import Scoring
from kvferry.kernels.cpu.operations import DTYPES

_CHUNK, _TILE_ROWS = 128, 96
"""As in `api.h`."""
FORMATS = {"float32": 0, "bfloat16": 1, "int8": 2, "int4": 3, "fp8": 4}
"""As in `formats.h`."""
_NO_WINDOW = 1 << 62
_PARALLEL_SCORES = 2_000
"""Queries times positions of a KV head; less is done sooner by one thread than by waking others."""
Ints = npt.NDArray[np.int64]


class _Struct(ctypes.Structure):
    """`Contexts` of `api.h`."""

    _fields_ = [
        *[(name, ctypes.c_int64) for name in ("num_tokens", "num_tiles", "num_heads", "num_kv_heads", "head_dim")],
        *[
            (name, ctypes.c_int64)
            for name in ("block_size", "block_bytes", "slot_bytes", "tile_queries", "scratch_floats")
        ],
        *[(name, ctypes.c_int64) for name in ("window", "format")],
        *[(name, ctypes.c_void_p) for name in ("first_token", "num_queries", "start", "table_at", "tables")],
        *[(name, ctypes.c_void_p) for name in ("partials_at", "tile_row", "tile_first", "slots")],
        *[(name, ctypes.c_void_p) for name in ("scratch", "partials", "pending")],
    ]


@dataclass(frozen=True, slots=True)
class Geometry:
    """Of the blocks of one layer."""

    num_kv_heads: int
    head_dim: int
    block_size: int
    slot_bytes: int
    block_bytes: int
    """From one block to the next."""
    format: str
    """One of `FORMATS`."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """Of all layers with the same query heads and window."""

    struct: _Struct
    num_threads: int
    arrays: Ints
    """Keeps alive, like `memory`, what `struct` points to."""
    memory: list[torch.Tensor]


class Contexts:
    """Where the rows' contexts lie; made once per step, used by every layer. Not safe for several threads."""

    def __init__(
        self,
        lib: ctypes.CDLL,
        tables: Ints,
        table_at: Ints,
        num_queries: Ints,
        start: Ints,
        slots: Ints,
        geometry: Geometry,
    ) -> None:
        """Per row: where in `tables` its blocks begin, how many tokens it has here, the position of their first `[R]`.

        What lies in `tables` before a layer's window is not looked at when that layer attends.

        slots: per token, counted from the layer's first slot in block 0, where its first key head goes `[T]`.
        """
        self._lib = lib
        self._num_queries, self._start, self._slots = num_queries, start, slots
        self._tables, self._table_at, self._geometry = tables, table_at, geometry
        self._first_token = num_queries.cumsum() - num_queries
        self._single = num_queries == 1
        self._plans: dict[tuple[int, int], _Plan] = {}

    def attend(
        self,
        qkv: torch.Tensor,
        angles: torch.Tensor,
        cache: torch.Tensor,
        scoring: Scoring,
        q_norm: torch.Tensor | None = None,
        k_norm: torch.Tensor | None = None,
        eps: float = 0.0,
    ) -> torch.Tensor:
        """Norms and rotates queries and keys, stores keys and values, attends. Returns `[T, H, D]`.

        qkv: contiguous `[T, H + 2N, D]`, overwritten; angles: `[2, T, 1, D/2]`, as `rope_angles` gives them, of the
        same dtype; q_norm, k_norm: weights `[D]` of norms over each head, or None. Mutates `cache`, of which only the
        start matters: the layer's first slot in block 0.
        """
        num_tokens, width, head_dim = qkv.shape
        num_heads = width - 2 * self._geometry.num_kv_heads
        key = num_heads, scoring.window or _NO_WINDOW
        plan = self._plans.get(key) or self._prepare(*key)
        out = qkv.new_empty((num_tokens, num_heads, head_dim))
        self._lib.kvferry_attend(
            DTYPES[qkv.dtype],
            ctypes.byref(plan.struct),
            qkv.data_ptr(),
            angles.data_ptr(),
            None if q_norm is None else q_norm.data_ptr(),
            None if k_norm is None else k_norm.data_ptr(),
            eps,
            scoring.scale,
            scoring.softcap or 0.0,
            cache.data_ptr(),
            out.data_ptr(),
            plan.num_threads,
        )
        return out

    def _prepare(self, num_heads: int, window: int) -> _Plan:
        geometry = self._geometry
        kv_heads, head_dim = geometry.num_kv_heads, geometry.head_dim
        group = num_heads // kv_heads
        tile_queries = max(1, _TILE_ROWS // group)
        single, ends = self._single, self._start + self._num_queries
        first_chunk = np.maximum(self._start - window + 1, 0) // _CHUNK
        chunks = (ends - 1) // _CHUNK + 1 - first_chunk
        tiles = np.where(single, chunks, -(-self._num_queries // tile_queries))
        tile_row = np.repeat(np.arange(len(tiles)), tiles)
        within = (tiles.cumsum()[tile_row] - 1) - np.arange(len(tile_row))  # the longest of a row first
        split = np.where(single & (chunks > 1), chunks, 0)
        arrays = [
            self._first_token,
            self._num_queries,
            self._start,
            self._table_at,
            self._tables,
            split.cumsum() - split,
            tile_row,
            np.where(single[tile_row], first_chunk[tile_row] + within, within * tile_queries),
            self._slots,
        ]
        one = np.concatenate(arrays)  # asking each array where it lies takes longer
        at = accumulate([one.ctypes.data, *(array.nbytes for array in arrays[:-1])])
        scores = int(self._num_queries @ np.minimum(ends, window)) * kv_heads
        num_threads = torch.get_num_threads() if scores >= _PARALLEL_SCORES else 1
        scratch_floats = self._lib.kvferry_scratch_floats(tile_queries * group, head_dim)
        scratch = torch.empty((num_threads, scratch_floats))
        partials = torch.empty((int(split.sum()), num_heads, head_dim + 2))
        pending = torch.zeros((len(tiles), kv_heads), dtype=torch.int32)
        memory = [scratch, partials, pending]
        struct = _Struct(
            len(self._slots),
            len(tile_row),
            num_heads,
            kv_heads,
            head_dim,
            geometry.block_size,
            geometry.block_bytes,
            geometry.slot_bytes,
            tile_queries,
            scratch_floats,
            window,
            FORMATS[geometry.format],
            *at,
            *[tensor.data_ptr() for tensor in memory],
        )
        plan = self._plans[num_heads, window] = _Plan(struct, num_threads, one, memory)
        return plan
