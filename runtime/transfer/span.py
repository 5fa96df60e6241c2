"""Some heads of a rank's blocks, read and written as bytes. One block after the other; within a block as it lies."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from kvferry.runtime.errors import InvariantBroken
from kvferry.runtime.ids import BlockId

_memcpy = ctypes.CDLL(None).memcpy
_memcpy.argtypes, _memcpy.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t], None
"""Half the time of numpy for a single block, and a message may have 64 of them. Others have their turn meanwhile."""
MAX_GATHERED = 2
"""What `read` has gathered of late and stays as it is."""


def runs(block_ids: Sequence[BlockId], beside: Sequence[BlockId] = ()) -> list[tuple[int, BlockId, int]]:
    """Consecutive ids in a row, where those `beside` them are too: place in the list, first id, count."""
    found: list[tuple[int, BlockId, int]] = []
    begin = 0
    for i in range(1, len(block_ids) + 1):
        if i == len(block_ids) or block_ids[i] != block_ids[i - 1] + 1 or (beside and beside[i] != beside[i - 1] + 1):
            found.append((begin, block_ids[begin], i - begin))
            begin = i
    return found


class HeadSpan:
    """A view of heads `[first, last)` of `blocks [num_blocks, num_layers, planes, rank_heads, block_size, head_dim]`.

    On a CPU it copies through numpy: torch would start a team of threads in every thread that copies.
    """

    def __init__(self, blocks: torch.Tensor, heads: tuple[int, int]) -> None:
        if not blocks.is_contiguous() or blocks.dim() != 6:
            raise InvariantBroken(f"block storage must be contiguous with 6 dimensions, not {tuple(blocks.shape)}")
        self._bytes = blocks.view(torch.uint8).flatten(4)[:, :, :, heads[0] : heads[1]]
        self._array = None if blocks.is_cuda else self._bytes.numpy()
        self._flat = self._bytes.view(-1).numpy() if self._bytes.is_contiguous() and not blocks.is_cuda else None
        """Of whole blocks."""
        self._address = self._bytes.data_ptr()
        self._scratch = [torch.empty(0, dtype=torch.uint8) for _ in range(MAX_GATHERED)]
        self.block_bytes = self._bytes[0].numel()

    def read(
        self, block_ids: list[BlockId], device: torch.device, beside: Sequence[BlockId] = ()
    ) -> list[torch.Tensor]:
        """Pieces in a row, 1-d uint8 on `device`: of whole blocks, views of the storage, cut where ids `beside` are.

        Valid until `MAX_GATHERED` more calls.
        """
        if self._array is None:
            gathered = self._bytes[torch.tensor(block_ids, device=self._bytes.device)].reshape(-1).to(device)
            torch.cuda.current_stream().synchronize()
            return [gathered]
        if self._flat is not None and device == self._bytes.device:
            return self._pieces(runs(block_ids, beside))
        size = len(block_ids) * self.block_bytes
        scratch = self._scratch.pop(0)
        if scratch.numel() < size:
            scratch = torch.empty(size, dtype=torch.uint8)
        self._scratch.append(scratch)
        rows = scratch[:size].numpy().reshape(len(block_ids), *self._array.shape[1:])
        for place, first, count in runs(block_ids):
            rows[place : place + count] = self._array[first : first + count]
        return [scratch[:size].to(device)]

    def places(self, block_ids: list[BlockId]) -> list[torch.Tensor]:
        """The storage of whole blocks as pieces in a row; none where a block is not one contiguous span in memory."""
        return [] if self._flat is None else self._pieces(runs(block_ids))

    def _pieces(self, found: list[tuple[int, BlockId, int]]) -> list[torch.Tensor]:
        assert self._flat is not None
        size = self.block_bytes
        return [torch.from_numpy(self._flat[first * size : (first + count) * size]) for _, first, count in found]

    def write(self, block_ids: list[BlockId], pieces: Sequence[torch.Tensor]) -> None:
        """Mutates the storage. `pieces`: what `read` gave, cut between any blocks, on any device."""
        if block_ids and not 0 <= min(block_ids) <= max(block_ids) < len(self._bytes):
            raise InvariantBroken(f"blocks {min(block_ids)} to {max(block_ids)}, but there are {len(self._bytes)}")
        begin, size, shape = 0, self.block_bytes, (-1, *self._bytes.shape[1:])
        for piece in pieces:
            ids = block_ids[begin : begin + piece.numel() // size]
            begin += len(ids)
            if self._array is None:
                where = torch.tensor(ids, device=self._bytes.device)
                self._bytes[where] = piece.to(self._bytes.device).view(shape)
                continue
            piece = piece if piece.is_cpu else piece.cpu()
            if self._flat is not None:
                source = piece.data_ptr()
                for place, first, count in runs(ids):
                    _memcpy(self._address + first * size, source + place * size, count * size)
                continue
            rows = piece.numpy().reshape(shape)
            for place, first, count in runs(ids):
                self._array[first : first + count] = rows[place : place + count]
