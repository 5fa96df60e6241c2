"""The operations made of torch's against their naive float64 twins, with NaN in every slot that no token has filled."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.kernels import reference
from kvferry.kernels.activation import gated
from kvferry.kernels.attention import Scoring, causal_attention
from kvferry.kernels.linear import PackedLinear
from kvferry.kernels.norm import add_norm_, rms_norm
from kvferry.kernels.rope import apply_rope_, inverse_frequencies, rope_angles, scale_llama3
from kvferry.runtime.ids import NO_BLOCK, BlockId
from kvferry.runtime.kv.layout import FORMATS, KVLayout
from kvferry.runtime.kv.storage import KVStorage
from kvferry.runtime.model.batch import Batch, make_batch
from kvferry.runtime.model.layers import Attention
from kvferry.runtime.step import Row
from tests.support.kernels import torch_alone

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-2}


@st.composite
def batches(draw: st.DrawFn) -> tuple[KVStorage, list[Row], int, Scoring, int]:
    """Rows over a poisoned pool with scattered blocks; some of them behind one shared prefix.

    Blocks before the window are given back, as far as no other row shares them.
    """
    block_size = draw(st.sampled_from([1, 3, 16]))
    kv_heads, group = draw(st.sampled_from([(1, 1), (1, 4), (2, 1), (3, 3)]))
    scoring = draw(scorings())
    layout = KVLayout(
        num_layers=draw(st.integers(1, 2)),
        num_kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([8, 64])),
        block_size=block_size,
        dtype=draw(st.sampled_from(list(FORMATS))),
    )
    computed = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    spans = draw(
        st.lists(st.tuples(st.integers(0, 40), st.sampled_from([1, 1, 1, 2, 9]), st.booleans()), min_size=1, max_size=7)
    )
    num_blocks = sum(-(-(start + count) // block_size) for start, count, _ in spans)
    free = draw(st.permutations(range(num_blocks + 2)))
    shared: list[BlockId] = []
    rows = []
    for start, count, shares in spans:
        length = -(-(start + count) // block_size)
        table = [BlockId(b) for b in free[:length]]
        free = free[length:]
        common = min(start // block_size, len(shared)) if shares else 0
        table[:common] = shared[:common]
        shared = shared if common else table[: start // block_size]
        rows.append(Row([0] * count, start, table, draw(st.booleans())))
    storage = KVStorage(layout, num_blocks + 2, "cpu", dtype=computed, poison=True)
    return storage, rows, group, scoring, draw(st.integers(0, 1000))


@st.composite
def scorings(draw: st.DrawFn) -> Scoring:
    return Scoring(
        scale=draw(st.sampled_from([0.125, 0.05])),
        softcap=draw(st.sampled_from([None, 1.5])),
        window=draw(st.sampled_from([None, None, 1, 2, 16, 17, 1000])),
    )


def given_back(row: Row, block_size: int, window: int | None) -> Row:
    """The row with nothing in its table before what its first token sees."""
    gone = 0 if window is None else max(0, row.start - window + 1) // block_size
    return Row(row.token_ids, row.start, [NO_BLOCK] * gone + row.block_ids[gone:], row.num_samples)


def places(row: Row, block_size: int, stop: int) -> list[tuple[BlockId, int]]:
    return [(row.block_ids[p // block_size], p % block_size) for p in range(stop)]


@settings(max_examples=200, deadline=None)
@given(batches())
def test_attention(case: tuple[KVStorage, list[Row], int, Scoring, int]) -> None:
    """Wrong masks, padding that leaks, NaN from unused slots, rows that read another row's or no block."""
    storage, rows, group, scoring, seed = case
    layout, generator = storage.layout, torch.Generator().manual_seed(seed)
    dtype, heads, layer = storage.format.dtype, layout.rank_heads, layout.num_layers - 1
    k_cache, v_cache = storage.layer(layer)
    for row in rows:  # what earlier steps have written
        for block, slot in places(row, layout.block_size, row.start):
            random = torch.randn(2, heads, layout.head_dim, generator=generator).to(dtype)
            k_cache[block, :, slot], v_cache[block, :, slot] = storage.format.pack(random)
    rows = [given_back(row, layout.block_size, scoring.window) for row in rows]
    with torch_alone():
        batch = make_batch(rows, storage)
    num_tokens = len(batch.token_ids)
    q = torch.randn(num_tokens, heads * group, layout.head_dim, generator=generator).to(dtype)
    kv = torch.randn(num_tokens, 2 * heads, layout.head_dim, generator=generator).to(dtype)
    got = attend(batch, storage, layer, scoring, q, kv)
    k_cache, v_cache = storage.format.unpack(torch.stack((k_cache, v_cache)))
    q = storage.format.turn(q)
    assert not got.isnan().any()
    done, score = 0, (scoring.scale, scoring.softcap, scoring.window)
    for row in tokens_in_batch_order(rows, layout.block_size):
        mine = slice(done, done + len(row.token_ids))
        done = mine.stop
        assert batch.positions[mine].tolist() == list(range(row.start, row.start + len(row.token_ids)))
        expected = reference.paged_attention(q[mine], k_cache, v_cache, row.block_ids, row.start, *score)
        expected = storage.format.turn(expected)
        torch.testing.assert_close(got[mine].double(), expected, rtol=0, atol=TOLERANCE[dtype])
    assert len(batch.sample_index) == sum(row.num_samples for row in rows)


