"""Rows that begin with the same blocks are attended to together in the C++ kernels; none of them may show it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvferry.kernels.attention import Scoring
from kvferry.kernels.cpu import attention
from kvferry.kernels.cpu.available import library
from kvferry.kernels.rope import inverse_frequencies, rope_angles
from kvferry.runtime.ids import NO_BLOCK, BlockId
from kvferry.runtime.kv.layout import KVLayout
from kvferry.runtime.kv.storage import KVStorage
from kvferry.runtime.model.batch import make_batch
from kvferry.runtime.step import Row
from tests.support.kernels import num_levels, threads, without_best

pytestmark = pytest.mark.skipif(library() is None, reason="the CPU kernels are not built or are turned off")


@dataclass(frozen=True)
class Case:
    layout: KVLayout
    group: int
    spans: list[tuple[int, int]]
    """Start and number of tokens of each row."""
    prefixes: list[tuple[int, int]]
    """Of each row but the first: an earlier row, and how many positions both read from the same blocks at most."""
    scoring: Scoring
    dtype: torch.dtype


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Trees of prefixes that end within, at and behind a chunk (128); more rows than a tile takes (96 / group)."""
    kv_heads, group = draw(st.sampled_from([(1, 1), (1, 5), (1, 25), (1, 97), (2, 1), (2, 4), (3, 3)]))
    layout = KVLayout(
        num_layers=1,
        num_kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([8, 64, 96])),
        block_size=draw(st.sampled_from([1, 3, 16, 48])),
        dtype=draw(st.sampled_from(list(attention.FORMATS))),
    )
    start = st.one_of(st.integers(0, 300), st.sampled_from([127, 128, 200, 255, 256]))
    spans = draw(st.lists(st.tuples(start, st.sampled_from([1, 1, 1, 1, 7])), min_size=2, max_size=12))
    positions = st.sampled_from([0, 16, 31, 48, 64, 100, 128, 144, 192, 192, 240, 300])
    prefixes = [(draw(st.integers(0, i - 1)), draw(positions)) for i in range(1, len(spans))]
    window = draw(st.sampled_from([None, None, None, 17, 100, 128, 200]))
    scoring = Scoring(layout.head_dim**-0.5, draw(st.sampled_from([None, 1.5])), window)
    return Case(layout, group, spans, prefixes, scoring, draw(st.sampled_from([torch.float32, torch.bfloat16])))


class Step:
    """A case as tensors. Slots that hold no earlier token are NaN, blocks before a row's window are not named."""

    def __init__(self, case: Case) -> None:
        layout, size = case.layout, case.layout.block_size
        counts = [-(-(start + count) // size) for start, count in case.spans]
        generator = torch.Generator().manual_seed(1)
        ids = np.split(torch.randperm(sum(counts), generator=generator).numpy(), np.cumsum(counts)[:-1])
        for i, (leader, positions) in enumerate(case.prefixes, start=1):
            blocks = min(positions, case.spans[i][0], case.spans[leader][0]) // size
            ids[i][:blocks] = ids[leader][:blocks]
        self.case = case
        self.storage = KVStorage(layout, sum(counts), "cpu", dtype=case.dtype, poison=True)
        keys, values = self.storage.layer(0)
        self.rows = []
        for (start, count), table in zip(case.spans, ids, strict=True):
            at = np.arange(start)
            place = torch.from_numpy(table[at // size]), slice(None), torch.from_numpy(at % size)
            random = torch.randn(2, start, layout.rank_heads, layout.head_dim, generator=generator).to(case.dtype)
            if start:
                keys[place], values[place] = self.storage.format.pack(random)
            window = case.scoring.window
            gone = 0 if window is None else max(0, start - window + 1) // size
            named = [NO_BLOCK] * gone + [BlockId(int(b)) for b in table[gone:]]
            self.rows.append(Row([0] * count, start, named, count))
        heads = layout.rank_heads * (case.group + 2)
        self.qkv = [torch.randn(n, heads, layout.head_dim, generator=generator).to(case.dtype) for _, n in case.spans]

    def run(self, rows: list[int]) -> torch.Tensor:
        """Results of these rows' tokens, in this order."""
        batch = make_batch([self.rows[i] for i in rows], self.storage)
        assert batch.contexts is not None
        plan = torch.cat([self.qkv[i] for i in rows])
        qkv = torch.empty_like(plan)
        qkv[batch.sample_index] = plan
        frequencies = inverse_frequencies(self.case.layout.head_dim, 10000.0)
        angles = rope_angles(torch.arange(batch.num_positions), frequencies, self.case.dtype)
        return batch.contexts.attend(qkv, angles, self.storage.slots[0], self.case.scoring)[batch.sample_index]


@settings(max_examples=150, deadline=None)
@example(
    Case(
        KVLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=16, dtype="float32"),
        1,
        [(96, 1), (104, 1)],
        [(0, 48)],
        Scoring(0.3),
        torch.float32,
    ),
    0,
)
@example(
    Case(
        KVLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=48, dtype="float32"),
        25,
        [(227, 1), (226, 1), (229, 1), (225, 1)],
        [(0, 192)] * 3,
        Scoring(0.3, None, 100),
        torch.float32,
    ),
    0,
)
@given(cases(), st.integers(0, num_levels() - 1))
def test_a_row_is_the_same_bit_for_bit_alone_and_among_those_that_share_its_prefix(case: Case, level: int) -> None:
    """Shared blocks read for the wrong rows, a rest that does not go on where they end, sums put together otherwise;
    what a row has of its own cut off where the first row of its tile ends (first example), or what it sees where that
    one's window begins (second).
    """
    step, rows = Step(case), list(range(len(case.spans)))
    with without_best(level):
        with threads(1):
            alone = torch.cat([step.run([row]) for row in rows])
        assert not alone.isnan().any()
        for num_threads in (1, 3):
            with threads(num_threads):
                assert torch.equal(alone, step.run(rows))


def test_rows_are_tiled_by_what_they_share() -> None:
    """A search that finds nothing would cost no test its bits. 64 rows of 256 positions of which 192 are shared: each
    of their two chunks in two tiles of 32 rows x 3 heads.
    """
    layout = KVLayout(num_layers=1, num_kv_heads=3, head_dim=64, block_size=16, dtype="bfloat16")
    storage = KVStorage(layout, 1000, "cpu", dtype=torch.bfloat16)

    def tiles(tables: list[list[int]]) -> int:
        rows = [Row([0], len(table) * 16 - 1, [BlockId(b) for b in table], True) for table in tables]
        contexts = make_batch(rows, storage).contexts
        assert contexts is not None
        return int(attention._Struct.from_address(contexts.address(9, None)).num_tiles)

    shared = list(range(12))
    rows = [[*shared, *range(100 + 4 * i, 104 + 4 * i)] for i in range(64)]
    assert tiles(rows) == 4
    assert tiles([row[:8] for row in rows]) == 2
    alone = [list(range(400 + 16 * i, 416 + 16 * i)) for i in range(4)]
    assert tiles(rows + alone) == 4 + 8
    assert tiles(alone) == 8
    assert tiles([rows[0]]) == 2
    template = [[0, *range(1 + 15 * (i // 2), 16 + 15 * (i // 2))] for i in range(4)]
    assert tiles(template) == 4, "two pairs, and not four rows that share one block"
