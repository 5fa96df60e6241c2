"""Where a token's keys and values lie: one contiguous span per block.

A rank's storage is one tensor `[num_blocks, num_layers, planes, rank_heads, block_size, head_dim]` (block-major), so
that a block is one copy and one message. Two planes are keys and values; one is what both are computed from
(`kernels/mla.py`). A rank holds a consecutive range of the model's KV heads; with more ranks than KV heads,
neighbouring ranks hold the same head.
"""

from __future__ import annotations

import msgspec

from kvferry.runtime.errors import InvalidArgument
from kvferry.runtime.kv.hashing import hash_root

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class KVLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Geometry of the KV cache of one tensor-parallel group."""

    num_layers: int
    num_kv_heads: int
    """Of the whole model."""
    head_dim: int
    block_size: int
    dtype: str
    tp_size: int = 1
    planes: int = 2

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise InvalidArgument("dtype", self.dtype, f"must be one of {sorted(DTYPE_BYTES)}")
        small, large = sorted((self.num_kv_heads, self.tp_size))
        if large % small:
            raise InvalidArgument(
                "tensor parallel size",
                self.tp_size,
                f"must divide the model's {self.num_kv_heads} KV heads, or be a multiple of them",
            )

    def heads(self, rank: int) -> tuple[int, int]:
        """Half-open range of global KV heads on `rank`."""
        if self.tp_size <= self.num_kv_heads:
            per_rank = self.num_kv_heads // self.tp_size
            return rank * per_rank, (rank + 1) * per_rank
        head = rank * self.num_kv_heads // self.tp_size
        return head, head + 1

    @property
    def rank_heads(self) -> int:
        return max(1, self.num_kv_heads // self.tp_size)

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        """`[num_layers, planes, rank_heads, block_size, head_dim]`."""
        return self.num_layers, self.planes, self.rank_heads, self.block_size, self.head_dim

    @property
    def bytes_per_token(self) -> int:
        """Of one rank: planes · layers · rank heads · head dim · bytes."""
        return self.planes * self.num_layers * self.rank_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        """Of one rank."""
        return self.bytes_per_token * self.block_size

    @property
    def content_fields(self) -> dict[str, str]:
        """What two groups must share to exchange blocks; the tensor-parallel size is not part of it."""
        return {
            "num_layers": str(self.num_layers),
            "num_kv_heads": str(self.num_kv_heads),
            "head_dim": str(self.head_dim),
            "planes": str(self.planes),
            "block_size": str(self.block_size),
            "kv_dtype": self.dtype,
        }

    @property
    def fingerprint(self) -> bytes:
        """16 bytes; equal for groups whose blocks are interchangeable up to the tensor-parallel size."""
        return hash_root(self.content_fields)
