"""Packed linears against float64, for every instruction set, and rows that know nothing of each other."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvferry.kernels import reference
from kvferry.kernels.cpu.available import library
from kvferry.kernels.linear import PackedLinear
from tests.support.kernels import num_levels, threads, torch_alone, without_best

pytestmark = pytest.mark.skipif(library() is None, reason="the CPU kernels are not built or are turned off")
DTYPES = [torch.float32, torch.bfloat16]
EPS = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-8}
LEVELS = st.integers(0, num_levels() - 1)


def numbers(*shape: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check(got: torch.Tensor, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> None:
    """Within the result's rounding and that of float32 sums."""
    expected = reference.linear(x, w, b)
    bound = EPS[x.dtype] * expected.abs() + 2.0**-20 * (x.double().abs() @ w.double().abs().T) + 1e-6
    assert got.dtype == x.dtype
    assert bool(((got.double() - expected).abs() <= bound).all())


@settings(max_examples=80, deadline=None)
@example(rows=200, outputs=33, inputs=578, dtype=torch.bfloat16, bias=True, level=0, num_threads=3, seed=1)
@given(
    rows=st.sampled_from([0, 1, 2, 5, 6, 7, 12, 13, 33, 97]),
    outputs=st.sampled_from([1, 7, 16, 31, 32, 40, 64, 200]),
    inputs=st.sampled_from([2, 6, 14, 64, 130, 576]),
    dtype=st.sampled_from(DTYPES),
    bias=st.booleans(),
    level=LEVELS,
    num_threads=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
def test_any_shape(
    rows: int, outputs: int, inputs: int, dtype: torch.dtype, bias: bool, level: int, num_threads: int, seed: int
) -> None:
    """Tails of rows, outputs or inputs left out, computed twice or written behind the end; panels mixed up."""
    x, w = numbers(rows, inputs, seed=seed, dtype=dtype), numbers(outputs, inputs, seed=seed + 1, dtype=dtype)
    b = numbers(outputs, seed=seed + 2, dtype=dtype) if bias else None
    with without_best(level), threads(num_threads):
        linear = PackedLinear(w, b)
        assert linear.packed is not None
        got = linear(x)
    check(got, x, w, b)


@pytest.mark.parametrize("level", range(num_levels()))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), [(100, 96), (64, 2048), (40, 1536)])
def test_a_row_does_not_see_the_others(level: int, dtype: torch.dtype, outputs: int, inputs: int) -> None:
    """A prompt in pieces, a resumed answer, other neighbours or threads: bits must not change for that."""
    x = numbers(200, inputs, seed=2, dtype=dtype)
    with without_best(level):
        linear = PackedLinear(numbers(outputs, inputs, seed=1, dtype=dtype))
        with threads(1):
            alone = torch.cat([linear(row[None]) for row in x])
        for rows in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 64, 97, 200):
            for num_threads in (1, 2, 3):
                with threads(num_threads):
                    assert torch.equal(linear(x[-rows:]), alone[-rows:]), (rows, num_threads)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_weight_packed_once_serves_every_instruction_set(dtype: torch.dtype) -> None:
    """An order of lanes that only the machine reads that wrote it."""
    x, w = numbers(9, 70, seed=3, dtype=dtype), numbers(72, 70, seed=4, dtype=dtype)
    linear = PackedLinear(w)
    for level in range(num_levels()):
        with without_best(level):
            check(linear(x), x, w, None)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_a_wider_tensor(dtype: torch.dtype) -> None:
    """Strides taken for widths; odd ones, between which pairs of bfloat16 do not fit."""
    w = numbers(48, 64, seed=5, dtype=dtype)
    linear = PackedLinear(w)
    for width in (64, 65, 80):
        wide = numbers(7, width, seed=6, dtype=dtype)
        for x in (wide[:, :64], wide[::2, -64:], wide[:, :64].T.contiguous().T):
            check(linear(x), x, w, None)


@pytest.mark.parametrize("level", range(num_levels()))
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_stays_so(level: int, dtype: torch.dtype) -> None:
    """A broken model must be noticed, in its own rows only; infinity is no reason to spoil others."""
    x, w = numbers(15, 64, seed=7, dtype=dtype), numbers(40, 64, seed=8, dtype=dtype)
    x[3, 5], x[14, 63], w[7, 1] = float("nan"), float("inf"), float("nan")
    with without_best(level):
        got = PackedLinear(w)(x)
    broken = torch.zeros(15, 40, dtype=torch.bool)
    broken[3], broken[14], broken[:, 7] = True, True, True
    assert torch.equal(~got.isfinite(), broken)


def test_odd_widths_and_other_dtypes_are_left_to_torch() -> None:
    """A pair of bfloat16 across two rows."""
    for dtype, inputs in ((torch.bfloat16, 33), (torch.float16, 32), (torch.float64, 32)):
        x, w = numbers(3, inputs, seed=9, dtype=dtype), numbers(24, inputs, seed=10, dtype=dtype)
        linear = PackedLinear(w, w[:, 0])
        assert linear.packed is None
        torch.testing.assert_close(linear(x).double(), reference.linear(x, w, w[:, 0]), rtol=2e-2, atol=6e-2)
    with torch_alone():
        assert PackedLinear(torch.ones(8, 8)).packed is None
