"""The C++ kernels against their naive float64 twins, for every instruction set that this machine has."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvferry.kernels import reference
from kvferry.kernels.activation import gated, gelu_tanh
from kvferry.kernels.attention import Scoring
from kvferry.kernels.cpu import attention
from kvferry.kernels.cpu.available import kernels_for, library
from kvferry.kernels.norm import add_norm_, rms_norm
from kvferry.kernels.rope import inverse_frequencies, rope_angles
from kvferry.kernels.sampling import argmax
from kvferry.runtime.ids import NO_BLOCK, BlockId, RequestId, SequenceKey
from kvferry.runtime.kv.layout import KVLayout
from kvferry.runtime.kv.storage import KVStorage
from kvferry.runtime.model.batch import make_batch
from kvferry.runtime.model.sampler import sample
from kvferry.runtime.request import SamplingParams
from kvferry.runtime.step import Row, SampleInput
from tests.support.kernels import num_levels, threads, torch_alone, without_best

pytestmark = pytest.mark.skipif(library() is None, reason="the CPU kernels are not built or are turned off")

DTYPES = [torch.float32, torch.bfloat16]
LEVELS = st.integers(0, num_levels() - 1)


@dataclass(frozen=True)
class Case:
    layout: KVLayout
    group: int
    spans: list[tuple[int, int]]
    """Start and number of tokens of each row."""
    qk_norm: bool
    seed: int
    scoring: Scoring
    dtype: torch.dtype = torch.float32
    """In which is computed; the layout says how it is stored."""


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Contexts on both sides of a chunk's border (128), tiles' borders (96 / group queries), blocks' borders."""
    kv_heads, group = draw(st.sampled_from([(1, 1), (1, 5), (1, 97), (2, 4), (3, 3)]))
    layout = KVLayout(
        num_layers=draw(st.integers(1, 2)),
        num_kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([8, 16, 64, 96, 256])),
        block_size=draw(st.sampled_from([1, 3, 16])),
        dtype=draw(st.sampled_from(list(attention.FORMATS))),
    )
    start = st.one_of(st.integers(0, 40), st.sampled_from([126, 127, 128, 255, 256, 300]))
    count = st.one_of(st.just(1), st.just(1), st.integers(2, 20), st.sampled_from([31, 33]))
    spans = draw(st.lists(st.tuples(start, count), min_size=1, max_size=4))
    scoring = Scoring(
        scale=draw(st.sampled_from([0.5, 1.5])) * layout.head_dim**-0.5,
        softcap=draw(st.sampled_from([None, 1.5])),
        window=draw(st.sampled_from([None, None, 1, 2, 17, 100, 127, 128, 129, 250, 1000])),
    )
    return Case(
        layout, group, spans, draw(st.booleans()), draw(st.integers(0, 1000)), scoring, draw(st.sampled_from(DTYPES))
    )


