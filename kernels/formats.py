"""How a key or a value (a head's vector of one token, `[..., D]`) is stored in a slot of the cache, and read back.

    float32, bfloat16, float16   D numbers
    fp8      D bytes: e4m3, cut off at its largest, 448
    int8     D bytes, then a scale: x = scale · n, n in -127 … 127
    int4     D/2 bytes, then for each run of 16 numbers a scale and a zero: x = zero + scale · n, n in 0 … 15
             byte i holds n of x[i] in its lower half, that of x[i + D/2] in the upper

Keys are turned before they become int4, and queries with them, so that scores stay the same: a Hadamard matrix spreads
the few large numbers of a key over all of it. Scales and zeros are bfloat16, rounded away from what they must cover.
Each belongs to one vector only: what is stored of a token depends on nothing but that token, so it is the same whenever
and in whatever company it was computed. A vector with a NaN reads as NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

INT4_RUN = 16
_FP8_MAX = 448.0


@dataclass(frozen=True, slots=True)
class SlotFormat:
    """Both ways for vectors of one size and dtype."""

    name: str
    dtype: torch.dtype
    """Of vectors as they are computed."""
    head_dim: int
    slot: int
    """Elements of a slot: numbers, or bytes of a quantised format."""

    @property
    def native(self) -> bool:
        """Stored as computed."""
        return getattr(torch, self.name, None) == self.dtype

    @property
    def turned(self) -> bool:
        """Keys lie, and queries must come, as `turn` makes them."""
        return self.name == "int4"

    def turn(self, x: torch.Tensor) -> torch.Tensor:
        """Queries or keys `[..., D]` as they score each other in this format."""
        if not self.turned:
            return x
        size = self.head_dim & -self.head_dim
        parts = x.float().reshape(*x.shape[:-1], -1, size)
        turned: torch.Tensor = torch.matmul(parts, _hadamard(size).to(x.device))
        return turned.reshape(x.shape).to(x.dtype)

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., D]` to `[..., slot]`."""
        return x if self.native else _PACK[self.name](x.float())

    def unpack(self, slots: torch.Tensor) -> torch.Tensor:
        """`[..., slot]` to `[..., D]`."""
        return slots if self.native else _UNPACK[self.name](slots, self.head_dim).to(self.dtype)


@cache
def _hadamard(size: int) -> torch.Tensor:
    """Orthogonal and symmetric, float32; size: a power of two."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix / math.sqrt(size)


def _pack_int8(x: torch.Tensor) -> torch.Tensor:
    scale = _up(x.abs().amax(-1, keepdim=True) / 127.0)
    n = (x / _divisor(scale)).round_().nan_to_num_().to(torch.int8)
    return torch.cat((n.view(torch.uint8), scale.view(torch.uint8)), dim=-1)


def _unpack_int8(slots: torch.Tensor, head_dim: int) -> torch.Tensor:
    scale = slots[..., head_dim:].contiguous().view(torch.bfloat16)
    return slots[..., :head_dim].view(torch.int8).float() * scale.float()


def _pack_int4(x: torch.Tensor) -> torch.Tensor:
    head_dim = x.shape[-1]
    runs = _runs(x)
    zero = -_up(-runs.amin(-1, keepdim=True))
    scale = _up((runs.amax(-1, keepdim=True) - zero.float()) / 15.0)
    n = ((runs - zero.float()) / _divisor(scale)).round_().nan_to_num_().to(torch.uint8)
    low, high = n.flatten(-2)[..., :head_dim].chunk(2, dim=-1)
    terms = torch.cat((scale, zero), dim=-1).flatten(-2)
    return torch.cat((low | (high << 4), terms.view(torch.uint8)), dim=-1)


def _unpack_int4(slots: torch.Tensor, head_dim: int) -> torch.Tensor:
    pairs = slots[..., : head_dim // 2]
    n = _runs(torch.cat((pairs & 15, pairs >> 4), dim=-1).float())
    terms = slots[..., head_dim // 2 :].contiguous().view(torch.bfloat16).float()
    terms = terms.reshape(*terms.shape[:-1], -1, 2)
    return (n * terms[..., :1] + terms[..., 1:]).flatten(-2)[..., :head_dim]


def _runs(x: torch.Tensor) -> torch.Tensor:
    """`[..., D]` as `[..., runs, INT4_RUN]`; the last one is filled up with its last number."""
    head_dim = x.shape[-1]
    run = min(INT4_RUN, head_dim)
    missing = -head_dim % run
    if missing:
        x = torch.cat((x, x[..., -1:].expand(*x.shape[:-1], missing)), dim=-1)
    return x.reshape(*x.shape[:-1], -1, run)


def _pack_fp8(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def _unpack_fp8(slots: torch.Tensor, _head_dim: int) -> torch.Tensor:
    return slots.view(torch.float8_e4m3fn).float()


def _up(x: torch.Tensor) -> torch.Tensor:
    """The next bfloat16 that is not below."""
    near = x.to(torch.bfloat16)
    return torch.where(near.float() < x, torch.nextafter(near, torch.full_like(near, float("inf"))), near)


def _divisor(scale: torch.Tensor) -> torch.Tensor:
    return torch.where(scale == 0, 1.0, scale.float())


_PACK: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "float32": lambda x: x,
    "bfloat16": lambda x: x.to(torch.bfloat16),
    "float16": lambda x: x.to(torch.float16),
    "int8": _pack_int8,
    "int4": _pack_int4,
    "fp8": _pack_fp8,
}
_UNPACK: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "float32": lambda slots, _: slots,
    "bfloat16": lambda slots, _: slots,
    "float16": lambda slots, _: slots,
    "int8": _unpack_int8,
    "int4": _unpack_int4,
    "fp8": _unpack_fp8,
}
