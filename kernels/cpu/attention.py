"""Attention of all rows of a step straight from their blocks, with what comes before it: norms, rotation, KV write.

Legend: T tokens, R rows, H query heads, N KV heads (G = H/N query heads share one), D head dim, B block size.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvferry.kernels.attention import Scoring
from kvferry.kernels.cpu.operations import DTYPES
from kvferry.kernels.cpu.threads import program_threads

CHUNK, _TILE_ROWS = 128, 96
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
        *[(name, ctypes.c_int64) for name in ("window", "format", "num_threads", "scores")],
        *[(name, ctypes.c_void_p) for name in ("first_token", "num_queries", "start", "table_at", "tables")],
        *[(name, ctypes.c_void_p) for name in ("partials_at", "positions", "cuts", "cut_rows", "slots")],
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


class Workspace:
    """Memory for the kernels while they attend. Grows to what the largest step needs; one step uses it at a time."""

    def __init__(self) -> None:
        self._scratch = self._partials = torch.empty(0)
        self._pending = torch.zeros(0, dtype=torch.int32)  # zero between calls

    def fit(self, scratch: int, partials: int, pending: int) -> list[torch.Tensor]:
        """At least so many elements of each."""
        if len(self._scratch) < scratch:
            self._scratch = torch.empty(scratch)
        if len(self._partials) < partials:
            self._partials = torch.empty(partials)
        if len(self._pending) < pending:
            self._pending = torch.zeros(pending, dtype=torch.int32)
        return [self._scratch, self._partials, self._pending]


class Contexts:
    """Where the rows' contexts lie; made once per step, used by every layer. Not safe for several threads."""

    def __init__(
        self,
        lib: ctypes.CDLL,
        tables: Ints,
        table_at: Ints,
        num_queries: Ints,
        start: Ints,
        geometry: Geometry,
        workspace: Workspace,
    ) -> None:
        """Per row: where in `tables` its blocks begin, how many tokens it has here, the position of their first `[R]`.

        What lies in `tables` before a layer's window is not looked at when that layer attends.
        """
        self._lib, self._geometry, self._workspace = lib, geometry, workspace
        ends = num_queries.cumsum()
        self._rows, self._tokens = len(num_queries), int(ends[-1])
        self._most_chunks = (int(start.sum()) + self._tokens) // CHUNK + self._rows
        of_rows = np.concatenate((ends - num_queries, num_queries, start, table_at))
        of_tokens = np.empty((2, self._tokens), dtype=np.int64)
        self.positions: Ints = of_tokens[0]
        """`[T]`."""
        self._base = _Struct(
            num_tokens=self._tokens,
            num_kv_heads=geometry.num_kv_heads,
            head_dim=geometry.head_dim,
            block_size=geometry.block_size,
            block_bytes=geometry.block_bytes,
            slot_bytes=geometry.slot_bytes,
            format=FORMATS[geometry.format],
            tables=tables.ctypes.data,
        )
        at, step = of_rows.ctypes.data, self._rows * 8
        for i, name in enumerate(("first_token", "num_queries", "start", "table_at")):
            setattr(self._base, name, at + i * step)
        self._base.positions = at = of_tokens.ctypes.data
        self._base.slots = at + self._tokens * 8
        self._places = ctypes.byref(self._base), self._rows, at, self._base.slots
        lib.kvferry_place_tokens(*self._places)
        self._structs: dict[tuple[int, int], _Struct] = {}
        self._kept: list[object] = [tables, of_rows, of_tokens]
        """What the structs point to."""

    def go_on(self) -> None:
        """Each row is one token and stands one position further now, in the block and the chunk that were its last."""
        self._lib.kvferry_move_tokens(*self._places)
        for key in [key for key in self._structs if key[1] != _NO_WINDOW]:
            del self._structs[key]  # a window moves on; without one a row's tiles are those of its blocks
        threads = torch.get_num_threads()
        for struct in self._structs.values():
            struct.num_threads = min(struct.num_threads, threads)

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

        qkv: contiguous `[T, H + 2N, D]`, overwritten; angles: `[2, positions, 1, D/2]`, as `rope_angles` gives them for
        all positions from 0, of the same dtype; q_norm, k_norm: weights `[D]` of norms over each head, or None. Mutates
        `cache`, of which only the start matters: the layer's first slot in block 0.
        """
        num_tokens, width, head_dim = qkv.shape
        num_heads = width - 2 * self._geometry.num_kv_heads
        out = qkv.new_empty((num_tokens, num_heads, head_dim))
        self._lib.kvferry_attend(
            DTYPES[qkv.dtype],
            self.address(num_heads, scoring.window),
            qkv.data_ptr(),
            angles.data_ptr(),
            angles.shape[1],
            None if q_norm is None else q_norm.data_ptr(),
            None if k_norm is None else k_norm.data_ptr(),
            eps,
            scoring.scale,
            scoring.softcap or 0.0,
            cache.data_ptr(),
            out.data_ptr(),
        )
        return out

    def address(self, num_heads: int, window: int | None) -> int:
        """Of the C struct for so many query heads and this window; valid as long as this object is."""
        key = num_heads, window or _NO_WINDOW
        return ctypes.addressof(self._structs.get(key) or self._prepare(*key))

    def _prepare(self, num_heads: int, window: int) -> _Struct:
        kv_heads, head_dim = self._geometry.num_kv_heads, self._geometry.head_dim
        group = num_heads // kv_heads
        tile_queries = max(1, _TILE_ROWS // group)
        struct = self._structs[num_heads, window] = _Struct.from_buffer_copy(self._base)
        struct.num_heads, struct.window, struct.tile_queries = num_heads, window, tile_queries
        room = self._most_chunks + self._tokens // tile_queries + self._rows
        tiles = np.empty(4 * self._rows + 5 * room, dtype=np.int64)
        split = self._lib.kvferry_cut_tiles(ctypes.byref(struct), self._rows, tiles.ctypes.data, room)
        threads = torch.get_num_threads()
        all_threads = max(threads, program_threads(threads))
        struct.num_threads = threads if struct.scores >= _PARALLEL_SCORES else 1
        scratch_floats = self._lib.kvferry_scratch_floats(tile_queries * group, head_dim)
        memory = self._workspace.fit(
            all_threads * scratch_floats, split * num_heads * (head_dim + 2), self._rows * kv_heads
        )
        struct.scratch_floats = scratch_floats
        struct.scratch, struct.partials, struct.pending = (tensor.data_ptr() for tensor in memory)
        self._kept += [tiles, *memory]
        return struct