class Step:
    """A case as tensors: a poisoned pool with scattered blocks, in which earlier steps' KV is written."""

    def __init__(self, case: Case) -> None:
        layout = case.layout
        self.case, self.dtype = case, case.dtype
        generator = torch.Generator().manual_seed(case.seed)
        lengths = [-(-(start + count) // layout.block_size) for start, count in case.spans]
        free = torch.randperm(sum(lengths) + 2, generator=generator).tolist()
        self.storage = KVStorage(layout, len(free), "cpu", dtype=case.dtype, poison=True)
        self.layer = layout.num_layers - 1
        self.keys, self.values = self.storage.layer(self.layer)
        heads, dim = layout.rank_heads, layout.head_dim

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(self.dtype)

        self.rows, self.qkv = [], []
        for (start, count), length in zip(case.spans, lengths, strict=True):
            table, free = [BlockId(b) for b in free[:length]], free[length:]
            gone = 0 if case.scoring.window is None else max(0, start - case.scoring.window + 1) // layout.block_size
            table[:gone] = [NO_BLOCK] * gone
            self.rows.append(Row([0] * count, start, table, True))
            for p in range(gone * layout.block_size, start):
                place = table[p // layout.block_size], slice(None), p % layout.block_size
                self.keys[place], self.values[place] = self.storage.format.pack(random(2, heads, dim))
            self.qkv.append(random(count, heads * (case.group + 2), dim))
        self.norms = (random(dim), random(dim)) if case.qk_norm else (None, None)
        self.frequencies = inverse_frequencies(dim, 10000.0)

    def run(self, rows: list[int]) -> list[torch.Tensor]:
        """Computes these rows in one batch; results in the same order."""
        batch = make_batch([self.rows[i] for i in rows], self.storage)
        qkv = torch.cat([self.qkv[i] for i in self._batch_order(rows)])
        angles = rope_angles(torch.arange(batch.num_positions), self.frequencies, self.dtype)
        assert batch.contexts is not None
        out = batch.contexts.attend(qkv, angles, self.storage.slots[self.layer], self.case.scoring, *self.norms, 1e-5)
        parts = out.split([len(self.qkv[i]) for i in self._batch_order(rows)])
        by_row = dict(zip(self._batch_order(rows), parts, strict=True))
        return [by_row[i] for i in rows]

    def check(self, row: int, got: torch.Tensor, atol: float) -> None:
        """Against the naive twins, which read the keys and values that the kernels wrote. First, last, some between."""
        plan, heads = self.rows[row], self.case.layout.rank_heads * self.case.group
        keys, values = self.storage.format.unpack(torch.stack((self.keys, self.values)))
        for i in {0, len(got) // 3, len(got) - 1}:
            q = self.qkv[row][i, :heads].double()
            if self.norms[0] is not None:
                q = reference.rms_norm(q, self.norms[0], 1e-5)
            q = reference.rope(q, plan.start + i, self.frequencies)
            where, how = (plan.block_ids, plan.start + i), self.case.scoring
            q = self.storage.format.turn(q)
            expected = reference.paged_attention(q[None], keys, values, *where, how.scale, how.softcap, how.window)
            expected = self.storage.format.turn(expected[0])
            torch.testing.assert_close(got[i].double(), expected, rtol=0, atol=atol)
        assert not got.isnan().any()

    def check_written(self, row: int, atol: float) -> None:
        """Up to the rounding of norm, rotation and turn, and so up to one step of the format; else to the bit."""
        plan, layout, stored = self.rows[row], self.case.layout, self.storage.format
        kv = self.qkv[row][:, layout.rank_heads * self.case.group :]
        for i, (k, v) in enumerate(zip(kv[:, : layout.rank_heads], kv[:, layout.rank_heads :], strict=True)):
            position = plan.start + i
            place = plan.block_ids[position // layout.block_size], slice(None), position % layout.block_size
            exact = k.double()
            if self.norms[1] is not None:
                exact = reference.rms_norm(exact, self.norms[1], 1e-5)
            exact = stored.turn(reference.rope(exact, position, self.frequencies)).double()
            written = torch.stack((self.keys[place], self.values[place]))
            keys, values = stored.unpack(written).double()
            step = {"int8": 1 / 120, "int4": 1 / 8, "fp8": 1 / 15, "bfloat16": 1 / 250}.get(layout.dtype, 0.0)
            torch.testing.assert_close(keys, exact, rtol=0, atol=atol + step * float(exact.abs().max()))
            turned = stored.turn(v.float())
            if stored.turned:
                torch.testing.assert_close(
                    values, turned.double(), rtol=0, atol=atol + 0.25 * float(turned.abs().max())
                )
            else:
                assert torch.equal(written[1], stored.pack(torch.stack((v, v)))[1])

    def _batch_order(self, rows: list[int]) -> list[int]:
        size = self.case.layout.block_size
        single = [i for i in rows if len(self.rows[i].token_ids) == 1]
        longer = [i for i in rows if len(self.rows[i].token_ids) > 1]
        single.sort(key=lambda i: -(-(self.rows[i].start + 1) // size), reverse=True)
        return single + sorted(longer, key=lambda i: self.rows[i].start == 0)


@settings(max_examples=40, deadline=None)
@example(
    Case(
        KVLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=3, dtype="float32"),
        100,
        [(130, 2)],
        False,
        1,
        Scoring(0.2),
    ),
    0,
    2,
)
@given(cases(), LEVELS, st.integers(1, 3))
def test_attention(case: Case, level: int, num_threads: int) -> None:
    """Wrong positions, blocks, heads or masks; NaN from unfilled slots; chunks merged wrongly or by two threads."""
    step, rows = Step(case), list(range(len(case.spans)))
    loose = step.dtype == torch.bfloat16
    with without_best(level), threads(num_threads):
        got = step.run(rows)
    for row in rows:
        step.check_written(row, 0.15 if loose else 1e-4)
        step.check(row, got[row], 0.08 if loose else 2e-5)


@settings(max_examples=25, deadline=None)
@given(cases(), LEVELS)
def test_a_row_is_the_same_in_every_batch_and_with_every_number_of_threads(case: Case, level: int) -> None:
    step, rows = Step(case), list(range(len(case.spans)))
    with without_best(level):
        with threads(1):
            alone = [step.run([row])[0] for row in rows]
        for num_threads in (1, 2, 3):
            with threads(num_threads):
                together = step.run(rows)
            assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stored", attention.FORMATS)
def test_a_prompt_gives_the_same_in_one_piece_in_pieces_and_token_by_token(
    stored: str, dtype: torch.dtype, window: int | None
) -> None:
    """Tiles, chunked prefill and decode are one computation: what is cached never shows in the result."""
    layout = KVLayout(num_layers=1, num_kv_heads=2, head_dim=64, block_size=16, dtype=stored)
    results = []
    for cuts in ([0, 270], [0, 7, 130, 270], [*range(271)]):
        step = Step(Case(layout, 3, [(0, 270)], True, 1, Scoring(0.125, 1.5, window), dtype))
        pieces = []
        whole, qkv = step.rows[0], step.qkv[0]
        for start, stop in itertools.pairwise(cuts):
            step.rows[0] = Row([0] * (stop - start), start, whole.block_ids, True)
            step.qkv[0] = qkv[start:stop]
            pieces += step.run([0])
        results.append(torch.cat(pieces))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("head_dim", [16, 64, 80, 256])
def test_int4_is_written_as_torch_writes_it(head_dim: int) -> None:
    """Blocks that one kind of worker wrote and the other reads. Turning these whole numbers rounds nothing."""
    layout = KVLayout(num_layers=1, num_kv_heads=2, head_dim=head_dim, block_size=16, dtype="int4")
    q = torch.zeros(40, 2, head_dim)
    kv = torch.randint(-50, 50, (40, 4, head_dim), generator=torch.Generator().manual_seed(1)).float()
    angles = torch.stack((torch.ones(40, 1, head_dim // 2), torch.zeros(40, 1, head_dim // 2)))
    for level in range(num_levels()):
        storage = KVStorage(layout, 3, "cpu", dtype=torch.float32, poison=True)
        with without_best(level):
            batch = make_batch([Row([0] * 40, 0, [BlockId(b) for b in range(3)], True)], storage)
            assert batch.contexts is not None
            batch.contexts.attend(torch.cat((q, kv), dim=1), angles, storage.slots[0], Scoring(1.0))
        expected = storage.format.pack(storage.format.turn(kv).transpose(0, 1))
        written = torch.stack(storage.layer(0)).permute(0, 2, 1, 3, 4).reshape(4, 48, -1)[:, :40]
        assert torch.equal(written, expected)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 9),
    width=st.sampled_from([8, 48, 576]),
    dtype=st.sampled_from(DTYPES),
    scale=st.sampled_from([1e-3, 1.0, 60.0]),
    level=LEVELS,
    num_threads=st.integers(1, 3),
)
def test_small_operations(
    rows: int, width: int, dtype: torch.dtype, scale: float, level: int, num_threads: int
) -> None:
    """Rows left out or done twice, lanes out of order, exponentials that overflow."""
    generator = torch.Generator().manual_seed(rows)
    x, delta, up = ((torch.randn(rows, width, generator=generator) * scale).to(dtype) for _ in range(3))
    weight = torch.randn(width, generator=generator).to(dtype)
    bound = {"rtol": 8e-3 if dtype == torch.bfloat16 else 1e-5, "atol": 1e-6}
    total = x + delta
    with without_best(level), threads(num_threads):
        torch.testing.assert_close(rms_norm(x, weight, 1e-6).double(), reference.rms_norm(x, weight, 1e-6), **bound)
        normed = add_norm_(x, delta, weight, 1e-6)
        products = [gated(torch.cat((delta, up), dim=1), name) for name in ("silu", "gelu_tanh")]
    assert torch.equal(x, total)
    torch.testing.assert_close(normed.double(), reference.rms_norm(total, weight, 1e-6), **bound)
    torch.testing.assert_close(products[0].double(), reference.silu_mul(delta, up), **bound)
    torch.testing.assert_close(products[1].double(), gelu_tanh(delta.double()) * up.double(), **bound)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 5),
    width=st.sampled_from([1, 7, 200, 512, 1009, 3000]),
    distinct=st.sampled_from([1, 3, 10_000]),
    dtype=st.sampled_from(DTYPES),
    level=LEVELS,
    num_threads=st.integers(1, 3),
)
def test_argmax_is_the_first_of_the_largest(
    rows: int, width: int, distinct: int, dtype: torch.dtype, level: int, num_threads: int
) -> None:
    """Of equal logits the lower id wins, on every machine: another choice would change a resumed answer."""
    generator = torch.Generator().manual_seed(rows * width)
    x = torch.randint(-distinct, distinct + 1, (rows, width), generator=generator).to(dtype)
    with without_best(level), threads(num_threads):
        values, ids = argmax(x)
        assert values == x.amax(dim=1).tolist()
        assert ids == [row.tolist().index(value) for row, value in zip(x, values, strict=True)]
        x[0, 0] = float("inf")
        x[rows - 1, width - 1] = float("nan")
        values, ids = argmax(x)
    assert math.isnan(values[-1])
    assert math.isinf(values[0]) or rows == 1


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 5),
    width=st.sampled_from([1, 7, 200, 4096, 4097, 9000]),
    steps=st.sampled_from([0, 2, 1000]),
    min_p=st.sampled_from([0.0, 0.01, 0.5, 1.0]),
    top_k=st.sampled_from([0, 1, 5, 100]),
    top_p=st.sampled_from([1.0, 0.95, 0.3, 1e-6]),
    temperature=st.sampled_from([0.5, 1.0, 3.0]),
    dtype=st.sampled_from(DTYPES),
    level=LEVELS,
    num_threads=st.integers(1, 3),
)
def test_draws_are_those_of_torch(
    rows: int, width: int, steps: int, level: int, dtype: torch.dtype, num_threads: int, **filters: Any
) -> None:
    """A worker with kernels and one without must draw the same; `steps`: few make equal logits at every border."""
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(rows * width)) * 3
    x = ((x * steps).round() / steps if steps else torch.zeros_like(x)).to(dtype)
    params = [SamplingParams(seed=2**63 + row, max_tokens=1, **filters) for row in range(rows)]
    key = SequenceKey(RequestId("r"), 1, 0)
    inputs = [SampleInput(key, of_row, 7, [], [], []) for of_row in params]
    with torch_alone():
        expected = [token.token_id for token in sample(x, inputs)]
    with without_best(level), threads(num_threads):
        assert [token.token_id for token in sample(x, inputs)] == expected


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_stays_so(dtype: torch.dtype) -> None:
    """A broken model must be noticed at its logits: NaN may not become a number on the way."""
    for level in range(num_levels()):
        with without_best(level):
            x = torch.ones(1, 64, dtype=dtype)
            x[0, 5] = float("nan")
            assert rms_norm(x, torch.ones(64, dtype=dtype), 1e-6).isnan().all()
            assert gated(x, "silu").isnan().sum() == 1
            big = torch.tensor([[-3e38, -100.0, 100.0, 3e38, 0, 0, 0, 0, *[1.0] * 8]], dtype=dtype)
            assert torch.equal(gated(big, "silu")[0, :5], torch.tensor([0.0, 0.0, 100.0, 3e38, 0.0], dtype=dtype))


def test_dtypes_and_widths_without_kernels_take_the_path_of_torch() -> None:
    assert not kernels_for(torch.ones(1, 64, dtype=torch.float16), 64)
    assert not kernels_for(torch.ones(1, 60), 60)
    assert not kernels_for(torch.ones(1, 64, device="meta"), 64)
    x, delta = torch.randn(3, 30), torch.randn(3, 30)
    expected = reference.rms_norm(x + delta, torch.ones(30), 1e-6)
    torch.testing.assert_close(add_norm_(x, delta, torch.ones(30), 1e-6).double(), expected, rtol=1e-5, atol=1e-6)
    with torch_alone():
        assert not kernels_for(torch.ones(1, 64), 64)
