"""Speculation without a model: what is accepted, how much is drafted, where n-grams are found."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.runtime.config import SpeculationConfig
from kvferry.runtime.errors import InvalidArgument
from kvferry.runtime.request import FinishReason, SamplingParams
from kvferry.runtime.speculation import ngram
from kvferry.runtime.speculation.acceptance import Record, accept
from kvferry.runtime.speculation.cost import StepCost
from kvferry.runtime.speculation.ngram import NgramIndex
from kvferry.runtime.step import SampledToken
from tests.support.toy_engine import VOCAB, ToyEngine, ToyProposer, toy_next, toy_output, toy_request

pytestmark = pytest.mark.core


def ids(tokens: list[SampledToken]) -> list[int]:
    return [token.token_id for token in tokens]


# ------------------------------------------------------------------ acceptance
def test_a_draw_behind_a_wrong_guess_is_dropped() -> None:
    """Fault: a token that the model drew after a token that is not there."""
    drawn = [SampledToken(token) for token in (5, 6, 7, 8)]
    assert ids(accept([], drawn[:1])) == [5]
    assert ids(accept([5, 6, 7], drawn)) == [5, 6, 7, 8]
    assert ids(accept([5, 9, 7], drawn)) == [5, 6]
    assert ids(accept([9, 6, 7], drawn)) == [5]


def test_record_follows_what_came_true_of_late() -> None:
    """Fault: a sequence that leaves the text it copied keeps drafting as if it had not, or never tries again."""
    record = Record()
    for _ in range(10):
        record.judge(4, 4)
    assert record.rate > 0.9
    for _ in range(20):
        record.judge(4, 0)
    assert record.rate < 0.2
    waits, waited = [], 0
    for _ in range(500):
        record.note(pays=False)
        waited += 1
        if record.may_try():
            waits.append(waited)
            waited = 0
    assert waits == [8, 16, 32, 64, 128, 128]


# ------------------------------------------------------------------ cost
def measured(fixed: float, per_token: float, num_rows: int = 1) -> StepCost:
    cost = StepCost()
    for i in range(100):
        num_drafted = i % 4
        cost.observe(num_rows, num_drafted, fixed + per_token * num_drafted)
    return cost


def test_cost_is_found_in_noise_and_past_a_disturbance() -> None:
    """Fault: one step that the machine slept through decides about speculation for a long time."""
    rng, cost = random.Random(1), StepCost()
    for i in range(400):
        num_drafted = rng.randrange(5)
        disturbed = 0.5 if i % 100 == 50 else 0.0
        cost.observe(2, num_drafted, (0.010 + 0.002 * num_drafted) * rng.uniform(0.9, 1.1) + disturbed)
    assert cost.fixed == pytest.approx(0.010, rel=0.4)
    assert cost.per_token == pytest.approx(0.002, rel=0.5)


def test_cost_of_a_drafted_token_is_not_that_of_a_sequence() -> None:
    """Fault: sequences that come and go are taken for what drafted tokens cost."""
    cost = measured(0.010, 0.001)
    for num_rows in range(2, 60):
        cost.observe(num_rows, 0, 0.010 * num_rows)
    assert cost.per_token == pytest.approx(0.001, rel=0.05)


def test_constant_drafts_ask_for_a_plain_step() -> None:
    """Fault: who always drafts as much never sees that it loses by it."""
    cost = StepCost()
    plain = 0
    for _ in range(400):
        num_drafted = 0 if cost.wants_plain_step else 4
        plain += not num_drafted
        cost.observe(1, num_drafted, 0.010 + 0.003 * num_drafted)
    assert cost.per_token == pytest.approx(0.003, rel=0.2)
    assert 4 <= plain <= 20


def test_lengths_follow_acceptance_and_cost() -> None:
    cheap, dear = measured(0.010, 0.0005), measured(0.010, 0.008)
    assert cheap.lengths([0.9, 0.5, 0.02], [8, 8, 8])[0] > cheap.lengths([0.9, 0.5, 0.02], [8, 8, 8])[1] > 0
    assert cheap.lengths([0.02], [8]) == [0]
    assert dear.lengths([0.5], [8]) == [0]
    assert cheap.lengths([0.99], [3]) == [3]
    assert cheap.lengths([], []) == []


@given(
    rates=st.lists(st.floats(0.01, 0.99), min_size=1, max_size=4),
    share=st.floats(0.001, 1.5),
)
def test_lengths_gain_time(rates: list[float], share: float) -> None:
    """Fault: a batch that is drafted for although each token then takes longer; or a token that would have paid."""
    cost = measured(0.010, 0.010 * share, len(rates))

    def seconds_per_token(lengths: list[int]) -> float:
        gained = sum(sum(rate**j for j in range(n + 1)) for rate, n in zip(rates, lengths, strict=True))
        return (cost.fixed + cost.per_token * sum(lengths)) / gained

    lengths = cost.lengths(rates, [6] * len(rates))
    best = seconds_per_token(lengths)
    for i, length in enumerate(lengths):
        shorter = [*lengths[:i], max(0, length - 1), *lengths[i + 1 :]]
        assert best <= seconds_per_token([0] * len(rates)) + 1e-9
        assert best <= seconds_per_token(shorter) * 1.05  # the order in which tokens are added costs a little
        if length < 6:
            assert best <= seconds_per_token([*lengths[:i], length + 1, *lengths[i + 1 :]]) + 1e-9


# ------------------------------------------------------------------ n-grams
def test_ngram_goes_on_as_the_last_time() -> None:
    index = NgramIndex()
    tokens = [1, 2, 3, 4, 5, 6, 9, 9, 1, 2, 3, 4]
    assert index.extend(tokens)
    assert index.draft(tokens, 3) == [5, 6, 9]
    tokens += [7, 8, 3, 4]
    assert index.extend(tokens)
    assert index.draft(tokens, 2) == [7, 8], "the latest of two places"
    assert NgramIndex().draft([1, 2], 4) == []


def test_ngram_draft_runs_into_what_is_drafted() -> None:
    """Fault: in a repetition, whose last occurrence ends with the sequence, only one round is drafted."""
    index = NgramIndex()
    tokens = [7, 1, 2, 3, 1, 2, 3, 1, 2, 3]
    index.extend(tokens)
    assert index.draft(tokens, 8) == [1, 2, 3, 1, 2, 3, 1, 2]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 8))
def test_ngram_equals_a_search(tokens: list[int], count: int) -> None:
    """The twin looks through the whole sequence. Fault: a place that another n-gram has taken, or the end itself."""
    index = NgramIndex()
    for length in range(1, len(tokens) + 1):
        index.extend(tokens[:length])
    expected: list[int] = []
    for size in (4, 2):
        places = [p for p in range(size, len(tokens)) if tokens[p - size : p] == tokens[-size:]]
        if places and len(tokens) > size:
            expected = list(tokens[places[-1] :])
            while len(expected) < count:
                expected += expected
            break
    assert index.draft(tokens, count) == expected[:count]


def test_ngram_takes_a_long_context_in_by_and_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: the first decode after a long prompt stands still while all of it is indexed."""
    monkeypatch.setattr(ngram, "MAX_INDEXED_PER_STEP", 10)
    index, tokens = NgramIndex(), [1, 2] * 12
    assert [index.extend(tokens) for _ in range(3)] == [False, False, True]
    assert index.num_indexed == 24


