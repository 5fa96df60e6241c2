"""Where a token's keys and values lie: one contiguous span per block.

A rank's storage is one tensor `[num_blocks, num_layers, planes, rank_heads, block_size, slot]` (block-major), so that a
block is one copy and one message. Two planes are keys and values; one is what both come from (`kernels/mla.py`). A slot
is what a plane holds of one head of one token: `head_dim` numbers, or in a quantised format its bytes, scales included,
of which a value's may hold some of its key's. A rank holds a consecutive range of the model's KV heads; with more ranks
than KV heads, neighbouring ranks hold the same head.

    bytes per token of one rank = planes · layers · rank heads · slot bytes
"""

from __future__ import annotations

import math

import msgspec

from kvferry.runtime.errors import InvalidArgument
from kvferry.runtime.kv.hashing import hash_root


class KVFormat(msgspec.Struct, frozen=True, kw_only=True):
    """How a key and its value are stored, in slots of one size; `kernels/formats.py` does it."""

    bits: float
    """Of a number; of keys and values on average."""
    scale_bytes: int = 0
    """Of a slot."""
    element: str = "uint8"
    """Of the tensor behind the pool."""
    version: str = ""
    """Of what is stored under this name; groups of another one share no blocks."""

    def slot_bytes(self, head_dim: int) -> int:
        return math.ceil(head_dim * self.bits / 8) + self.scale_bytes


FORMATS = {
    "float32": KVFormat(bits=32, element="float32"),
    "bfloat16": KVFormat(bits=16, element="bfloat16"),
    "float16": KVFormat(bits=16, element="float16"),
    "int8": KVFormat(bits=8, scale_bytes=2),
    "int4": KVFormat(bits=4.25, scale_bytes=1, version="/2"),
    "fp8": KVFormat(bits=8),
}


class KVLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Geometry of the KV cache of one tensor-parallel group."""

    num_layers: int
    num_kv_heads: int
    """Of the whole model."""
    head_dim: int
    block_size: int
    dtype: str
    """One of `FORMATS`."""
    tp_size: int = 1
    planes: int = 2

    def __post_init__(self) -> None:
        if self.dtype not in FORMATS:
            raise InvalidArgument("kv_dtype", self.dtype, f"must be one of {sorted(FORMATS)}")
        if self.planes == 1 and self.format.element == "uint8":
            raise InvalidArgument(
                "kv_dtype", self.dtype, "does not go with latent attention", "use auto, float32, bfloat16 or float16"
            )
        if self.format.bits < 8 and self.head_dim % 2:
            raise InvalidArgument(
                "kv_dtype", self.dtype, f"does not go with heads of {self.head_dim} numbers: not even"
            )
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
        """`[num_layers, planes, rank_heads, block_size, slot]`, in elements of `format.element`."""
        slot = self.slot_bytes if self.format.element == "uint8" else self.head_dim
        return self.num_layers, self.planes, self.rank_heads, self.block_size, slot

    @property
    def format(self) -> KVFormat:
        return FORMATS[self.dtype]

    @property
    def slot_bytes(self) -> int:
        """Of one head's key or value of one token."""
        return self.format.slot_bytes(self.head_dim)

    @property
    def bytes_per_token(self) -> int:
        """Of one rank: planes · layers · rank heads · slot bytes."""
        return self.planes * self.num_layers * self.rank_heads * self.slot_bytes

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
            "kv_dtype": self.dtype + self.format.version,
        }

    @property
    def fingerprint(self) -> bytes:
        """16 bytes; equal for groups whose blocks are interchangeable up to the tensor-parallel size."""
        return hash_root(self.content_fields)
