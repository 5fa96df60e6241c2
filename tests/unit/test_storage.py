"""Guards against views that point at another block's memory: a transfer would then carry the wrong keys."""

import numpy as np
import torch

from kvferry.runtime.ids import BlockId
from kvferry.runtime.kv.layout import KVLayout
from kvferry.runtime.kv.storage import KVStorage

LAYOUT = KVLayout(num_layers=3, num_kv_heads=4, head_dim=8, block_size=5, dtype="bfloat16", tp_size=2)


def test_all_views_show_the_same_memory() -> None:
    storage = KVStorage(LAYOUT, 6, "cpu")
    storage.blocks.copy_(torch.arange(storage.blocks.numel()).view_as(storage.blocks) % 251)
    for layer in range(3):
        k, v = storage.layer(layer)
        assert k.shape == v.shape == (6, 2, 5, 8)
        both = torch.stack((k, v))
        spans = storage.spans[layer][torch.from_numpy(storage.span_index(np.array([4, 0])))]
        assert torch.equal(spans.view(2, 2, 2, 5, 8), both[:, [4, 0]].transpose(0, 1))
        slots = storage.slots[layer][torch.from_numpy(storage.slot_index(np.array([4, 1]), np.array([2, 3])))]
        assert torch.equal(slots[0].view(2, 2, 8), both[:, 4, :, 2])
        assert torch.equal(slots[1].view(2, 2, 8), both[:, 1, :, 3])


def test_a_block_is_one_span_of_bytes() -> None:
    storage = KVStorage(LAYOUT, 3, "cpu", poison=True)
    assert storage.blocks.isnan().all()
    span = storage.block_bytes(BlockId(1))
    assert span.shape == (LAYOUT.block_bytes,)
    span.zero_()
    assert storage.blocks[1].count_nonzero() == 0
    assert storage.blocks[[0, 2]].isnan().all()
