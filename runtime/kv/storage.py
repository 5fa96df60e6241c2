"""The memory behind a rank's block pool. One tensor, block-major; see `layout.py`.

    blocks  [num_blocks, num_layers, planes, rank_heads, block_size, slot]
            └── one contiguous span per block: what a transfer sends

A layer is seen as flat rows of the whole tensor, starting at that layer of block 0: then one set of indices serves all
layers. `span_index` and `slot_index` count in these rows.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from kvferry.kernels.cpu.attention import Workspace
from kvferry.kernels.formats import SlotFormat
from kvferry.runtime.ids import BlockId
from kvferry.runtime.kv.groups import KVGroups
from kvferry.runtime.kv.layout import KVLayout
from kvferry.runtime.kv.shared import shared_empty


class KVStorage:
    """Uninitialised memory for `num_blocks` blocks; a CPU's pages come when written, or taken (`pages.py`)."""

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        device: torch.device | str,
        *,
        dtype: torch.dtype | None = None,
        poison: bool = False,
        shared: bool = False,
    ) -> None:
        """`dtype`: in which the model computes; `None`: the layout's, which then is no quantised one.

        `shared`: on a CPU, in memory that processes of this machine can be given to read.
        `poison`: fill with NaN, so that a read of what nobody wrote shows (tests).
        """
        self.layout = layout
        self.num_blocks = num_blocks
        slot, element = layout.block_shape[-1], getattr(torch, layout.format.element)
        self.format = SlotFormat(layout.dtype, dtype or getattr(torch, layout.dtype), layout.head_dim, slot)
        self.workspace = Workspace()
        shape = (num_blocks, *layout.block_shape)
        if shared and torch.device(device).type == "cpu":
            self.blocks = shared_empty(shape, element)
        else:
            self.blocks = torch.empty(shape, dtype=element, device=device)
        self._heads = layout.planes * layout.rank_heads
        """Keys and values count as heads 0 … 2·rank_heads-1 of a layer, latents as its only one."""
        slots = self.blocks.view(-1, slot)
        spans = self.blocks.view(-1, layout.block_size * slot)
        self.slots = [slots[layer * self._heads * layout.block_size :] for layer in range(layout.num_layers)]
        """Per layer `[·, slot]`: one head of one token a row."""
        self.spans = [spans[layer * self._heads :] for layer in range(layout.num_layers)]
        """Per layer `[·, block_size * slot]`: one head of one block a row."""
        if poison:
            self.poison()

    def poison(self) -> None:
        """Fills everything with what reads as NaN: of bytes, all bits set make every scale and every fp8 one."""
        self.blocks.fill_(float("nan") if self.blocks.is_floating_point() else 255)

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the two planes, keys and values, as stored, each `[num_blocks, rank_heads, block_size, slot]`."""
        return self.blocks[:, layer, 0], self.blocks[:, layer, 1]

    def block_bytes(self, block_id: BlockId) -> torch.Tensor:
        """One block's span as a 1-d uint8 view."""
        return self.blocks[block_id].view(-1).view(torch.uint8)

    def span_index(self, block_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Rows of `spans` for block ids `[...]`: `[..., planes·rank_heads]`, keys first."""
        first = block_ids.astype(np.int64) * (self.layout.num_layers * self._heads)
        index: npt.NDArray[np.int64] = first[..., None] + np.arange(self._heads)
        return index

    def slot_index(self, block_ids: npt.NDArray[np.int64], offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Rows of `slots` for tokens at `offsets` `[...]` within blocks `[...]`, keys first."""
        return self.span_index(block_ids) * self.layout.block_size + offsets[..., None]


class RankStorage:
    """The storage of every block group of a rank."""

    def __init__(
        self,
        kv: KVGroups,
        device: torch.device | str,
        *,
        dtype: torch.dtype | None = None,
        poison: bool = False,
        shared: bool = False,
    ) -> None:
        self.kv = kv
        self.groups = [
            KVStorage(group.layout, group.num_blocks, device, dtype=dtype, poison=poison, shared=shared)
            for group in kv.groups
        ]
        self.places = sorted(
            (layer, group, place) for group, of in enumerate(kv.groups) for place, layer in enumerate(of.layers)
        )
        """Each layer of the model, its group, and its number among that group's layers."""
