"""SmolLM2 from its GGUF file against transformers on the same dequantised weights, float32 on both sides."""

from __future__ import annotations

from typing import Any

import pytest

import kvferry
from kvferry.runtime.text.detokenizer import TextStream
from tests.support.real_models import GREEDY, NUM_TOKENS, PROMPTS, SMOLLM2, assert_greedy, installed, oracle

pytestmark = [pytest.mark.golden, pytest.mark.timeout(300)]
installed(SMOLLM2)


@pytest.fixture(scope="module")
def llm() -> kvferry.LLM:
    return kvferry.LLM(SMOLLM2, dtype="float32", kv_memory_bytes=64 << 20)


@pytest.fixture(scope="module")
def outputs(llm: kvferry.LLM) -> dict[str, kvferry.RequestOutput]:
    """All prompts in one batch, as token ids: here the model is judged, not the tokenizer."""
    prompts = [llm.tokenizer.encode(text) for text in PROMPTS.values()]
    return dict(zip(PROMPTS, llm.generate(prompts, GREEDY), strict=True))


@pytest.fixture(scope="module")
def theirs() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return oracle(SMOLLM2, LlamaConfig, LlamaForCausalLM)


@pytest.mark.parametrize("name", PROMPTS)
def test_greedy_tokens_equal_transformers(name: str, outputs: dict[str, kvferry.RequestOutput], theirs: Any) -> None:
    """Fault: loader, rope, tied head or paged attention are a little wrong, and the text still reads well."""
    assert_greedy(outputs[name], theirs)


@pytest.mark.parametrize("name", PROMPTS)
def test_incremental_text_equals_the_whole_decode(
    name: str, outputs: dict[str, kvferry.RequestOutput], llm: kvferry.LLM
) -> None:
    """Fault: characters of several tokens come out in halves, as U+FFFD, or not at all."""
    output, tokenizer = outputs[name], llm.tokenizer
    tokens = output.outputs[0].token_ids
    stream = TextStream(tokenizer, GREEDY, output.prompt_token_ids)
    pieces = [stream.push([token], last=i == NUM_TOKENS - 1).text for i, token in enumerate(tokens)]
    whole = tokenizer.decode(tokens)
    assert "".join(pieces) == whole == output.outputs[0].text
    assert "".join(pieces).count("\ufffd") == whole.count("\ufffd")
    if not whole.endswith("\ufffd"):
        assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("name", ["chinese", "arabic", "emoji", "russian", "japanese", "hindi"])
def test_prompts_are_worth_their_names(name: str, outputs: dict[str, kvferry.RequestOutput], llm: kvferry.LLM) -> None:
    """Fault: prompts after which the model speaks plain ASCII, so that the test above tests nothing."""
    text = outputs[name].outputs[0].text
    assert sum(ord(character) > 127 for character in text) >= 16
    pieces = [llm.tokenizer.decode([token]) for token in outputs[name].outputs[0].token_ids]
    assert any("\ufffd" in piece for piece in pieces), "no character takes more than one token"
