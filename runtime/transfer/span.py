"""Some heads of a rank's blocks, read and written as bytes. One block after the other; within a block as it lies."""

from __future__ import annotations

import torch

from kvferry.runtime.errors import InvariantBroken
from kvferry.runtime.ids import BlockId


class HeadSpan:
    """A view of heads `[first, last)` of `blocks [num_blocks, num_layers, planes, rank_heads, block_size, head_dim]`.

    On a CPU it copies through numpy: torch would start a team of threads in every thread that copies.
    """

    def __init__(self, blocks: torch.Tensor, heads: tuple[int, int]) -> None:
        if not blocks.is_contiguous() or blocks.dim() != 6:
            raise InvariantBroken(f"block storage must be contiguous with 6 dimensions, not {tuple(blocks.shape)}")
        self._bytes = blocks.view(torch.uint8).flatten(4)[:, :, :, heads[0] : heads[1]]
        self._array = None if blocks.is_cuda else self._bytes.numpy()
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self.block_bytes = self._bytes[0].numel()

    def read(self, block_ids: list[BlockId], device: torch.device) -> torch.Tensor:
        """1-d uint8 on `device`, valid until the next call: a view of the storage where the blocks lie in a row."""
        first, count = block_ids[0], len(block_ids)
        if self._array is None:
            gathered = self._bytes[torch.tensor(block_ids, device=self._bytes.device)].reshape(-1).to(device)
            torch.cuda.current_stream().synchronize()
            return gathered
        if block_ids == list(range(first, first + count)):
            run = self._bytes[first : first + count]
            if run.is_contiguous() and device == run.device:
                return run.view(-1)
        size = count * self.block_bytes
        if self._scratch.numel() < size:
            self._scratch = torch.empty(size, dtype=torch.uint8)
        out = self._scratch[:size]
        rows = out.numpy().reshape(count, *self._array.shape[1:])
        for row, block_id in zip(rows, block_ids, strict=True):
            row[...] = self._array[block_id]
        return out.to(device)

    def write(self, block_ids: list[BlockId], payload: torch.Tensor) -> None:
        """Mutates the storage. `payload`: as `read` gave it, of any device."""
        shape = (len(block_ids), *self._bytes.shape[1:])
        if self._array is None:
            self._bytes[torch.tensor(block_ids, device=self._bytes.device)] = payload.to(self._bytes.device).view(shape)
            return
        for block_id, row in zip(block_ids, payload.cpu().numpy().reshape(shape), strict=True):
            self._array[block_id] = row
