"""Speculation without a model: what is accepted, how much is drafted, where n-grams are found."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.runtime.config import SpeculationConfig
from kvferry.runtime.errors import InvalidArgument
from kvferry.runtime.request import FinishReason, SamplingParams, SequenceRequest
from kvferry.runtime.sequence import Sequence
from kvferry.runtime.speculation import ngram
from kvferry.runtime.speculation.acceptance import Draft, Record, accept
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
    """Fault: a sequence that leaves the text it copied keeps drafting as if it had not, or never finds back."""
    record = Record(Record())
    for _ in range(10):
        record.judge(4, 4)
    assert record.chances(3)[2] > 0.7
    for _ in range(20):
        record.judge(4, 0)
    assert record.chances(1)[0] < 0.2
    for _ in range(5):
        record.judge(4, 4)
    assert record.chances(1)[0] > 0.4


def test_record_tells_kinds_and_places_apart() -> None:
    """Fault: unsure guesses spoil the record of sure ones, or first tokens that of those behind them."""
    every = Record()
    record = Record(every)
    for _ in range(30):
        record.kind = 0
        record.judge(4, 4)
        record.kind = 2
        record.judge(4, 0)
    record.kind = 0
    assert record.chances(4)[3] > 0.9
    record.kind = 2
    assert record.chances(1)[0] < 0.1
    new = Record(every)
    assert new.chances(4)[3] > 0.8, "a new sequence begins with what is known of others"
    new.kind = 2
    assert new.chances(1)[0] < 0.2


# ------------------------------------------------------------------ cost
CPU = {1: 51, 2: 86, 3: 108, 4: 71, 5: 80, 6: 86, 7: 92}
"""Milliseconds of a step of so many tokens: SmolLM2-135M in float32 on one core. Two rows take longer than four."""


def measured(seconds: Callable[[int], float], num_rows: int = 1, most: int = 6) -> StepCost:
    """`seconds`: of a step with so many drafted tokens."""
    cost = StepCost()
    for i in range(100):
        num_drafted = i % (most + 1)
        cost.observe(num_rows, num_drafted, num_drafted, seconds(num_drafted))
    return cost


def powers(rate: float, count: int) -> list[float]:
    return [rate ** (i + 1) for i in range(count)]


def test_cost_is_found_in_noise_and_past_a_disturbance() -> None:
    """Fault: one step that the machine slept through decides about speculation for a long time."""
    rng, cost = random.Random(1), StepCost()
    for i in range(400):
        num_drafted = rng.randrange(5)
        disturbed = 0.5 if i % 100 == 50 else 0.0
        cost.observe(2, num_drafted, 0, (0.010 + 0.002 * num_drafted) * rng.uniform(0.9, 1.1) + disturbed)
    for num_drafted in range(5):
        assert cost.expected(2, num_drafted) == pytest.approx(0.010 + 0.002 * num_drafted, rel=0.1)


def test_cost_of_a_drafted_token_is_not_that_of_a_sequence() -> None:
    """Fault: sequences that come and go are taken for what drafted tokens cost."""
    cost = measured(lambda n: 0.010 + 0.001 * n)
    for num_rows in range(2, 60):
        cost.observe(num_rows, 0, 0, 0.010 * num_rows)
    assert cost.expected(1, 4) == pytest.approx(0.014, rel=0.05)
    assert cost.expected(30, 4) == pytest.approx(0.304, rel=0.05), "never measured: as much as elsewhere"


def test_constant_drafts_are_compared_with_plain_steps() -> None:
    """Fault: who always drafts as much never sees that it loses by it."""
    cost, plain = StepCost(), 0
    for _ in range(400):
        num_drafted = 4 if cost.may_draft(1) else 0
        plain += not num_drafted
        cost.observe(1, num_drafted, num_drafted, 0.010 + 0.003 * num_drafted)
    assert cost.expected(1, 0) == pytest.approx(0.010)
    assert 8 <= plain <= 24


def test_lengths_follow_acceptance_and_cost() -> None:
    cheap = measured(lambda n: 0.010 + 0.0005 * n, 3, 20)
    few, some, none = (length for length in cheap.lengths([powers(r, 8) for r in (0.5, 0.9, 0.02)], 0.0))
    assert some > few > none == 0
    assert measured(lambda n: 0.010 + 0.008 * n).lengths([powers(0.5, 6)], 0.0) == [0]
    fast = measured(lambda n: 0.010 + 0.0005 * n)
    assert fast.lengths([powers(0.99, 3)], 0.0) == [3]
    assert fast.lengths([powers(0.9, 6)], 0.010) == [0], "the draft model takes too long"


def test_lengths_pass_over_what_is_dear() -> None:
    """Fault: the first drafted token does not pay (two rows are slow on this CPU), so four never are tried."""
    cost = measured(lambda n: CPU[1 + n] / 1000)
    assert cost.lengths([powers(0.6, 6)], 0.0) == [3]
    assert cost.lengths([powers(0.9, 6)], 0.0) == [6]
    assert cost.lengths([powers(0.3, 6)], 0.0) == [0]
    assert cost.lengths([powers(0.5, 1)], 0.0) == [0]


@given(
    rates=st.lists(st.floats(0.01, 0.99), min_size=1, max_size=2),
    seconds=st.lists(st.floats(0.001, 0.1), min_size=7, max_size=7),
)
def test_lengths_are_the_best(rates: list[float], seconds: list[float]) -> None:
    """The twin tries all. Fault: a batch that is drafted for although its tokens then take longer, or the reverse."""
    cost = StepCost()
    for num_drafted in (0, 4, 6, 1, 2, 3, 5):
        cost.observe(len(rates), num_drafted, 0, seconds[0])
    for num_drafted in list(range(7)) * 200:
        cost.observe(len(rates), num_drafted, 0, seconds[num_drafted])

    def each(lengths: Iterable[int]) -> float:
        lengths = list(lengths)
        gained = sum(sum(powers(r, n)) for r, n in zip(rates, lengths, strict=True))
        expected = cost.expected(len(rates), sum(lengths))
        assert expected is not None
        return expected / (len(rates) + gained)

    lengths = cost.lengths([powers(rate, 3) for rate in rates], 0.0)
    plain, best = each([0] * len(rates)), min(map(each, product(range(4), repeat=len(rates))))
    assert each(lengths) == pytest.approx(best if best < 0.95 * plain else plain)


# ------------------------------------------------------------------ n-grams
def test_ngram_goes_on_as_the_last_time() -> None:
    index = NgramIndex()
    tokens = [1, 2, 3, 4, 5, 6, 9, 9, 1, 2, 3, 4]
    assert index.extend(tokens)
    assert index.draft(tokens, 3) == Draft([5, 6, 9], kind=0)
    tokens += [7, 8, 3, 4]
    assert index.extend(tokens)
    assert index.draft(tokens, 2) == Draft([7, 8], kind=2), "the latest of two places"
    assert NgramIndex().draft([1, 2], 4) == Draft([])


def test_ngram_draft_runs_into_what_is_drafted() -> None:
    """Fault: in a repetition, whose last occurrence ends with the sequence, only one round is drafted."""
    index = NgramIndex()
    tokens = [7, 1, 2, 3, 1, 2, 3, 1, 2, 3]
    index.extend(tokens)
    assert index.draft(tokens, 8).token_ids == [1, 2, 3, 1, 2, 3, 1, 2]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 8))
def test_ngram_equals_a_search(tokens: list[int], count: int) -> None:
    """The twin looks through the whole sequence. Fault: a place that another n-gram has taken, or the end itself."""
    index = NgramIndex()
    for length in range(1, len(tokens) + 1):
        index.extend(tokens[:length])
    expected: list[int] = []
    for size in (4, 3, 2):
        places = [p for p in range(size, len(tokens)) if tokens[p - size : p] == tokens[-size:]]
        if places and len(tokens) > size:
            expected = list(tokens[places[-1] :])
            while len(expected) < count:
                expected += expected
            break
    assert index.draft(tokens, count).token_ids == expected[:count]


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


def seconds_of(requests: list[SequenceRequest], guessing: bool, **engine: Any) -> tuple[float, tuple[int, int]]:
    """Of all requests at once on the engine's clock, and what was drafted and accepted."""
    toy = ToyEngine(num_blocks=4096, speculation=6 * guessing, **engine)
    for request in requests:
        toy.submit(request)
    begin = toy.clock.now_ns
    toy.run(100_000)
    return (toy.clock.now_ns - begin) / 1e9, toy.drafted()


