"""Linears of 8 and 4 bits against float64, within what their steps imply; and rows that know nothing of each other."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.kernels import reference
from kvferry.kernels.linear import PackedLinear, make_linear
from kvferry.kernels.packing import GROUP, Quantization, fits
from kvferry.kernels.quantized import Int4Linear, Int8Linear, can_quantize, quantize_rows
from tests.support.kernels import num_levels, torch_alone, without_best

pytestmark = pytest.mark.skipif(
    not (can_quantize("int8") and can_quantize("int4")), reason="this CPU, or this torch, lacks the operations"
)
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


def int4_bound(x: torch.Tensor, w: torch.Tensor, eps: float) -> torch.Tensor:
    """Half a step; scale and zero are rounded to bfloat16, and the product's weight to the dtype."""
    groups = w.double().view(len(w), -1, GROUP)
    least, most = groups.amin(-1), groups.amax(-1)
    step, zero = (most - least) / 15, (most + least).abs() / 2
    each = (0.57 * step + 2.0**-8 * zero + eps * groups.abs().amax(-1)).repeat_interleave(GROUP, dim=1)
    return x.double().abs() @ each.T


@settings(max_examples=60, deadline=None)
@given(
    rows=st.sampled_from([1, 2, 5, 16, 33]),
    outputs=st.sampled_from([64, 192]),
    inputs=st.sampled_from([32, 96, 576]),
    scale=st.sampled_from([1e-2, 1.0, 50.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    bias=st.booleans(),
    kind=st.sampled_from(KINDS),
    alone=st.booleans(),
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
    alone: bool,
    seed: int,
) -> None:
    """Scales of another row or group, a zero point forgotten, nibbles swapped, a bias that is scaled."""
    x, w = numbers(rows, inputs, scale, seed, dtype), numbers(outputs, inputs, 0.05, seed + 1, dtype)
    b = numbers(1, outputs, 1.0, seed + 2, dtype)[0] if bias else None
    linear = make_linear(w, b, kind)
    if alone:
        with torch_alone():
            got = linear(x)
    else:
        got = linear(x)
    expected = reference.linear(x, w, b)
    bound = int8_bound(x, w) if kind == "int8" else int4_bound(x, w, EPS[dtype])
    bound += EPS[dtype] * (expected.abs() + (x.double().abs() @ w.double().abs().T) / 16) + 1e-6
    assert got.dtype == dtype
    assert bool(((got.double() - expected).abs() <= bound).all())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("outputs", "inputs"), [(960, 576), (576, 1536), (4096, 64)])
def test_a_row_does_not_see_the_others(kind: Quantization, dtype: torch.dtype, outputs: int, inputs: int) -> None:
    """A resumed answer meets other neighbours than before: its tokens must not change for that."""
    linear = make_linear(numbers(outputs, inputs, 0.05, 1, dtype), None, kind)
    x = numbers(67, inputs, 1.0, 2, dtype)
    whole = linear(x)
    for size in (1, 2, 3, 8, 16, 48):
        for first in range(0, 64 - size, 13):
            assert torch.equal(linear(x[first : first + size]), whole[first : first + size]), (size, first)


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
    four = sum(Int4Linear(wi)(xi) for wi, xi in halves)
    assert isinstance(four, torch.Tensor)
    torch.testing.assert_close(four, Int4Linear(w)(x), rtol=1e-4, atol=1e-4)
    eight = sum(Int8Linear(wi)(xi).double() for wi, xi in halves)
    assert bool(((eight - exact).abs() <= sum(int8_bound(xi, wi) for wi, xi in halves) + 1e-4).all())


def test_what_has_no_fitting_shape_stays_as_it_is() -> None:
    """An operation that reads behind a weight's end, or a model that cannot be loaded for one odd linear."""
    assert not fits("int4", 64, 48)
    assert not fits("int4", 96, 64)
    w, x = numbers(96, 48, 0.05, 7, torch.float32), numbers(3, 48, 1.0, 8, torch.float32)
    linear = make_linear(w, None, "int4")
    assert isinstance(linear, PackedLinear)
    torch.testing.assert_close(linear(x), x @ w.T)
    odd = make_linear(w[:, :45].contiguous(), None, "int8")
    assert isinstance(odd, Int8Linear)
    assert bool(((odd(x[:, :45]) - x[:, :45] @ w[:, :45].T).abs() <= int8_bound(x, w) + 1e-5).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strange_rows(dtype: torch.dtype) -> None:
    """A row of zeros divides by zero; NaN and infinity become ordinary numbers, and a broken model goes on."""
    linear = Int8Linear(numbers(64, 64, 0.05, 9, dtype))
    x = torch.randn(4, 64).to(dtype)
    x[0], x[1, 3], x[2, 5] = 0, float("nan"), float("inf")
    for got in (linear(x), _alone(linear, x)):
        assert bool((got[0] == 0).all())
        assert not bool(got[1:3].isfinite().any())
        assert bool(got[3].isfinite().all())


def _alone(linear: Int8Linear, x: torch.Tensor) -> torch.Tensor:
    with torch_alone():
        return linear(x)


def test_fine_inputs_leave_the_weights_alone_to_blame() -> None:
    """The rest of a row with the scale of the row itself, or of another one."""
    x, w = numbers(9, 576, 1.0, 15, torch.float32), numbers(192, 576, 0.05, 16, torch.float32)
    fine = Int8Linear(w, w[:, 0], fine=True)
    of_weights = x.double().abs().sum(1, keepdim=True) * (w.double().abs().amax(1) / 254)
    assert bool(((fine(x).double() - reference.linear(x, w, w[:, 0])).abs() <= 1.01 * of_weights + 1e-5).all())
    assert torch.equal(fine(x[2:4]), fine(x)[2:4])


def test_weights_of_one_value() -> None:
    """A group without a range divides by zero."""
    x = numbers(2, 64, 1.0, 10, torch.float32)
    for value in (0.0, 0.5):
        got = Int4Linear(torch.full((64, 64), value))(x)
        torch.testing.assert_close(got, x.sum(1, keepdim=True).expand(2, 64) * value, rtol=1e-3, atol=1e-3)


def test_rows_are_rounded_to_the_nearest_step() -> None:
    """Truncation would double the error."""
    x = numbers(5, 96, 3.0, 11, torch.float32)
    steps, scales = quantize_rows(x)
    assert bool((((steps.float() - 128) * scales - x).abs() <= scales * 0.5001).all())


@pytest.mark.parametrize("level", range(num_levels()))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_instruction_set_rounds_alike(level: int, dtype: torch.dtype) -> None:
    """Lanes in another order, on a machine that nobody tests on; a tail left out."""
    x, w, bias = (numbers(*shape, dtype=dtype) for shape in ((7, 104, 2.0, 12), (72, 104, 0.1, 13), (1, 72, 1.0, 14)))
    linear = Int8Linear(w, bias[0])
    expected = _alone(linear, x)
    with without_best(level):
        got = linear(x)
    steps = w.double().abs().sum(1) * (x.double().abs().amax(1, keepdim=True) / 127)
    assert bool(((got.double() - expected.double()).abs() <= 0.02 * steps + 2 * EPS[dtype] * expected.abs()).all())
