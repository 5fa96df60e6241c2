"""Linear maps whose weights are packed for the kernels, see `linear.h`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from typing import Literal

import torch

from kvferry.kernels.cpu.memory import weight_empty
from kvferry.kernels.cpu.operations import DTYPES, threads_for

Form = Literal["bytes", "fine bytes", "nibbles"]
_FORMS: dict[Form, int] = {"bytes": 0, "fine bytes": 1, "nibbles": 2}
PANEL = 32
"""Outputs that lie side by side."""
_PRODUCTS_PER_ELEMENT = 8
"""So many products take as long as an element of other operations."""


class Packed:
    """A weight `[out, in]` in panels."""

    __slots__ = ("_lib", "dtype", "inputs", "outputs", "weight")

    def __init__(self, lib: ctypes.CDLL, weight: torch.Tensor) -> None:
        """What `kernels_of` found for the weight, which is not kept."""
        self._lib = lib
        self.outputs, self.inputs = weight.shape
        self.dtype, self.weight = weight.dtype, _pack(lib, weight, weight_empty)

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """`x @ weight.T + bias`; x: `[rows, in]` of the weight's dtype, bias: `[out]`. Returns a new `[rows, out]`."""
        assert (x.dtype, x.shape[1]) == (self.dtype, self.inputs), (x.dtype, x.shape)
        if x.stride(1) != 1 or x.stride(0) * x.element_size() % 4:
            x = x.contiguous()
        out = torch.empty((len(x), self.outputs), dtype=self.dtype)
        places, sizes = _arguments(x, self.weight, bias, out)
        threads = threads_for(len(x) * self.inputs * self.outputs // _PRODUCTS_PER_ELEMENT)
        self._lib.kvferry_linear(DTYPES[self.dtype], *places, *sizes, threads)
        return out

    def embed(self, token_ids: torch.Tensor, scale: float) -> torch.Tensor:
        """The weight's rows of these numbers, times scale; of others NaN. token_ids: int64 `[rows]`.

        For inputs that `kernels_for` takes. Returns a new `[rows, in]`.
        """
        token_ids = token_ids.contiguous()
        rows = len(token_ids)
        out = torch.empty((rows, self.inputs), dtype=self.dtype)
        places = token_ids.data_ptr(), self.weight.data_ptr(), out.data_ptr()
        sizes = self.outputs, rows, self.inputs, threads_for(rows * self.inputs)
        self._lib.kvferry_embed_packed(DTYPES[self.dtype], *places, scale, *sizes)
        return out


class PackedIntegers:
    """A quantised weight in panels; rows are quantised in the call."""

    __slots__ = ("_lib", "dtype", "form", "inputs", "outputs", "row_units", "weight")

    def __init__(
        self, lib: ctypes.CDLL, form: Form, shape: torch.Size, units: Iterable[torch.Tensor], dtype: torch.dtype
    ) -> None:
        """shape: of the weight; units: its outputs as int32 `[some, units]`, all but the last a multiple of `PANEL`.

        What units hold stands in `linear_quantized.h`. dtype: of rows and results.
        """
        self._lib, self.form, self.dtype = lib, _FORMS[form], dtype
        self.outputs, self.inputs = shape
        parts = [_pack(lib, some) for some in units]
        self.weight = torch.cat(parts, out=weight_empty(sum(map(len, parts))))
        self.row_units: int = lib.kvferry_quantized_row_units(self.form, self.inputs)

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """`x @ weight.T + bias`; x: `[rows, in]`, bias: `[out]`. Returns a new `[rows, out]`."""
        assert (x.dtype, x.shape[1]) == (self.dtype, self.inputs), (x.dtype, x.shape)
        if x.stride(1) != 1:
            x = x.contiguous()
        out = torch.empty((len(x), self.outputs), dtype=self.dtype)
        steps = torch.empty((len(x), self.row_units), dtype=torch.int32)
        places, sizes = _arguments(x, self.weight, bias, out)
        threads = threads_for(len(x) * self.inputs * self.outputs // (2 * _PRODUCTS_PER_ELEMENT))
        self._lib.kvferry_linear_quantized(self.form, DTYPES[self.dtype], *places, steps.data_ptr(), *sizes, threads)
        return out


def _arguments(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> tuple[tuple[int | None, ...], tuple[int, ...]]:
    """Where a call reads and writes; rows, inputs, outputs and both strides."""
    places = x.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr(), out.data_ptr()
    return places, (*x.shape, out.shape[1], x.stride(0), out.shape[1])


def _pack(lib: ctypes.CDLL, weight: torch.Tensor, memory: Callable[[int], torch.Tensor] | None = None) -> torch.Tensor:
    weight = weight.contiguous()
    kind = 1 if weight.element_size() == 2 else 0
    size = lib.kvferry_packed_linear_bytes(kind, *weight.shape)
    packed = torch.empty(size, dtype=torch.uint8) if memory is None else memory(size)
    lib.kvferry_pack_linear(kind, weight.data_ptr(), packed.data_ptr(), *weight.shape, torch.get_num_threads())
    return packed
