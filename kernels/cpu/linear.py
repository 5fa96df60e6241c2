"""Linear maps whose weights are packed for the kernels, see `linear.h`."""

from __future__ import annotations

import ctypes

import torch

from kvferry.kernels.cpu.operations import DTYPES, threads_for

_PRODUCTS_PER_ELEMENT = 8
"""So many products take as long as an element of other operations."""


class Packed:
    """A weight `[out, in]` in panels."""

    __slots__ = ("_lib", "dtype", "inputs", "outputs", "weight")

    def __init__(self, lib: ctypes.CDLL, weight: torch.Tensor) -> None:
        """What `kernels_of` found for the weight, which is not kept."""
        self._lib, self.dtype = lib, weight.dtype
        self.outputs, self.inputs = weight.shape
        shape = DTYPES[weight.dtype], self.outputs, self.inputs
        self.weight = torch.empty(lib.kvferry_packed_linear_bytes(*shape), dtype=torch.uint8)
        weight = weight.contiguous()
        lib.kvferry_pack_linear(
            shape[0], weight.data_ptr(), self.weight.data_ptr(), *shape[1:], torch.get_num_threads()
        )

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """`x @ weight.T + bias`; x: `[rows, in]` of the weight's dtype, bias: `[out]`. Returns a new `[rows, out]`."""
        assert (x.dtype, x.shape[1]) == (self.dtype, self.inputs), (x.dtype, x.shape)
        if x.stride(1) != 1 or x.stride(0) * x.element_size() % 4:
            x = x.contiguous()
        rows, out = len(x), torch.empty((len(x), self.outputs), dtype=self.dtype)
        self._lib.kvferry_linear(
            DTYPES[self.dtype],
            x.data_ptr(),
            self.weight.data_ptr(),
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            rows,
            self.inputs,
            self.outputs,
            x.stride(0),
            self.outputs,
            threads_for(rows * self.inputs * self.outputs // _PRODUCTS_PER_ELEMENT),
        )
        return out
