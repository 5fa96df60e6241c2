"""Gemma 3 270M from its split packages against transformers on the same dequantised weights, float32 on both sides."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvferry
from kvferry.runtime.model.files import load_spec
from kvferry.runtime.text.tokenizer import Tokenizer, load_tokenizer
from tests.support.real_models import GEMMA3, GREEDY, PROMPTS, assert_greedy, installed, oracle

pytestmark = [pytest.mark.golden, pytest.mark.timeout(300)]
FILES = installed(GEMMA3)
WINDOW = 512
STORY = (
    "The ferry leaves the harbour at seven in the morning, carries letters, flour and two goats to island number {0}, "
    "and is back before the tide turns. Nobody on island {0} remembers who ordered the goats. "
)
LONG = {
    "beyond the window": "".join(STORY.format(i) for i in range(14)),  # some 700 tokens
    "across its border": "".join(STORY.format(i) for i in range(9)),  # answers begin within the window and leave it
}


@pytest.fixture(scope="module")
def llm() -> kvferry.LLM:
    return kvferry.LLM(GEMMA3, dtype="float32", kv_memory_bytes=256 << 20, max_context=2048)


@pytest.fixture(scope="module")
def outputs(llm: kvferry.LLM) -> dict[str, kvferry.RequestOutput]:
    """All prompts in one batch, the long ones in chunks."""
    texts = PROMPTS | LONG
    prompts = [llm.tokenizer.encode(text) for text in texts.values()]
    return dict(zip(texts, llm.generate(prompts, GREEDY), strict=True))


@pytest.fixture(scope="module")
def theirs() -> Any:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    made = oracle(GEMMA3, Gemma3TextConfig, Gemma3ForCausalLM)
    assert (made.config.sliding_window, made.config.layer_types.count("full_attention")) == (WINDOW, 3)
    return made


@pytest.mark.parametrize("name", [*PROMPTS, *LONG])
def test_greedy_tokens_equal_transformers(name: str, outputs: dict[str, kvferry.RequestOutput], theirs: Any) -> None:
    """Fault: a norm, a scale, a layer's rope or its window is a little wrong, and the text still reads well."""
    assert_greedy(outputs[name], theirs)


def test_prompts_are_worth_their_names(outputs: dict[str, kvferry.RequestOutput], theirs: Any) -> None:
    """Fault: prompts for which a window that is forgotten changes nothing, so that the test above tests nothing."""
    lengths = {name: len(outputs[name].prompt_token_ids) for name in LONG}
    assert lengths["beyond the window"] > WINDOW + 100
    assert WINDOW - 60 < lengths["across its border"] < WINDOW
    prompt = outputs["beyond the window"].prompt_token_ids
    with torch.inference_mode():
        windowed = theirs(torch.tensor([prompt]), logits_to_keep=1).logits
        for layer in theirs.model.layers:
            assert layer.self_attn.sliding_window in (None, WINDOW)
        theirs.config.sliding_window = 4096
        full = theirs(torch.tensor([prompt]), logits_to_keep=1).logits
        theirs.config.sliding_window = WINDOW
    assert (windowed - full).abs().max() > 0.1


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(FILES)


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("Hello, world!", [2, 9259, 236764, 1902, 236888]),
        ("  two  spaces\n\n\nnew", [2, 138, 13498, 138, 35220, 109, 1951]),
        ("你好世界 🎉", [2, 144626, 12811, 204906]),
        ("In 1969, 3 men", [2, 902, 236743, 236770, 236819, 236825, 236819, 236764, 236743, 236800, 1758]),
    ],
)
def test_ids_equal_transformers(tokenizer: Tokenizer, text: str, ids: list[int]) -> None:
    """A wrong merge order changes what the model sees. (transformers' own tokenizer takes a minute to build.)"""
    assert tokenizer.encode(text) == ids
    assert tokenizer.decode(ids) == text


def test_blanks_are_taken_longest_first(tokenizer: Tokenizer) -> None:
    """Runs of blanks are whole symbols of SentencePiece's, up to 31; transformers merges them by rank instead."""
    ids = tokenizer.encode("x" + " " * 40 + "y")
    assert [len(str(tokenizer.raw.id_to_token(i))) for i in ids[2:4]] == [31, 9]


def test_bytes_stand_for_what_is_no_token(tokenizer: Tokenizer) -> None:
    text = "\x00𒐫\ue000"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert set(ids) <= tokenizer.byte_token_ids
    assert tokenizer.decode(ids) == text


def test_spec() -> None:
    """What the file does not say: which layers see all, and their rope."""
    layers = [layer.attention for layer in load_spec(FILES).layers]
    assert [i for i, layer in enumerate(layers) if layer.window is None] == [5, 11, 17]
    assert {(layer.window, layer.rope.theta) for layer in layers if layer.rope} == {(WINDOW, 1e4), (None, 1e6)}
