"""Tiny random models of every family, whose logits are far from flat, and greedy sequences through one rank's runner.

transformers computes what is expected, in float32 on both sides.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import torch
from transformers import AutoModelForCausalLM as AutoModel
from transformers import PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from kvferry.kernels.packing import Quantization
from kvferry.runtime.ids import BlockId, RequestId, SequenceKey
from kvferry.runtime.kv.groups import one_group
from kvferry.runtime.kv.storage import RankStorage
from kvferry.runtime.model.decoder import Decoder, build_model
from kvferry.runtime.model.families import from_hf_config
from kvferry.runtime.model.loader import MemoryWeights
from kvferry.runtime.model.parallel import LocalGroup, LocalParallel, SingleRank, TensorParallel
from kvferry.runtime.model.runner import Runner
from kvferry.runtime.request import SamplingParams
from kvferry.runtime.step import Row, SampleInput, StepPlan
from tests.support.golden_configs import CONFIGS, VOCAB

BLOCK, NEW_TOKENS = 4, 64
PROMPT_LENGTHS = [1, 2, 4, 11, 23, 40]


@cache
def oracle(name: str) -> PreTrainedModel:
    return randomised(name, CONFIGS[name]())


def randomised(name: str, config: PretrainedConfig) -> PreTrainedModel:
    """`name` is the seed."""
    torch.manual_seed(zlib.crc32(name.encode()))
    model = AutoModel.from_config(config, dtype=torch.float32).eval()
    for key, parameter in model.named_parameters():  # biases start as 0 and norms as 1: faults in them would not show
        if key.endswith("bias"):
            parameter.data.normal_(0, 0.5)
        elif "norm" in key or ".ln_" in key:
            parameter.data.uniform_(0.5, 1.5)
    for key, buffer in model.named_buffers():
        if "correction" in key:  # starts as 0 too
            buffer.normal_(0, 0.1)
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
    return build_from(oracle(name), parallel, torch.float32)


def build_from(
    model: PreTrainedModel, parallel: TensorParallel, dtype: torch.dtype, quantization: Quantization = "none"
) -> Decoder:
    spec = from_hf_config(model.config.to_dict() | {"architectures": [type(model).__name__]})
    tensors = revert_weight_conversion(model, dict(model.state_dict()))  # as `save_pretrained` writes them
    return build_model(spec, MemoryWeights(tensors, spec), dtype, parallel.rank, parallel, quantization=quantization)


class Sequences:
    """Runs greedy sequences through one rank's runner, with scattered blocks and a poisoned pool."""

    def __init__(self, name: str, parallel: TensorParallel | None = None, num_blocks: int = 400) -> None:
        parallel = parallel or SingleRank()
        self.model = build(name, parallel)
        layout = self.model.spec.kv_layout(BLOCK, "float32", parallel.size)
        self.storage = RankStorage(one_group(layout, num_blocks), "cpu", poison=True)
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
