"""Guards against samplers whose filters differ from their definition or whose rows see each other."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from kvferry.runtime.errors import DeviceError
from kvferry.runtime.ids import RequestId, SequenceKey
from kvferry.runtime.model.philox import Draw, gumbel
from kvferry.runtime.model.sampler import sample
from kvferry.runtime.request import SamplingParams
from kvferry.runtime.step import SampleInput
from tests.support.kernels import torch_alone

VOCAB = 50


@pytest.fixture(autouse=True, params=["kernels", "torch"])
def computed_by(request: pytest.FixtureRequest) -> Iterator[None]:
    """Both ways to draw have to do the same."""
    with torch_alone() if request.param == "torch" else contextlib.nullcontext():
        yield


def one(
    position: int = 0,
    prompt: tuple[int, ...] = (),
    output: tuple[int, ...] = (),
    banned: tuple[int, ...] = (),
    index: int = 0,
    **params: Any,
) -> SampleInput:
    sampling = SamplingParams(**{"temperature": 0.0, "seed": 1, "max_tokens": 1000} | params)
    key = SequenceKey(RequestId("r"), index, 0)
    return SampleInput(key, sampling, position, list(prompt), list(output), list(banned))


def random_logits(rows: int, seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def twin_distribution(logits: torch.Tensor, one: SampleInput) -> np.ndarray:
    """What the options mean, the slow way; float64."""
    p = one.params
    z = logits.double().numpy().copy()
    z[one.banned_token_ids] = -math.inf
    for token, bias in p.logit_bias.items():
        z[token] += bias
    for token in {*one.prompt_token_ids, *one.output_token_ids}:
        z[token] = z[token] / p.repetition_penalty if z[token] > 0 else z[token] * p.repetition_penalty
    for token in set(one.output_token_ids):
        z[token] -= p.presence_penalty + p.frequency_penalty * one.output_token_ids.count(token)
    if p.temperature == 0.0:
        return np.eye(len(z))[z.argmax()]
    z = z / p.temperature

    def softmax() -> np.ndarray:
        e = np.exp(z - z.max())
        return e / e.sum()

    probabilities = softmax()
    z[probabilities < p.min_p * probabilities.max() * (1 - 1e-6)] = -math.inf
    if p.top_k:
        z[z < np.sort(z)[-min(p.top_k, len(z))]] = -math.inf
    probabilities, total = softmax(), 0.0
    for token in np.argsort(-probabilities, kind="stable"):
        if total >= p.top_p:
            z[token] = -math.inf
        total += probabilities[token]
    return softmax()


def twin_token(logits: torch.Tensor, one: SampleInput) -> int:
    """Up to 64 tokens all compete at once."""
    with np.errstate(divide="ignore"):
        known = np.log(twin_distribution(logits, one))
    noise = gumbel([Draw(one.params.seed or 0, one.key.index, one.position)], np.arange(len(logits))[None], 2)[0]
    return int((known + noise).argmax())


OPTIONS: list[dict[str, Any]] = [
    {},
    {"banned": (3, 7, 11)},
    {"logit_bias": {4: 5.0, 9: -100.0, 30: 12.5}},
    {"repetition_penalty": 1.7, "prompt": (1, 2, 3), "output": (4, 4, 5)},
    {"presence_penalty": 1.5, "prompt": (1, 2, 3), "output": (4, 4, 5)},
    {"frequency_penalty": -1.1, "output": (4, 4, 4, 5)},
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 5.0, "min_p": 0.2},
    {"temperature": 2.0, "top_k": 5},
    {"temperature": 2.0, "top_k": 1},
    {"temperature": 2.0, "top_k": 1000},
    {"temperature": 3.0, "top_p": 0.6},
    {"temperature": 3.0, "top_p": 1e-9},
    {"temperature": 4.0, "top_p": 0.9, "top_k": 20, "min_p": 0.01, "banned": (0, 1), "repetition_penalty": 1.2},
    {"temperature": 1e-6},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_equals_the_naive_twin(options: dict[str, Any]) -> None:
    inputs = [one(position=i, index=i % 3, **options) for i in range(64)]
    logits = random_logits(64)
    tokens = [token.token_id for token in sample(logits, inputs)]
    assert tokens == [twin_token(row, i) for row, i in zip(logits, inputs, strict=True)]


def test_rows_do_not_see_each_other() -> None:
    """A token that depends on its neighbours makes a resumed or rebatched sequence change its text."""
    vocab = 1009  # a prime: no row but the first begins at a vector's border
    inputs = [one(position=i, seed=i, logprobs=2, **options) for i, options in enumerate(OPTIONS * 2)]
    logits = random_logits(len(inputs), seed=1, vocab=vocab)
    together = sample(logits, inputs)
    for r, alone in enumerate(inputs):
        assert sample(logits[r : r + 1], [alone]) == [together[r]]
    order = list(reversed(range(len(inputs))))
    assert sample(logits[order], [inputs[r] for r in order]) == [together[r] for r in order]


def test_logits_are_left_alone() -> None:
    logits = random_logits(len(OPTIONS))
    before = logits.clone()
    sample(logits, [one(**options) for options in OPTIONS])
    assert torch.equal(logits, before)


def test_draws_follow_the_distribution() -> None:
    """A wrong cumulation or a reused counter shows as a skewed histogram."""
    row = random_logits(1, seed=3)[0]
    options: dict[str, Any] = {"temperature": 1.5, "top_p": 0.95, "seed": 99}
    count = 4000
    tokens = [t.token_id for t in sample(row.expand(count, -1), [one(position=i, **options) for i in range(count)])]
    expected = twin_distribution(row, one(**options)) * count
    observed = np.bincount(tokens, minlength=VOCAB)
    assert observed[expected == 0].sum() == 0
    often = expected > 5
    chi_square = ((observed[often] - expected[often]) ** 2 / expected[often]).sum()
    freedom = often.sum() - 1
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("vocab", [64, 65, 1000, 9001])
def test_every_run_of_the_vocabulary_is_drawn_as_often_as_it_should(vocab: int) -> None:
    """The draw goes through runs of runs of tokens; an error at their borders would hide in a small vocabulary."""
    count = 200_000 // max(vocab // 100, 10)
    row = random_logits(1, seed=4, vocab=vocab)[0] / 10
    inputs = [one(position=i, temperature=1.0) for i in range(count)]
    tokens = np.array([t.token_id for t in sample(row.expand(count, -1), inputs)])
    assert tokens.max() < vocab
    expected = twin_distribution(row, inputs[0]) * count
    runs = np.arange(0, vocab, 37)  # none but the first begins where one of the sampler's does
    expected, observed = (np.add.reduceat(x, runs) for x in (expected, np.bincount(tokens, minlength=vocab)))
    chi_square = ((observed - expected) ** 2 / expected).sum()
    assert chi_square < len(runs) + 5 * math.sqrt(2 * len(runs))


@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}, {"top_k": 40}, {"min_p": 0.01}], ids=str)
def test_rounding_hardly_ever_changes_a_draw(options: dict[str, Any]) -> None:
    """A resumed answer parts from the undisturbed one: logits of another batch differ in their last bits."""
    count, vocab = 4000, 2000
    logits = random_logits(count, seed=6, vocab=vocab) / 2
    rounded = logits + 5e-4 * torch.randn(logits.shape, generator=torch.Generator().manual_seed(7))
    inputs = [one(position=i, temperature=1.0, **options) for i in range(count)]
    changed = sum(
        a.token_id != b.token_id for a, b in zip(sample(logits, inputs), sample(rounded, inputs), strict=True)
    )
    assert changed <= 8  # one draw through cumulated probabilities: 13 to 95


def test_equal_probabilities_at_the_border_of_the_nucleus() -> None:
    """Keeping all of them would make the nucleus of a flat distribution the whole vocabulary."""
    inputs = [one(position=i, temperature=1.0, top_p=0.49) for i in range(200)]
    tokens = {token.token_id for token in sample(torch.zeros(200, VOCAB), inputs)}
    assert tokens == set(range(VOCAB // 2))


def test_seed_index_and_position_each_change_the_draw() -> None:
    """Two continuations of one prompt must not be copies of each other."""
    row = torch.zeros(1, VOCAB)
    draws = {
        tuple(
            sample(row, [one(temperature=1.0, seed=seed, index=index, position=first + i)])[0].token_id
            for i in range(8)
        )
        for seed, index, first in [(1, 0, 0), (2, 0, 0), (1 + (1 << 40), 0, 0), (1, 1, 0), (1, 0, 100)]
    }
    assert len(draws) == 5


def test_logprobs_are_those_of_the_raw_logits() -> None:
    """Penalties, bias and temperature must not leak into what is reported."""
    logits = random_logits(2)
    options: dict[str, Any] = {"logit_bias": {5: 100.0}, "logprobs": 3}
    got = sample(logits, [one(**options), one(temperature=2.0, logprobs=0)])
    expected = torch.log_softmax(logits.double(), -1)
    first, second = got[0].logprob, got[1].logprob
    assert first is not None
    assert second is not None
    assert first.token_id == got[0].token_id == 5
    assert first.logprob == pytest.approx(expected[0, 5].item(), abs=1e-5)
    top = expected[0].topk(3)
    assert [token for token, _ in first.top] == top.indices.tolist()
    assert [value for _, value in first.top] == pytest.approx(top.values.tolist(), abs=1e-5)
    assert second.token_id == got[1].token_id
    assert second.top == []
    assert sample(logits, [one(), one()])[0].logprob is None


def test_more_alternatives_than_words() -> None:
    got = sample(torch.zeros(1, 5), [one(logprobs=20)])[0].logprob
    assert got is not None
    assert len(got.top) == 5


def test_extreme_logits() -> None:
    """Large logits over small temperatures overflow unless they are shifted first."""
    logits = torch.full((1, VOCAB), -1e4)
    logits[0, 17] = 3e4
    for options in ({"temperature": 1e-5}, {"temperature": 1.0, "top_p": 0.5}, {"temperature": 100.0, "min_p": 0.5}):
        assert sample(logits, [one(**options)])[0].token_id == 17


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_broken_logits_are_refused(bad: float) -> None:
    """Going on with them would stream nonsense as if nothing had happened."""
    logits = random_logits(3)
    logits[1, 4] = bad
    with pytest.raises(DeviceError, match=r"rows \[1\]"):
        sample(logits, [one()] * 3)


HARSH: list[dict[str, Any]] = [
    {"temperature": 1e-50},
    {"temperature": 1.0, "repetition_penalty": 1e-44, "prompt": (5,)},
    {"temperature": 1.0, "repetition_penalty": 1e-60, "output": (5,), "banned": (7,)},
    {"temperature": 0.7, "banned": tuple(range(VOCAB))},
]


@pytest.mark.parametrize("options", HARSH, ids=str)
def test_legal_extremes_draw_a_token(options: dict[str, Any]) -> None:
    """Fault: what is 0 or infinite in float32 became NaN and ended the process, and the next one it was retried on."""
    logits = random_logits(8, seed=5)
    logits[:, 5], logits[:, 7] = 9.0, 8.0
    tokens = [t.token_id for t in sample(logits, [one(position=i, **options) for i in range(8)])]
    if len(options.get("banned", ())) < VOCAB:
        assert tokens == [5] * 8
