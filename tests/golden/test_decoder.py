"""Tokens and logits against transformers: tiny random models whose logits are far from flat, float32 on both sides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM as AutoModel
from transformers import LlamaConfig, MistralConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from kvferry.runtime.ids import BlockId, RequestId, SequenceKey
from kvferry.runtime.kv.storage import KVStorage
from kvferry.runtime.model.batch import make_batch
from kvferry.runtime.model.decoder import Decoder, build_model
from kvferry.runtime.model.families import from_hf_config
from kvferry.runtime.model.loader import MemoryWeights
from kvferry.runtime.model.parallel import LocalGroup, LocalParallel, SingleRank, TensorParallel
from kvferry.runtime.model.runner import Runner
from kvferry.runtime.request import SamplingParams
from kvferry.runtime.step import Row, SampleInput, StepPlan

pytestmark = pytest.mark.golden

VOCAB, BLOCK = 200, 4
NEW_TOKENS = 64
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 10000.0,
}
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "mha": lambda: LlamaConfig(**COMMON, num_attention_heads=4, num_key_value_heads=4),
    "gqa-tied": lambda: LlamaConfig(
        **COMMON, num_attention_heads=6, num_key_value_heads=2, head_dim=16, tie_word_embeddings=True
    ),
    "mqa": lambda: LlamaConfig(**COMMON, num_attention_heads=4, num_key_value_heads=1),
    "llama3-rope": lambda: LlamaConfig(
        **COMMON, num_attention_heads=4, num_key_value_heads=2, head_dim=32, rope_parameters=LLAMA3
    ),
    "linear-rope": lambda: LlamaConfig(
        **COMMON,
        num_attention_heads=4,
        num_key_value_heads=2,
        rope_parameters={"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0},
    ),
    "all-biases": lambda: LlamaConfig(
        **COMMON, num_attention_heads=4, num_key_value_heads=2, attention_bias=True, mlp_bias=True
    ),
    "mistral": lambda: MistralConfig(
        **COMMON, num_attention_heads=4, num_key_value_heads=2, head_dim=8, sliding_window=None
    ),
    "qwen2": lambda: Qwen2Config(**COMMON, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**COMMON, num_attention_heads=4, num_key_value_heads=2, head_dim=16),
}
PROMPT_LENGTHS = [1, 2, 4, 11, 23, 40]


@cache
def oracle(name: str) -> PreTrainedModel:
    torch.manual_seed(list(CONFIGS).index(name))
    model = AutoModel.from_config(CONFIGS[name](), dtype=torch.float32).eval()
    for key, parameter in model.named_parameters():  # biases start as 0 and norms as 1: faults in them would not show
        if key.endswith("bias"):
            parameter.data.normal_(0, 0.5)
        elif "norm" in key:
            parameter.data.uniform_(0.5, 1.5)
    return model


@cache
def prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, VOCAB, n).tolist() for n in PROMPT_LENGTHS]


@cache
def expected_tokens(name: str) -> list[list[int]]:
    model, outputs = oracle(name), []
    for prompt in prompts():
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0
        )
        outputs.append(out[0, len(prompt) :].tolist())
    return outputs


def build(name: str, parallel: TensorParallel) -> Decoder:
    model = oracle(name)
    spec = from_hf_config(model.config.to_dict() | {"architectures": [type(model).__name__]})
    return build_model(spec, MemoryWeights(dict(model.state_dict()), spec), torch.float32, parallel.rank, parallel)


class Sequences:
    """Runs greedy sequences through one rank's runner, with scattered blocks and a poisoned pool."""

    def __init__(self, name: str, parallel: TensorParallel | None = None, num_blocks: int = 400) -> None:
        parallel = parallel or SingleRank()
        self.model = build(name, parallel)
        layout = self.model.spec.kv_layout(BLOCK, "float32", parallel.size)
        self.storage = KVStorage(layout, num_blocks, "cpu", poison=True)
        self.runner = Runner(self.model, self.storage, parallel)
        self.free: list[BlockId] = [BlockId(int(b)) for b in np.random.default_rng(1).permutation(num_blocks)]
        self.leads = parallel.rank == 0
        self.steps = 0

    def blocks(self, num_tokens: int) -> list[BlockId]:
        return [self.free.pop() for _ in range(-(-num_tokens // BLOCK))]

    def step(self, rows: list[Row]) -> list[int]:
        greedy = SamplingParams(temperature=0.0, seed=0)
        key = SequenceKey(RequestId("r"), 0, 0)
        samples = [SampleInput(key, greedy, 0, [], [], []) for row in rows for _ in range(row.num_samples)]
        result = self.runner.execute(StepPlan(self.steps, rows), samples if self.leads else [])
        self.steps += 1
        return [token.token_id for token in result.sampled]


def generate(
    sequences: Sequences, chunk: int, stagger: int, feed: Sequence[Sequence[int]] | None = None
) -> list[list[int]]:
    """All prompts in one batch: one more joins every `stagger` steps, in chunks of `chunk` tokens beside the decodes.

    `feed`: what rank 0 drew, for ranks that draw nothing.
    """
    outputs: list[list[int]] = [[] for _ in prompts()]
    done = [0] * len(outputs)
    tables = [sequences.blocks(len(prompt) + NEW_TOKENS) for prompt in prompts()]
    clock = 0
    while any(len(out) < NEW_TOKENS for out in outputs):
        rows, owners = [], []
        for i, prompt in enumerate(prompts()):
            if i * stagger > clock or len(outputs[i]) == NEW_TOKENS:
                continue
            known = prompt + outputs[i]
            tokens = known[done[i] : done[i] + chunk]
            finished = done[i] + len(tokens) == len(known)
            rows.append(Row(tokens, done[i], tables[i], finished))
            done[i] += len(tokens)
            if finished:
                owners.append(i)
        drawn = sequences.step(rows)
        for place, i in enumerate(owners):
            outputs[i].append(feed[i][len(outputs[i])] if feed is not None else drawn[place])
        clock += 1
    return outputs


def generate_in_parallel(name: str, size: int, chunk: int) -> list[list[int]]:
    group = LocalGroup(size, timeout_s=60)
    feed = expected_tokens(name)  # before the threads start: the cache would make one oracle for each

    def rank(index: int) -> list[list[int]]:
        sequences = Sequences(name, LocalParallel(index, group))
        return generate(sequences, chunk, 1, feed=None if index == 0 else feed)

    with ThreadPoolExecutor(size) as pool:
        outputs = list(pool.map(rank, range(size)))
    return outputs[0]


@pytest.mark.parametrize("name", CONFIGS)
def test_logits(name: str) -> None:
    """A wrong rotation, bias or norm often leaves the first tokens alone and shows in the logits."""
    sequences = Sequences(name)
    prompt = prompts()[-1]
    rows = [Row(prompt[:i], 0, sequences.blocks(i), True) for i in (1, 7, len(prompt))]
    with torch.inference_mode():
        batch = make_batch(rows, sequences.storage)
        got = sequences.model.logits(sequences.model.forward(batch, sequences.storage))
        expected = torch.stack([oracle(name)(torch.tensor([row.token_ids])).logits[0, -1] for row in rows])
    assert expected.std() > 1.0  # else the comparison proves little
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("chunk", "stagger"), [(1000, 0), (5, 3)], ids=["whole", "chunked"])
def test_tokens(name: str, chunk: int, stagger: int) -> None:
    """Ragged batches, prompts that join beside running decodes and chunks that end inside a block change nothing."""
    assert generate(Sequences(name), chunk, stagger) == expected_tokens(name)


@pytest.mark.parametrize(
    ("name", "size"), [("mha", 2), ("gqa-tied", 2), ("mqa", 2), ("mqa", 4), ("all-biases", 4), ("qwen3", 2)]
)
def test_tokens_in_parallel(name: str, size: int) -> None:
    """Ranks that take the wrong heads, or biases that are added once per rank."""
    assert generate_in_parallel(name, size, chunk=7) == expected_tokens(name)


def test_rows_of_one_step_share_blocks() -> None:
    """A prefix computed by one row must be readable by the others of the same step."""
    name, prefix = "gqa-tied", prompts()[-1][:16]
    sequences = Sequences(name)
    tails = [[7], [9, 11, 13], [15] * 6]
    shared = sequences.blocks(len(prefix))
    rows = [
        Row(tail, len(prefix), [*shared, *sequences.blocks(len(tail))], True) for tail in tails
    ]  # readers stand before the writer in the plan
    rows.append(Row(prefix, 0, shared, True))
    with torch.inference_mode():
        expected = [
            int(oracle(name)(torch.tensor([tokens])).logits[0, -1].argmax())
            for tokens in [*[prefix + tail for tail in tails], prefix]
        ]
    assert sequences.step(rows) == expected


def test_steps_without_samples_and_without_rows() -> None:
    """A chunk in the middle of a prompt wants no logits; a plan may carry transfers only."""
    sequences = Sequences("mha")
    table = sequences.blocks(8)
    assert sequences.step([]) == []
    assert sequences.step([Row([1, 2, 3], 0, table, False)]) == []
    assert len(sequences.step([Row([4], 3, table, True)])) == 1
