"""Attention of all rows of a step straight from their blocks, with what comes before it: norms, rotation, KV write.

Legend: T tokens, R rows, H query heads, N KV heads (G = H/N query heads share one), D head dim, B block size.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvferry.kernels.cpu.operations import DTYPES

_CHUNK, _TILE_ROWS = 128, 96
"""As in `api.h`."""
_PARALLEL_SCORES = 2_000
"""Queries times positions of a KV head; less is done sooner by one thread than by waking others."""
Ints = npt.NDArray[np.int64]


class _Struct(ctypes.Structure):
    """`Contexts` of `api.h`."""

    _fields_ = [
        *[(name, ctypes.c_int64) for name in ("num_tokens", "num_tiles", "num_heads", "num_kv_heads", "head_dim")],
        *[(name, ctypes.c_int64) for name in ("block_size", "block_stride", "tile_queries", "scratch_floats")],
        *[(name, ctypes.c_void_p) for name in ("first_token", "num_queries", "start", "table_at", "tables")],
        *[(name, ctypes.c_void_p) for name in ("partials_at", "tile_row", "tile_first", "slots")],
        *[(name, ctypes.c_void_p) for name in ("scratch", "partials", "pending")],
    ]


class Contexts:
    """Where the rows' contexts lie; made once per step, used by every layer. Not safe for several threads."""

    def __init__(
        self,
        lib: ctypes.CDLL,
        tables: Sequence[Ints],
        num_queries: Ints,
        start: Ints,
        slots: Ints,
        shape: tuple[int, int, int, int],
    ) -> None:
        """Per row: its blocks `tables`, how many tokens it has here, and the position of their first `[R]`.

        slots: per token, counted in elements from the layer's first, where its first key head goes `[T]`.
        shape: of a block: elements, N, B, D.
        """
        self._lib = lib
        self._num_queries, self._start, self._slots = num_queries, start, slots
        self._tables, self._shape = tables, shape
        self._struct: _Struct | None = None
        self._arrays: dict[str, Ints] = {}
        self._memory: list[torch.Tensor] = []
        self._num_threads = 1

    def attend(
        self,
        qkv: torch.Tensor,
        angles: torch.Tensor,
        cache: torch.Tensor,
        q_norm: torch.Tensor | None = None,
        k_norm: torch.Tensor | None = None,
        eps: float = 0.0,
    ) -> torch.Tensor:
        """Norms and rotates queries and keys, stores keys and values, attends. Returns `[T, H, D]`.

        qkv: contiguous `[T, H + 2N, D]`, overwritten; angles: `[2, T, 1, D/2]`, as `rope_angles` gives them, of the
        same dtype; q_norm, k_norm: weights `[D]` of norms over each head, or None. Mutates `cache`, of which only the
        start matters: the layer's first key in block 0.
        """
        num_tokens, width, head_dim = qkv.shape
        num_heads = width - 2 * self._shape[1]
        struct = self._struct or self._prepare(num_heads)
        out = qkv.new_empty((num_tokens, num_heads, head_dim))
        self._lib.kvferry_attend(
            DTYPES[qkv.dtype],
            ctypes.byref(struct),
            qkv.data_ptr(),
            angles.data_ptr(),
            None if q_norm is None else q_norm.data_ptr(),
            None if k_norm is None else k_norm.data_ptr(),
            eps,
            cache.data_ptr(),
            out.data_ptr(),
            self._num_threads,
        )
        return out

    def _prepare(self, num_heads: int) -> _Struct:
        block_elements, kv_heads, block_size, head_dim = self._shape
        group = num_heads // kv_heads
        tile_queries = max(1, _TILE_ROWS // group)
        chunks = (self._start + self._num_queries - 1) // _CHUNK + 1
        single = self._num_queries == 1
        tiles = np.where(single, chunks, -(-self._num_queries // tile_queries))
        tile_row = np.repeat(np.arange(len(tiles)), tiles)
        within = (np.cumsum(tiles)[tile_row] - 1) - np.arange(len(tile_row))  # the longest of a row first
        split = np.where(single & (chunks > 1), chunks, 0)
        self._arrays = {
            "first_token": _ends_before(self._num_queries),
            "num_queries": self._num_queries,
            "start": self._start,
            "table_at": _ends_before(np.array([len(table) for table in self._tables])),
            "tables": np.concatenate(self._tables),
            "partials_at": _ends_before(split),
            "tile_row": tile_row,
            "tile_first": np.where(single[tile_row], within, within * tile_queries),
            "slots": self._slots,
        }
        scores = int((self._num_queries * (self._start + self._num_queries)).sum()) * kv_heads
        self._num_threads = torch.get_num_threads() if scores >= _PARALLEL_SCORES else 1
        scratch_floats = self._lib.kvferry_scratch_floats(tile_queries * group, head_dim)
        scratch = torch.empty((self._num_threads, scratch_floats))
        partials = torch.empty((int(split.sum()), num_heads, head_dim + 2))
        pending = torch.zeros((len(tiles), kv_heads), dtype=torch.int32)
        self._memory = [scratch, partials, pending]
        self._struct = _Struct(
            len(self._slots),
            len(tile_row),
            num_heads,
            kv_heads,
            head_dim,
            block_size,
            block_elements,
            tile_queries,
            scratch_floats,
            *[array.ctypes.data for array in self._arrays.values()],
            *[tensor.data_ptr() for tensor in self._memory],
        )
        return self._struct


def _ends_before(counts: Ints) -> Ints:
    """Where each of consecutive runs begins."""
    return np.cumsum(counts) - counts
