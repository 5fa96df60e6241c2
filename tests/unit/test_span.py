"""Blocks as bytes: what is written lands in its blocks and nowhere else, however the pieces were cut."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch

from kvferry.runtime.errors import InvariantBroken
from kvferry.runtime.ids import BlockId
from kvferry.runtime.transfer.span import HeadSpan

NUM_BLOCKS, HEADS = 12, 3
CPU = torch.device("cpu")


def storage(seed: int) -> torch.Tensor:
    return torch.randn(NUM_BLOCKS, 2, 2, HEADS, 4, 5, generator=torch.Generator().manual_seed(seed))


def ids(*numbers: int) -> list[BlockId]:
    return [BlockId(n) for n in numbers]


def cut(pieces: Sequence[torch.Tensor], size: int, draw: random.Random) -> list[torch.Tensor]:
    """The same bytes in pieces of whole blocks."""
    data = torch.cat(list(pieces))
    count = data.numel() // size
    bounds = [0, *sorted(draw.sample(range(1, count), draw.randrange(min(count, 3)))), count]
    return [data[a * size : b * size] for a, b in pairwise(bounds)]


@pytest.mark.parametrize("heads", [(0, HEADS), (0, 1), (1, 3)])
@pytest.mark.parametrize("seed", range(12))
def test_blocks_land_where_they_belong(heads: tuple[int, int], seed: int) -> None:
    """Guards against blocks that change places within a piece or a run, and bytes written beside them."""
    draw = random.Random(seed)
    source, target = storage(1), storage(2)
    wanted = target.clone()
    count = draw.randrange(2, 9)
    begin = draw.randrange(NUM_BLOCKS - count)
    from_ids = ids(*draw.sample(range(NUM_BLOCKS), count))
    to_ids = ids(*range(begin, begin + count)) if seed % 2 else ids(*draw.sample(range(NUM_BLOCKS), count))
    reading, writing = HeadSpan(source, heads), HeadSpan(target, heads)
    pieces = reading.read(from_ids, CPU, to_ids if seed % 3 else ())
    writing.write(to_ids, pieces if seed % 3 else cut(pieces, reading.block_bytes, draw))
    for one, other in zip(from_ids, to_ids, strict=True):
        wanted[other, :, :, slice(*heads)] = source[one, :, :, slice(*heads)]
    assert torch.equal(target, wanted)


@pytest.mark.parametrize("heads", [(0, HEADS), (0, 1)])
@pytest.mark.parametrize("block_ids", [(3, NUM_BLOCKS), (-1, 4)])
def test_nothing_is_written_outside_of_the_storage(heads: tuple[int, int], block_ids: tuple[int, ...]) -> None:
    """Guards against memory of somebody else that is overwritten: bytes are copied to addresses."""
    target = storage(1)
    before = target.clone()
    span = HeadSpan(target, heads)
    pieces = HeadSpan(storage(2), heads).read(ids(1, 2), CPU)
    with pytest.raises(InvariantBroken, match="there are 12"):
        span.write(ids(*block_ids), pieces)
    assert torch.equal(target, before)