def on_cpu(num_tokens: int) -> int:
    return CPU.get(num_tokens, 85 + 2 * num_tokens) * 1_000_000


@pytest.mark.parametrize("num_requests", [1, 4])
@pytest.mark.parametrize("steep", [False, True])
def test_wrong_guesses_lose_little(num_requests: int, steep: bool) -> None:
    """Fault: guesses of which none comes true slow answers down; or nothing is ever tried again."""

    def step_ns(num_tokens: int) -> int:
        return num_tokens * 30_000_000 if steep else on_cpu(num_tokens)

    requests = [toy_request(f"r{i}", [i, 1], 800) for i in range(num_requests)]
    plain, _ = seconds_of(requests, False, step_ns=step_ns)
    guessing, (drafted, accepted) = seconds_of(requests, True, step_ns=step_ns, proposer=ToyProposer(wrong=1))
    assert accepted == 0 < drafted
    assert plain <= guessing < 1.03 * plain


def test_repeated_text_gains() -> None:
    """With n-grams. Fault: what is bounded against losing no longer gains."""
    requests = [toy_request("r", [3, 1, 4], 300)]
    plain, _ = seconds_of(requests, False, step_ns=on_cpu, window=2)
    guessing, (drafted, accepted) = seconds_of(requests, True, step_ns=on_cpu, window=2)
    assert accepted > 0.9 * drafted
    assert guessing < plain / 2


