"""The benchmark's own arithmetic: a wrong prompt or percentile would be believed."""

from __future__ import annotations

import asyncio
import math
import random
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[2] / "examples" / "bench"
pytestmark = pytest.mark.core


@pytest.fixture(scope="module")
def loads() -> Any:
    return _import("loads")


@pytest.fixture(scope="module")
def stats() -> Any:
    return _import("stats")


@pytest.fixture(scope="module")
def report() -> Any:
    return _import("report")


@pytest.fixture(scope="module")
def soak() -> Any:
    return _import("soak")


@pytest.fixture(scope="module")
def streams() -> Any:
    return _import("streams")


def _import(name: str) -> Any:
    """The scripts import each other from their own folder, so that is how they are imported here."""
    import importlib

    sys.path.insert(0, str(BENCH))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(BENCH))


def words(text: str) -> list[int]:
    """A token per word."""
    return [hash_word(word) for word in text.split()]


def hash_word(word: str) -> int:
    return int.from_bytes(word.encode()[:6], "big")


@pytest.mark.parametrize("num_shared", [0, 192])
def test_prompts_share_what_they_say(loads: Any, num_shared: int) -> None:
    """Prompts that share more than stated would flatter the prefix cache; fewer, hide it."""
    prompts = loads.prompts(words, "x", 16, num_shared=num_shared)
    assert all(len(prompt) == loads.PROMPT_TOKENS for prompt in prompts)
    assert {tuple(prompt[:num_shared]) for prompt in prompts} == {tuple(prompts[0][:num_shared])}
    assert len({prompt[num_shared] for prompt in prompts}) == 16


def test_runs_share_nothing_and_repeat_themselves(loads: Any) -> None:
    """A prompt that came back in a later run would be answered from the cache."""
    load = loads.Load("some", True, 4, 4)
    first, second = loads.prompts_of(words, load, 0), loads.prompts_of(words, load, 1)
    assert first == loads.prompts_of(words, load, 0)
    assert not {prompt[0] for prompt in first} & {prompt[0] for prompt in second}


def test_a_tokenizer_of_few_tokens_is_refused(loads: Any) -> None:
    """A prompt that is too short must not pass for one of the stated length."""
    with pytest.raises(ValueError, match="256 wanted"):
        loads.text_tokens(lambda text: words(text)[:100], "x", 256)


@pytest.mark.parametrize("percent", [0, 37, 50, 99, 100])
def test_percentile(stats: Any, percent: int) -> None:
    """An off-by-one in the rank moves p99 of 32 values by a whole value."""
    values = random.Random(percent).sample(range(1000), 101)
    assert math.isclose(stats.percentile(values, percent), sorted(values)[percent])
    assert stats.percentile([3.0, 1.0], 50) == 2.0
    with pytest.raises(ValueError, match="nothing"):
        stats.percentile([], percent)


def test_gaps_of_tokens_that_arrive_together(stats: Any) -> None:
    """Spreading a delta's wait over its tokens would hide stalls; dropping them would hide speed."""
    assert stats.token_gaps([(1.0, 1), (1.5, 3), (1.75, 1)]) == [0.5, 0.0, 0.0, 0.25]
    assert stats.token_gaps([(1.0, 2)]) == [0.0]


def test_soak_judges_the_last_half_of_memory(soak: Any) -> None:
    """The cache fills in the first half: counting that would hide a leak, or call every run one."""
    assert soak.spread([1.0, 50.0, 100.0, 100.5]) == pytest.approx(0.005)
    assert soak.spread([100.0, 100.0, 100.0, 102.0, 100.0, 100.0]) == pytest.approx(0.02)


def test_soak_sees_slower_minutes(soak: Any, streams: Any) -> None:
    """A gap belongs to the minute in which its token came; what ends after the last minute counts in none."""
    assert soak.drift([1.0, 1.0, 9.0, 2.0, 2.0]) == pytest.approx(1.0)
    assert soak.drift([3.0]) == 0.0
    answers = [streams.Answer(0.0, [(10.0, 1), (65.0, 2), (119.0, 1), (121.0, 1)])]
    assert soak.gaps_by_minute(answers, 5.0, 2) == [[], [55.0, 0.0, 54.0, 2.0]]
    assert soak.gaps_by_minute(answers, 0.0, 2) == [[], [55.0, 0.0, 54.0]]


def test_middle(stats: Any) -> None:
    """The spread must show the extremes, not only the median's neighbours."""
    assert stats.middle([3.0, 1.0, 2.0]) == stats.Middle(2.0, 1.0, 3.0)


def test_a_section_takes_its_own_place(report: Any) -> None:
    """A second run must not append a second table, nor eat the sections after its own."""
    text = "# All\n\n## One\n\nold\n\n## Two\n\nkept\n"
    one = report.Section("One", ("a", "b"), [("x", "1")])
    once = report.with_sections(text, [one])
    assert once == "# All\n\n## One\n\n| a | b |\n| --- | ---: |\n| x | 1 |\n\n## Two\n\nkept\n"
    assert report.with_sections(once, [one]) == once
    assert report.with_sections("# All\n", [one]).count("## One") == 1


def test_what_came_before_the_first_arrival_does_not_count(streams: Any) -> None:
    """Guards against streams that are judged by their own undisturbed beginning."""
    stream = streams.Answer(0.0, arrivals=[(0.1, 1), (0.9, 1), (1.5, 1), (2.0, 2)])
    late = streams.Answer(1.0, arrivals=[(2.5, 1)])  # after the streams' end
    found = streams.Beside([stream], [streams.Answer(1.0, arrivals=[(1.4, 1)]), late], began=0.0, since=1.0).figures()
    assert found["tokens_per_s"] == pytest.approx(3.0)
    assert found["itl_p99_s"] == pytest.approx(0.495)
    assert found["arrived_per_s"] == pytest.approx(1.0)


async def test_prompts_stop_arriving_when_the_streams_are_done(
    streams: Any, loads: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a load that goes on until all its prompts were asked."""
    monkeypatch.setattr(streams, "SETTLE_S", 0.01)

    async def ask(prompt: list[int], _max_tokens: int) -> Any:
        await asyncio.sleep(0.1 if prompt == [0] else 0.02)
        return streams.Answer(0.0, arrivals=[(1.0, 1)])

    found = await streams.beside(ask, [[0], [0]], ([1] for _ in range(1000)), loads.Arriving(every_s=0.03))
    assert len(found.streams) == 2
    assert 1 <= len(found.arrived) <= 5
