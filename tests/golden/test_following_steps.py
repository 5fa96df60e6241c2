"""Steps that follow each other keep their arrays: what they compute is what steps made anew compute, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from kvferry.kernels.cpu.available import library
from kvferry.runtime.config import CacheConfig, EngineConfig
from kvferry.runtime.ids import BlockId
from kvferry.runtime.kv.groups import KVGroups
from kvferry.runtime.kv.storage import RankStorage
from kvferry.runtime.model.batch import Batch, Batches, make_batches
from kvferry.runtime.model.decoder import Decoder
from kvferry.runtime.model.fit import resolve_kv
from kvferry.runtime.model.parallel import SingleRank
from kvferry.runtime.step import Row, make_table
from tests.support.golden import build_from, randomised
from tests.support.golden_configs import CONFIGS, VOCAB

pytestmark = [
    pytest.mark.golden,
    pytest.mark.skipif(library() is None, reason="the CPU kernels are not built or are turned off"),
]
NAMES = ["gqa-tied", "mistral", "gemma2", "qwen3-moe-mixed"]
"""Plain; a window; layers with and without one; called layer by layer."""
WINDOW = 22


class Side:
    """A model's storage and how its batches are made."""

    def __init__(self, model: Decoder, groups: KVGroups, follows: bool) -> None:
        self.storage = RankStorage(groups, "cpu", dtype=model.dtype, poison=True)
        self.batches = Batches(self.storage) if follows else None
        self.model = model
        self.num_kept = self.num_followed = 0
        """Steps whose arrays were those of the step before; and whose program was, too."""
        self._last: Sequence[Batch] = ()

    def step(self, rows: list[Row]) -> torch.Tensor:
        made = make_batches(rows, self.storage) if self.batches is None else self.batches.make(rows)
        self.num_kept += made is self._last
        self._last = made
        compiled = self.model.compiled
        self.num_followed += compiled is not None and compiled.follows(made, self.storage)
        with torch.inference_mode():
            return self.model.forward(made, self.storage)[0].clone()


class Sequences:
    """Some that decode, side by side; their blocks, tokens and number change as in an engine."""

    def __init__(self, seed: int, groups: KVGroups) -> None:
        self.block_size = groups.block_size
        self.random = np.random.default_rng(seed)
        self.free = [
            [BlockId(group.first_block + i) for i in self.random.permutation(group.num_blocks).tolist()]
            for group in groups.groups
        ]
        self.starts: list[int] = []
        self.tables: list[list[list[BlockId]]] = []
        """Of each sequence, by block group."""
        self.moved: list[tuple[BlockId, BlockId]] = []
        """From which block of the first group to which other one its content must move before the step."""

    def row(self, i: int, count: int, num_samples: int = 1) -> Row:
        end = self.starts[i] + count
        for table, free in zip(self.tables[i], self.free, strict=True):
            while len(table) * self.block_size < end:
                table.append(free.pop())
        tokens = [int(token) for token in self.random.integers(0, VOCAB, count)]
        row = Row(tokens, self.starts[i], make_table(self.tables[i][0]), num_samples)
        row.window_block_ids = make_table(self.tables[i][-1])
        self.starts[i] = end - num_samples + 1
        return row

    def join(self, count: int) -> Row:
        self.starts.append(0)
        self.tables.append([[] for _ in self.free])
        return self.row(len(self.starts) - 1, count)

    def leave(self, i: int) -> None:
        for free, table in zip(self.free, self.tables.pop(i), strict=True):
            free += table
        del self.starts[i]

    def step(self) -> list[Row]:
        chance = self.random.random()
        if chance < 0.05 and len(self.starts) > 1:
            self.leave(int(self.random.integers(len(self.starts))))
        elif chance < 0.1:
            self.tables.reverse()
            self.starts.reverse()
        elif chance < 0.15:
            table = self.tables[0][0]
            self.moved.append((table[-1], self.free[0].pop()))
            table[-1] = self.moved[-1][1]
        guess = chance > 0.95  # which is not accepted
        rows = [self.row(i, 2 if guess and not i else 1, 2 if guess and not i else 1) for i in range(len(self.starts))]
        return [*rows, self.join(int(self.random.integers(1, 40)))] if 0.9 < chance < 0.95 else rows


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("name", "block_size"), [*((name, 16) for name in NAMES), ("gqa-tied", 256)])
def test_steps_that_follow_compute_what_new_ones_do(name: str, block_size: int, seed: int) -> None:
    """A position, slot or window of the step before; tokens in another order; a row that left; a block that changed."""
    config = CONFIGS[name]()
    if name == "mistral":
        config.sliding_window, config.head_dim = WINDOW, 16
    weights = randomised(name, config)
    model, other = (build_from(weights, SingleRank(), torch.float32) for _ in range(2))
    groups = resolve_kv(EngineConfig(cache=CacheConfig(block_size=block_size, num_blocks=200)), model.spec, 1)
    kept, anew = Side(model, groups, True), Side(other, groups, False)
    sequences = Sequences(seed, groups)
    for number in range(80):
        rows = sequences.step() if number else [sequences.join(count) for count in (5, 130, 100)]
        for blocks in (kept.storage.groups[0].blocks, anew.storage.groups[0].blocks):
            for old, new in sequences.moved:
                blocks[new] = blocks[old]
                blocks[old] = float("nan")
        sequences.moved.clear()
        logits = kept.step(rows)
        assert torch.isfinite(logits).all()
        assert torch.equal(logits, anew.step(rows))
    assert kept.num_kept > 8
    assert (kept.num_followed > 8) == (name == "gqa-tied"), "windows move on, so their programs do not follow"
    assert not anew.num_kept
    assert not anew.num_followed
    for one, other in zip(kept.storage.groups, anew.storage.groups, strict=True):
        assert torch.equal(one.blocks.view(torch.uint8), other.blocks.view(torch.uint8))