# ------------------------------------------------------------------ in an engine
def test_fewer_steps_same_tokens() -> None:
    toy = ToyEngine(num_blocks=64, speculation=4, proposer=ToyProposer(wrong=VOCAB + 1))
    toy.submit(toy_request("r", [1, 2, 3], 40))
    toy.run()
    assert toy.tokens[toy_request("r", []).key] == toy_output([1, 2, 3], 40)
    assert len(toy.runner.plans) <= 14
    drafted, accepted = toy.drafted()
    assert drafted >= accepted >= 40 - len(toy.runner.plans)


def test_events_are_in_order_and_end_once() -> None:
    """Fault: a step's further tokens carry the first one's position, its end or its waiting time."""
    toy = ToyEngine(num_blocks=64, speculation=5, proposer=ToyProposer(wrong=7))
    toy.submit(toy_request("r", [1, 2, 3], 30))
    events = []
    while toy.engine.has_work():
        events += toy.step().tokens
    assert [event.position for event in events] == list(range(30))
    assert [event.finish_reason for event in events] == [None] * 29 + [FinishReason.LENGTH]
    assert [event.begin_ns is not None for event in events] == [True] + [False] * 29


@pytest.mark.parametrize("at", range(1, 12))
@pytest.mark.parametrize("min_tokens", [0, 6])
def test_stop_token_inside_a_draft_ends_the_sequence(at: int, min_tokens: int) -> None:
    """Fault: tokens behind a stop token are delivered, or `min_tokens` is counted from the row's beginning."""
    prompt = [4, 5]
    stop = toy_output(prompt, at)[-1]
    expected: list[int] = []
    while len(expected) < 20 and not (expected and expected[-1] == stop):
        token = toy_next(prompt + expected, 0, 0)
        while len(expected) < min_tokens and token == stop:
            token = (token + 1) % VOCAB
        expected.append(token)
    toy = ToyEngine(num_blocks=64, speculation=6, proposer=ToyProposer(wrong=VOCAB + 1))
    request = toy_request("r", prompt)
    params = SamplingParams(max_tokens=20, min_tokens=min_tokens, stop_token_ids=[stop], seed=0)
    toy.submit(type(request)(key=request.key, prompt_token_ids=prompt, sampling=params, eos_token_ids=[]))
    toy.run()
    assert toy.tokens[request.key] == expected
    assert toy.ends[request.key] == ("stop" if expected[-1] == stop else "length")


