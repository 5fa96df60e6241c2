"""Embeddings of tokens, from a table or from the weight of an output head that is tied to it."""

from __future__ import annotations

import torch

from kvferry.kernels.cpu.available import kernels_for
from kvferry.kernels.cpu.linear import Packed
from kvferry.kernels.linear import Linear, PackedLinear


class Embedding:
    """Rows of `[vocab, width]`, times a scale."""

    __slots__ = ("device", "dtype", "scale", "table", "width")

    def __init__(self, table: torch.Tensor, scale: float = 1.0, twin: Linear | None = None) -> None:
        """twin: a linear map made from the same table. If it has the table as it is, then it is kept once, there."""
        self.dtype, self.device, self.width, self.scale = table.dtype, table.device, table.shape[1], scale
        packed = twin.packed if isinstance(twin, PackedLinear) and kernels_for(table, self.width) else None
        self.table: torch.Tensor | Packed = table if packed is None else packed

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids: `[rows]` below vocab. Returns a new `[rows, width]`."""
        if isinstance(self.table, Packed):
            return self.table.embed(token_ids, self.scale)
        x = self.table.index_select(0, token_ids)
        return x if self.scale == 1.0 else x.mul_(self.scale)