def attend(
    batch: Batch, storage: KVStorage, layer: int, scoring: Scoring, q: torch.Tensor, kv: torch.Tensor
) -> torch.Tensor:
    """As a decoder's layer does."""
    layout = storage.layout
    nothing = PackedLinear(torch.zeros(0, 0))
    heads = q.shape[1], layout.rank_heads, layout.head_dim
    attention = Attention(nothing, nothing, None, None, *heads, 0, scoring)
    angles = torch.stack((torch.ones(len(q), 1, heads[2] // 2), torch.zeros(len(q), 1, heads[2] // 2))).to(q.dtype)
    qkv = torch.cat((q, kv), dim=1)
    return attention._gathered(qkv, angles, batch, storage.slots[layer], storage.spans[layer])


def tokens_in_batch_order(rows: list[Row], block_size: int) -> list[Row]:
    def num_blocks(row: Row) -> int:
        return -(-(row.start + 1) // block_size)

    decode = sorted((row for row in rows if len(row.token_ids) == 1), key=lambda row: -num_blocks(row))
    longer = [row for row in rows if len(row.token_ids) > 1]
    return [*decode, *[row for row in longer if row.start], *[row for row in longer if not row.start]]


@pytest.mark.parametrize("window", [None, 1, 50, 100])
@pytest.mark.parametrize(("count", "start"), [(63, 0), (64, 3), (65, 0), (129, 40)])
def test_long_prefill(count: int, start: int, window: int | None) -> None:
    """Queries are scored in chunks; a chunk must see all keys before it that are in the window, and none behind."""
    generator = torch.Generator().manual_seed(count)
    q = torch.randn(count, 4, 8, generator=generator)
    k, v = torch.full((2, 2, 192, 8), float("nan"))
    k[:, : start + count] = torch.randn(2, start + count, 8, generator=generator)
    v[:, : start + count] = torch.randn(2, start + count, 8, generator=generator)
    got = causal_attention(q, k, v, start, Scoring(0.3, None, window))
    expected = reference.paged_attention(q, k[None], v[None], [0], start, 0.3, None, window)
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=1e-5)


def test_similar_lengths_share_a_call_and_outliers_do_not() -> None:
    """One long context must not make all others as expensive as itself."""
    layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=16, dtype="float32")
    contexts = [4000, *[300 + 10 * i for i in range(15)]]
    rows, used = [], 0
    for context in contexts:
        count = -(-context // 16)
        rows.append(Row([0], context - 1, [BlockId(b) for b in range(used, used + count)], True))
        used += count
    with torch_alone():
        batch = make_batch(rows, KVStorage(layout, used, "cpu"))
    assert [part.tokens for part in batch.gathers.parts(None).decode] == [slice(0, 1), slice(1, 16)]
    (part,) = batch.gathers.parts(100).decode  # a window makes all alike
    assert part.rows.mask.shape == (16, 1, 8 * 16)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 5),
    width=st.sampled_from([8, 33, 576]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    scale=st.sampled_from([1e-3, 1.0, 100.0]),
    seed=st.integers(0, 100),
)
def test_small_operations(rows: int, width: int, dtype: torch.dtype, scale: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(rows, width, generator=generator) * scale).to(dtype)
    weight = torch.randn(width, generator=generator).to(dtype)
    bound: dict[str, Any] = {"rtol": 2e-2 if dtype == torch.bfloat16 else 1e-5, "atol": 1e-6}
    with torch_alone():
        normed, total, product = rms_norm(x, weight, 1e-6), x.clone(), gated(torch.cat((x, x.flip(0)), dim=1), "silu")
        of_sum = add_norm_(total, x, weight, 1e-6)
    torch.testing.assert_close(normed.double(), reference.rms_norm(x, weight, 1e-6), **bound)
    assert torch.equal(total, x + x)
    torch.testing.assert_close(of_sum.double(), reference.rms_norm(total, weight, 1e-6), **bound)
    torch.testing.assert_close(product.double(), reference.silu_mul(x, x.flip(0)), **bound)
    matrix = torch.randn(24, width, generator=generator).to(dtype)
    for bias in (None, torch.randn(24, generator=generator).to(dtype)):
        expected = reference.linear(x, matrix, bias)
        atol = TOLERANCE[dtype] * float(expected.abs().max())
        torch.testing.assert_close(PackedLinear(matrix, bias)(x).double(), expected, rtol=0, atol=atol)


@settings(max_examples=30, deadline=None)
@given(positions=st.lists(st.integers(0, 100_000), min_size=1, max_size=4), head_dim=st.sampled_from([2, 8, 64]))
def test_rope(positions: list[int], head_dim: int) -> None:
    """Also far positions, where angles lose their digits first."""
    frequencies = inverse_frequencies(head_dim, 10000.0)
    x = torch.randn(len(positions), 3, head_dim, generator=torch.Generator().manual_seed(1))
    got = x.clone()
    apply_rope_(got, rope_angles(torch.tensor(positions), frequencies, torch.float32))
    for i, position in enumerate(positions):
        expected = reference.rope(x[i], position, frequencies)
        torch.testing.assert_close(got[i].double(), expected, rtol=0, atol=1e-5 + position * 4e-7)


def test_llama3_scaling_keeps_short_waves_and_slows_long_ones() -> None:
    frequencies = inverse_frequencies(128, 500_000.0)
    scaled = scale_llama3(frequencies, 8.0, 1.0, 4.0, 8192)
    ratio = (scaled / frequencies).numpy()
    assert ratio[0] == 1.0
    assert ratio[-1] == pytest.approx(1 / 8)
    assert (np.diff(ratio) <= 1e-6).all()
