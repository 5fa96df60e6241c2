"""Linears of 8 and 4 bits against float64, within what their steps imply; and rows that know nothing of each other."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.kernels import reference
from kvferry.kernels.cpu.available import library
from kvferry.kernels.linear import PackedLinear, make_linear
from kvferry.kernels.packing import GROUP, Quantization, fits
from kvferry.kernels.quantized import QuantizedLinear
from tests.support.kernels import num_levels, threads, without_best

pytestmark = pytest.mark.skipif(library() is None, reason="the CPU kernels are not built or are turned off")
EPS = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8}
KINDS: list[Quantization] = ["int8", "int4"]


def numbers(rows: int, width: int, scale: float, seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Normal, with a few far out, as activations have them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=generator) * scale
    x[:, seed % width] *= 20
    return x.to(dtype)


def int8_bound(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Half a step of each factor, times the other one."""
    x, w = x.double().abs(), w.double().abs()
    of_x, of_w = x.amax(1, keepdim=True) / 254, w.amax(1) / 254
    return x.sum(1, keepdim=True) * of_w + of_x * w.sum(1) + x.shape[1] * of_x * of_w


def int4_bound(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Half a step of each factor, times the other one; a weight's scale and middle are rounded to bfloat16."""
    x, groups = x.double().abs(), w.double().view(len(w), -1, GROUP)
    rows = x.view(len(x), x.shape[1] // GROUP, GROUP)
    least, most = groups.amin(-1), groups.amax(-1)
    step, middle = (most - least) / 15, (most + least).abs() / 2
    of_w = (0.57 * step + 2.0**-8 * middle).repeat_interleave(GROUP, dim=1)
    of_x = (rows.amax(-1) / 254).repeat_interleave(GROUP, dim=1)
    return x @ of_w.T + of_x @ (w.double().abs() + of_w).T


@settings(max_examples=80, deadline=None)
@given(
    rows=st.sampled_from([0, 1, 2, 5, 8, 13, 33, 97]),
    outputs=st.sampled_from([1, 31, 64, 100]),
    inputs=st.sampled_from([32, 96, 576]),
    scale=st.sampled_from([1e-2, 1.0, 50.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    bias=st.booleans(),
    kind=st.sampled_from(KINDS),
    level=st.integers(0, num_levels() - 1),
    num_threads=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
def test_within_the_steps(
    rows: int,
    outputs: int,
    inputs: int,
    scale: float,
    dtype: torch.dtype,
    bias: bool,
    kind: Quantization,
    level: int,
    num_threads: int,
    seed: int,
) -> None:
    """Scales of another row or group, a middle forgotten, nibbles swapped, a bias that is scaled."""
    x, w = numbers(rows, inputs, scale, seed, dtype), numbers(outputs, inputs, 0.05, seed + 1, dtype)
    b = numbers(1, outputs, 1.0, seed + 2, dtype)[0] if bias else None
    linear = make_linear(w, b, kind)
    with without_best(level), threads(num_threads):
        got = linear(x)
    expected = reference.linear(x, w, b)
    bound = int8_bound(x, w) if kind == "int8" else int4_bound(x, w)
    bound += EPS[dtype] * expected.abs() + 2.0**-20 * (x.double().abs() @ w.double().abs().T) + 1e-6
    assert got.dtype == dtype
    assert bool(((got.double() - expected).abs() <= bound).all())


@pytest.mark.parametrize("form", ["int8", "fine", "int4"])
@pytest.mark.parametrize("level", range(num_levels()))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_instruction_set_computes_what_the_twin_does(form: str, level: int, dtype: torch.dtype) -> None:
    """Lanes in another order, on a machine that nobody tests on; sums of products that overflow 16 bits."""
    inputs = 128 if form == "int4" else 103
    x, w, b = (
        numbers(*shape, dtype=dtype) for shape in ((27, inputs, 2.0, 12), (75, inputs, 0.1, 13), (1, 75, 1.0, 14))
    )
    x[1], x[2], w[0], w[1] = 3.0, -3.0, 0.1, -0.1  # all at the ends of their range
    if form == "int4":
        linear, expected = make_linear(w, b[0], "int4"), reference.linear_int4(x, w, b[0])
    else:
        fine = form == "fine"
        linear, expected = make_linear(w, b[0], "int8", fine), reference.linear_int8(x, w, b[0], fine)
    with without_best(level):
        got = linear(x).double()
    of_step = w.double().abs().sum(1) * (x.double().abs().amax(1, keepdim=True) / 127)
    halfway = (
        1.01 * x.double().abs().amax(1, keepdim=True) * (w.double().abs().amax(1) / 127)
    )  # a weight rounded otherwise
    bound = (2e-4 if form == "fine" else 0.02) * of_step + halfway + 2 * EPS[dtype] * expected.abs()
    assert bool(((got - expected).abs() <= bound).all())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("outputs", "inputs"), [(100, 576), (64, 1536)])
def test_a_row_does_not_see_the_others(kind: Quantization, dtype: torch.dtype, outputs: int, inputs: int) -> None:
    """A resumed answer meets other neighbours than before: its tokens must not change for that."""
    x = numbers(130, inputs, 1.0, 2, dtype)
    for fine in (False, True):
        linear = make_linear(numbers(outputs, inputs, 0.05, 1, dtype), None, kind, fine)
        for level in range(num_levels()):
            with without_best(level):
                with threads(1):
                    alone = torch.cat([linear(row[None]) for row in x])
                for rows in (*range(2, 14), 64, 97, 130):
                    for num_threads in (1, 2, 3):
                        with threads(num_threads):
                            assert torch.equal(linear(x[-rows:]), alone[-rows:]), (fine, level, rows, num_threads)


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_of_a_rank_are_those_of_the_whole(kind: Quantization) -> None:
    """Groups of unequal size would compute unequal values of the same head."""
    w, x = numbers(384, 256, 0.05, 3, torch.bfloat16), numbers(9, 256, 1.0, 4, torch.bfloat16)
    whole = make_linear(w, None, kind)(x)
    for size in (1, 2, 3):
        parts = [make_linear(part.contiguous(), None, kind)(x) for part in w.chunk(size)]
        assert torch.equal(torch.cat(parts, dim=1), whole)


def test_inputs_of_a_rank() -> None:
    """int4's groups are the same on any number of ranks; int8's scales become those of the rank's own inputs."""
    w, x = numbers(64, 256, 0.05, 5, torch.float32), numbers(9, 256, 1.0, 6, torch.float32)
    exact = reference.linear(x, w, None)
    halves = [(wi.contiguous(), xi.contiguous()) for wi, xi in zip(w.chunk(2, 1), x.chunk(2, 1), strict=True)]
    four = sum(make_linear(wi, None, "int4")(xi) for wi, xi in halves)
    assert isinstance(four, torch.Tensor)
    torch.testing.assert_close(four, make_linear(w, None, "int4")(x), rtol=1e-4, atol=1e-4)
    eight = sum(make_linear(wi, None, "int8")(xi).double() for wi, xi in halves)
    assert bool(((eight - exact).abs() <= sum(int8_bound(xi, wi) for wi, xi in halves) + 1e-4).all())


def test_what_has_no_fitting_shape_stays_as_it_is() -> None:
    """An operation that reads behind a weight's end, or a model that cannot be loaded for one odd linear."""
    assert not fits("int4", 48)
    w, x = numbers(96, 48, 0.05, 7, torch.float32), numbers(3, 48, 1.0, 8, torch.float32)
    linear = make_linear(w, None, "int4")
    assert isinstance(linear, PackedLinear)
    torch.testing.assert_close(linear(x), x @ w.T)
    odd = make_linear(w[:, :45].contiguous(), None, "int8")
    assert isinstance(odd, QuantizedLinear)
    assert bool(((odd(x[:, :45]) - x[:, :45] @ w[:, :45].T).abs() <= int8_bound(x, w) + 1e-5).all())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fine", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strange_rows(dtype: torch.dtype, fine: bool, kind: Quantization) -> None:
    """A row of zeros divides by zero; NaN and infinity become ordinary numbers, and a broken model goes on."""
    linear = make_linear(numbers(64, 64, 0.05, 9, dtype), None, kind, fine)
    x = torch.randn(4, 64).to(dtype)
    x[0], x[1, 3], x[2, 5] = 0, float("nan"), float("inf")
    for level in range(num_levels()):
        with without_best(level):
            got = linear(x)
        assert bool((got[0] == 0).all())
        assert not bool(got[1:3].isfinite().any())
        assert bool(got[3].isfinite().all())


def test_fine_inputs_leave_the_weights_alone_to_blame() -> None:
    """The rest of a row with the scale of another one."""
    x, w = numbers(9, 576, 1.0, 15, torch.float32), numbers(192, 576, 0.05, 16, torch.float32)
    fine = make_linear(w, w[:, 0], "int8", fine=True)
    of_weights = x.double().abs().sum(1, keepdim=True) * (w.double().abs().amax(1) / 254)
    assert bool(((fine(x).double() - reference.linear(x, w, w[:, 0])).abs() <= 1.01 * of_weights + 1e-5).all())


def test_weights_of_one_value() -> None:
    """A group without a range divides by zero."""
    x = numbers(2, 64, 1.0, 10, torch.float32)
    for value in (0.0, 0.5):
        w = torch.full((64, 64), value)
        got = make_linear(w, None, "int4")(x)
        assert bool(((got - reference.linear(x, w, None)).abs() <= int4_bound(x, w) + 1e-5).all())
