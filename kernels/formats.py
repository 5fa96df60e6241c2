"""How keys and values (a head's vectors of one token, `[..., D]`) are stored in slots of the cache, and read back.

    float32, bfloat16, float16   D numbers
    fp8      D bytes: e4m3, cut off at its largest, 448
    int8     D bytes, then a scale: x = scale · n, n in -127 … 127
    int4     keys in 32 levels, values in 11: D/2 bytes, then a scale of the vector, then D/32 bytes (rounded up) more
      key    byte i: the lower four bits of x[i]'s level, then those of x[i + D/2]
      value  byte i: level of x[i] + 11 · level of x[i + D/2], and in the top bit the fifth of the key's x[i]
      more   the fifth bits of the key's x[i + D/2]: in the key's slot, then in the value's

Keys suffer several times as much as values from the same error: so they get 5 bits, values 3.5, and since slots are of
one size, the value's holds a part of its key. Before they become int4, both are turned: a Hadamard matrix spreads the
few large numbers of a vector over all of it, which makes one scale for all fit and the numbers about normal; levels lie
closer in the middle, at t·(bend + t²). Queries are turned too, so that scores stay the same, and results turned back.

int8's scale is a bfloat16, rounded up; int4's a byte, 5 bits of exponent and 3 of mantissa. Each belongs to one vector
only: what is stored of a token depends on nothing but that token, so it is the same whenever and in whatever company
it was computed. A vector with a NaN reads as NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F

_FP8_MAX = 448.0
_SCALE_BIAS = 112
"""Of a byte's exponent, against that of float32."""


@dataclass(frozen=True, slots=True)
class _Levels:
    """Of a number in int4: 0 … count - 1, symmetric."""

    count: int
    bend: int
    tries: tuple[float, ...]
    """Parts of a vector's largest number that become the outermost level; the one that errs least is taken."""

    def at(self, levels: torch.Tensor) -> torch.Tensor:
        """Where they lie: whole numbers, small enough for a float to hold them exactly."""
        t = (2.0 * levels - (self.count - 1)) / (1 + self.count % 2)
        return t * (self.bend + t * t)

    def scale(self, byte: torch.Tensor) -> torch.Tensor:
        return _scale(byte) * (1.0 / float(self.at(torch.tensor(self.count - 1))))

    def read(self, levels: torch.Tensor, byte: torch.Tensor) -> torch.Tensor:
        return self.at(levels) * self.scale(byte)

    def fit(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Levels `[..., D]` and the scale's byte `[..., 1]` of each vector, uint8."""
        largest = x.abs().amax(-1, keepdim=True)
        positive = self.at(torch.arange(self.count // 2, self.count, device=x.device))
        borders = (positive[1:] + positive[:-1]) / 2.0
        all_levels, bytes_, errors = [], [], []
        for part in self.tries:
            bytes_.append(_scale_byte(largest * part))
            away = torch.bucketize((x / _divisor(self.scale(bytes_[-1]))).nan_to_num_().abs_().contiguous(), borders)
            all_levels.append(torch.where(x < 0, (self.count - 1) // 2 - away, self.count // 2 + away).to(torch.uint8))
            errors.append((self.read(all_levels[-1], bytes_[-1]) - x).square().sum(-1, keepdim=True))
        best = torch.stack(errors).argmin(0, keepdim=True)
        levels, byte = (torch.take_along_dim(torch.stack(of), best, 0)[0] for of in (all_levels, bytes_))
        return levels, byte


_KEY = _Levels(32, 2400, (1.0,))
_VALUE = _Levels(11, 60, (1.0, 0.9, 0.8))
"""As in `int4.h`. Bends and tries: those that erred least, of the ones tried, on normal numbers."""


@dataclass(frozen=True, slots=True)
class SlotFormat:
    """Both ways for vectors of one size and dtype. The first dimension is keys, then as many values, of the same."""

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
        """Keys and values lie as `turn` makes them; queries must come so, and results be turned back, by `turn` too."""
        return self.name == "int4"

    def turn(self, x: torch.Tensor) -> torch.Tensor:
        """Queries, keys, values or results `[..., D]` as they are in this format, or back from it."""
        if not self.turned:
            return x
        size = self.head_dim & -self.head_dim
        parts = x.float().reshape(*x.shape[:-1], -1, size)
        turned: torch.Tensor = torch.matmul(parts, _hadamard(size).to(x.device))
        return turned.reshape(x.shape).to(x.dtype)

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """`[2n, ..., D]` to `[2n, ..., slot]`."""
        return x if self.native else _PACK[self.name](x.float())

    def unpack(self, slots: torch.Tensor) -> torch.Tensor:
        """`[2n, ..., slot]` to `[2n, ..., D]`."""
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
    half = x.shape[-1] // 2
    key, value = x.chunk(2)
    (key_levels, key_scale), (value_levels, value_scale) = _KEY.fit(key), _VALUE.fit(value)
    first, second = torch.split(key_levels, half, dim=-1)
    fifth = F.pad(second >> 4, (0, -half % 16))
    fifth = fifth.reshape(*fifth.shape[:-1], -1, 8)
    more = (fifth << torch.arange(8, device=x.device)).sum(-1).to(torch.uint8).chunk(2, dim=-1)
    low, high = torch.split(value_levels, half, dim=-1)
    keys = first & 15 | (second & 15) << 4, key_scale, more[0]
    values = low + _VALUE.count * high | first >> 4 << 7, value_scale, more[1]
    return torch.cat((torch.cat(keys, dim=-1), torch.cat(values, dim=-1)))


def _unpack_int4(slots: torch.Tensor, head_dim: int) -> torch.Tensor:
    half = head_dim // 2
    (pairs, key_scale, more), (mixed, value_scale, further) = (
        torch.split(plane, [half, 1, -(-half // 16)], dim=-1) for plane in slots.chunk(2)
    )
    more = torch.cat((more, further), dim=-1)[..., None]
    fifth = (more >> torch.arange(8, dtype=torch.uint8, device=slots.device) & 1).flatten(-2)[..., :half]
    keys = torch.cat((pairs & 15 | mixed >> 7 << 4, pairs >> 4 | fifth << 4), dim=-1)
    both = mixed & 127
    values = torch.cat((both % _VALUE.count, both // _VALUE.count), dim=-1)
    return torch.cat((_KEY.read(keys, key_scale), _VALUE.read(values, value_scale)))


def _scale_byte(x: torch.Tensor) -> torch.Tensor:
    """The nearest there is to x >= 0; 255 if x is not finite."""
    bits = x.contiguous().view(torch.int32)
    normal = (bits + 0x7FFFF + (bits >> 20 & 1) >> 20) - (_SCALE_BIAS << 3)
    byte = torch.where(x < 2.0**-14, (x * 2.0**17).nan_to_num_().round_().to(torch.int32), normal)
    return torch.where(x.isfinite(), byte.clamp_(max=254), 255).to(torch.uint8)


def _scale(byte: torch.Tensor) -> torch.Tensor:
    normal = ((byte.to(torch.int32) << 20) + (_SCALE_BIAS << 23)).view(torch.float32)
    return torch.where(byte < 8, byte * 2.0**-17, normal).masked_fill_(byte == 255, float("nan"))


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
