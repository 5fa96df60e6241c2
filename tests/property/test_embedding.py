"""Embeddings read out of a packed head against the table's rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvferry.kernels.cpu.available import library
from kvferry.kernels.cpu.linear import Packed
from kvferry.kernels.embedding import Embedding
from kvferry.kernels.linear import make_linear
from kvferry.kernels.packing import Quantization
from tests.support.kernels import num_levels, threads, torch_alone, without_best

pytestmark = pytest.mark.skipif(library() is None, reason="the CPU kernels are not built or are turned off")
DTYPES = [torch.float32, torch.bfloat16]


def table_of(vocab: int, width: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(vocab, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


@settings(max_examples=80, deadline=None)
@example(vocab=33, width=576, rows=300, dtype=torch.bfloat16, scale=1.0, level=0, num_threads=3, seed=1)
@given(
    vocab=st.sampled_from([1, 31, 32, 33, 64, 100]),
    width=st.sampled_from([8, 24, 64, 136, 576]),
    rows=st.sampled_from([0, 1, 2, 7, 70]),
    dtype=st.sampled_from(DTYPES),
    scale=st.sampled_from([1.0, 24.0]),
    level=st.integers(0, num_levels() - 1),
    num_threads=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
def test_a_packed_head_gives_the_tables_rows(
    vocab: int, width: int, rows: int, dtype: torch.dtype, scale: float, level: int, num_threads: int, seed: int
) -> None:
    """A neighbour's row, units in another order, rows of the last panel or of other threads left out."""
    table = table_of(vocab, width, dtype, seed)
    token_ids = torch.randint(0, vocab, (rows,), generator=torch.Generator().manual_seed(seed))
    with without_best(level), threads(num_threads):
        embedding = Embedding(table, scale, make_linear(table))
        assert isinstance(embedding.table, Packed)
        got = embedding(token_ids)
    assert got.dtype == dtype
    assert torch.equal(got, Embedding(table, scale)(token_ids))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("token", [-1, 40, 63, 64, 1 << 40])
def test_tokens_that_are_not_there_become_nan(dtype: torch.dtype, token: int) -> None:
    """Zeros that fill up the last panel, or memory behind it, taken for an embedding."""
    table = table_of(40, 64, dtype)
    got = Embedding(table, 1.0, make_linear(table))(torch.tensor([39, token]))
    assert torch.equal(got[0], table[39])
    assert bool(got[1].isnan().all())


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_quantised_head_is_no_table(quantization: Quantization) -> None:
    """Embeddings rounded to 4 bits."""
    table = table_of(40, 64, torch.bfloat16)
    assert Embedding(table, 1.0, make_linear(table, None, quantization, fine=True)).table is table


def test_without_kernels_there_is_one_table() -> None:
    """A linear that shares the table's memory, asked for what it packed."""
    table = table_of(40, 64, torch.bfloat16)
    with torch_alone():
        assert Embedding(table, 1.0, make_linear(table)).table is table
    narrow = table_of(40, 12, torch.bfloat16)
    assert Embedding(narrow, 1.0, make_linear(narrow)).table is narrow, "no multiple of two vectors"
