"""The draft model's own memory, and who may be one."""

from __future__ import annotations

import json
from collections.abc import Sequence as SequenceOf
from typing import Any

import msgspec
import pytest

from kvferry.runtime.config import SpeculationConfig
from kvferry.runtime.errors import InvalidArgument
from kvferry.runtime.model.files import load_spec, resolve_model
from kvferry.runtime.model.fit import check_draft
from kvferry.runtime.sequence import Sequence
from kvferry.runtime.speculation import draft
from kvferry.runtime.speculation.draft import DraftModel
from kvferry.runtime.step import SampleInput, StepPlan, StepResult
from tests.support.tiny_model import save_tiny_model
from tests.support.toy_engine import ToyRunner, toy_groups, toy_output, toy_request

BLOCK = 4


class Spec:
    max_context = 200


class Toy:
    """A draft model whose truth is the toy's, so that it is never wrong."""

    def __init__(self, num_blocks: int = 40) -> None:
        self.runner = ToyRunner(toy_groups(num_blocks, BLOCK))
        self.model = DraftModel(self, Spec(), num_blocks, BLOCK)  # type: ignore[arg-type]

    def execute(self, plan: StepPlan, samples: SequenceOf[SampleInput]) -> StepResult:
        return self.runner.execute(plan, list(samples))


def propose(toy: Toy, sequences: list[Sequence], counts: list[int]) -> list[list[int]]:
    return [draft.token_ids for draft in toy.model.propose(sequences, counts)]


def sequence(name: str, tokens: list[int]) -> Sequence:
    return Sequence(toy_request(name, tokens, 100), b"", [], 0, 0)


def test_draft_follows_a_sequence_that_goes_another_way() -> None:
    """Fault: KV of drafted tokens that the model did not draw is taken for the sequence's."""
    toy, one = Toy(), sequence("r", [1, 2, 3, 4, 5])
    for step in range(20):
        (guess,) = propose(toy, [one], [4])
        assert guess == toy_output(one.tokens, 4)
        assert propose(toy, [one], [2]) == [guess[:2]], "asked again before anything came of it"
        one.tokens += [*guess[: step % 5], (step * 7) % 50] if step % 3 else guess[:3]


def test_long_context_is_caught_up_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a step stands still while the draft model reads a long prompt; or it never comes to an end."""
    monkeypatch.setattr(draft, "MAX_CATCH_UP", 30)
    toy = Toy()
    both = [sequence("a", list(range(40))), sequence("b", [7] * 45)]
    lengths = []
    for _ in range(5):
        before = len(toy.runner.plans)
        lengths.append([len(d) for d in propose(toy, both, [2, 2])])
        assert toy.runner.plans[before].num_tokens <= 30
    assert lengths[:2] == [[0, 0], [2, 0]]
    assert lengths[-1] == [2, 2]


def test_memory_is_bounded_and_given_back() -> None:
    """Fault: sequences that are not drafted for keep the blocks of those that are; an end leaks blocks."""
    toy = Toy(num_blocks=8)
    many = [sequence(f"r{i}", [i] * 10) for i in range(6)]
    for one in many:
        (guess,) = propose(toy, [one], [3])
        assert guess == toy_output(one.tokens, 3)
    guesses = propose(toy, many, [3] * 6)
    assert [len(guess) for guess in guesses] == [3, 3, 0, 0, 0, 0], "those of one step do not take from each other"
    for one in many:
        toy.model.forget(one.key)
    assert sorted(toy.model._free) == list(range(8))


def test_context_of_the_draft_model_is_respected() -> None:
    toy = Toy(num_blocks=80)
    assert propose(toy, [sequence("r", [1] * 198)], [3]) == [[]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A model, and one with two tokens exchanged."""
    root = tmp_path_factory.mktemp("drafts")
    same, other = (save_tiny_model(root / name) for name in ("same", "other"))
    path = other / "tokenizer.json"
    content = json.loads(path.read_text())
    vocab = content["model"]["vocab"]
    vocab["e"], vocab["t"] = vocab["t"], vocab["e"]
    path.write_text(json.dumps(content))
    return str(same), str(other)


def test_another_vocabulary_is_refused_by_name(models: tuple[str, str]) -> None:
    """Fault: guesses that mean other words; or a start-up error that does not say which model is wrong."""
    same, other = models
    files = resolve_model(same)
    spec = load_spec(files)
    check_draft(same, files, spec)
    with pytest.raises(InvalidArgument, match=r"draft_model.*token 'e'.*not the same in both"):
        check_draft(other, files, spec)
    with pytest.raises(InvalidArgument, match=r"draft_model.*384 tokens, the model 400"):
        check_draft(same, files, msgspec.structs.replace(spec, vocab_size=400))


@pytest.mark.parametrize("fields", [{"method": "draft"}, {"method": "ngram", "draft_model": "x"}, {"draft_model": "x"}])
def test_options_that_do_not_go_together_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="draft_model"):
        SpeculationConfig(**fields)