@pytest.mark.parametrize("handoff_after", [1, 2, 5])
def test_no_draft_leads_past_a_handoff(handoff_after: int) -> None:
    """Fault: a leg that is to end after so many tokens delivers some of the next leg's."""
    toy = ToyEngine(num_blocks=64, speculation=6, proposer=ToyProposer(wrong=VOCAB + 1))
    request = toy_request("r", [1, 2, 3], 20, handoff_after=handoff_after)
    toy.submit(request)
    toy.run()
    assert toy.ends[request.key] == "handoff"
    assert toy.tokens[request.key] == toy_output([1, 2, 3], handoff_after)


def test_drafts_preempt_nobody_and_stay_in_the_budget() -> None:
    """Fault: blocks for guesses push a running sequence out of a pool that holds all of them without guesses."""
    toy = ToyEngine(num_blocks=10, speculation=6, proposer=ToyProposer(wrong=3), max_batch_tokens=7)
    for i in range(2):
        toy.submit(toy_request(f"r{i}", [i] * 4, 15, arrival_ns=i))
    toy.run()
    for i in range(2):
        assert toy.tokens[toy_request(f"r{i}", []).key] == toy_output([i] * 4, 15)
    assert toy.engine.load().num_preemptions == 0
    assert max(plan.num_tokens for plan in toy.runner.plans) <= 7
    assert toy.drafted()[1] > 0


@pytest.mark.parametrize("budget", [1, 2, 3])
def test_what_is_not_yet_computed_is_no_decode(budget: int) -> None:
    """Fault: the chunk of one token that a small budget leaves of a resumed sequence is lengthened by a draft."""
    toy = ToyEngine(num_blocks=64, speculation=4, proposer=ToyProposer(wrong=VOCAB + 1), max_batch_tokens=budget)
    request = toy_request("r", [1, 2, 3], 20, output_token_ids=toy_output([1, 2, 3], 6))
    toy.submit(request)
    toy.run()
    assert toy.tokens[request.key] == toy_output([1, 2, 3], 20)[6:]


def test_off_by_default_and_bounded() -> None:
    toy = ToyEngine(proposer=ToyProposer(wrong=3))
    toy.submit(toy_request("r", [1], 10))
    toy.run()
    assert toy.drafted() == (0, 0)
    with pytest.raises(InvalidArgument, match="speculation_tokens"):
        SpeculationConfig(max_tokens=65)
