"""Some heads of a rank's blocks, whichever block group they are of. All blocks of a message are of one group."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvferry.runtime.ids import BlockId
from kvferry.runtime.kv.groups import KVGroups
from kvferry.runtime.transfer.header import BlockRange
from kvferry.runtime.transfer.span import HeadSpan


class GroupSpan:
    """`blocks`: the storage of each block group."""

    def __init__(self, kv: KVGroups, blocks: Sequence[torch.Tensor], heads: tuple[int, int]) -> None:
        self._spans = [HeadSpan(of_group, heads) for of_group in blocks]
        self.ranges = [
            BlockRange(group.first_block, group.first_block + group.num_blocks, span.block_bytes)
            for group, span in zip(kv.groups, self._spans, strict=True)
        ]

    def _in_group(self, block_ids: list[BlockId]) -> tuple[HeadSpan, list[BlockId]]:
        place = next(i for i, of_group in enumerate(self.ranges) if block_ids[0] < of_group.stop)
        first = self.ranges[place].first
        return self._spans[place], [BlockId(b - first) for b in block_ids] if first else block_ids

    def read(
        self, block_ids: list[BlockId], device: torch.device, beside: Sequence[BlockId] = ()
    ) -> list[torch.Tensor]:
        """As `HeadSpan.read`."""
        span, block_ids = self._in_group(block_ids)
        return span.read(block_ids, device, beside)

    def places(self, block_ids: list[BlockId]) -> list[torch.Tensor]:
        """As `HeadSpan.places`."""
        span, block_ids = self._in_group(block_ids)
        return span.places(block_ids)

    def write(self, block_ids: list[BlockId], pieces: Sequence[torch.Tensor]) -> None:
        """As `HeadSpan.write`."""
        span, block_ids = self._in_group(block_ids)
        span.write(block_ids, pieces)