@pytest.mark.parametrize("num_requests", [1, 4, 32])
def test_a_large_batch_does_not_guess(num_requests: int) -> None:
    """Up to 8 tokens take as long as one, each further one more. Fault: a step that has no time to spare is lengthened
    by guesses of which most are wrong."""

    def step_ns(num_tokens: int) -> int:
        return max(num_tokens, 8) * 1_000_000

    requests = [toy_request(f"r{i}", [i, 1], 300) for i in range(num_requests)]
    plain, _ = seconds_of(requests, False, step_ns=step_ns)
    proposer = ToyProposer(wrong=2)  # every other guess
    guessing, (drafted, _) = seconds_of(requests, True, step_ns=step_ns, proposer=proposer)
    if num_requests == 32:
        assert drafted < 0.05 * 32 * 300
        assert guessing < 1.03 * plain
    else:
        assert guessing < (0.7 if num_requests == 1 else 0.9) * plain


@pytest.mark.parametrize("propose_ms", [30, 50])
def test_a_slow_proposer_is_hardly_asked(propose_ms: int) -> None:
    """Fault: a draft model as slow as the model itself: all that it says comes true, and time is lost all the same."""

    class Slow(ToyProposer):
        def propose(self, sequences: SequenceOf[Sequence], counts: SequenceOf[int]) -> list[Draft]:
            toy.clock.now_ns += sum(counts) * propose_ms * 1_000_000
            return super().propose(sequences, counts)

    toy = ToyEngine(num_blocks=512, speculation=4, proposer=Slow(wrong=VOCAB + 1), step_ns=lambda _: 30_000_000)
    toy.submit(toy_request("r", [1, 2, 3], 1000))
    begin = toy.clock.now_ns
    toy.run()
    assert 0 < toy.drafted()[0] < 150
    assert toy.clock.now_ns - begin < 1.03 * 1000 * 30_000_000


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
