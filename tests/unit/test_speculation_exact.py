"""Speculation with the real sampler over a model of which everything is known: logits depend on the last two tokens."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from kvferry.runtime.config import CacheConfig, EngineConfig, SchedulerConfig, SpeculationConfig
from kvferry.runtime.engine import Engine
from kvferry.runtime.ids import RequestId, SequenceKey
from kvferry.runtime.kv.groups import one_group
from kvferry.runtime.model.sampler import sample
from kvferry.runtime.request import SamplingParams, SequenceRequest, TokenEvent
from kvferry.runtime.step import SampleInput, StepPlan, StepResult
from tests.support.toy_engine import ROOT, toy_address, toy_layout

VOCAB = 8
LOGITS = torch.randn((VOCAB, VOCAB, VOCAB), generator=torch.Generator().manual_seed(3)) * 1.5
"""`[token before the last, last token, next token]`."""


class MarkovEngine:
    def __init__(self, speculation: int) -> None:
        config = EngineConfig(
            cache=CacheConfig(block_size=4, num_blocks=4096),
            scheduler=SchedulerConfig(max_batch_tokens=512),
            speculation=SpeculationConfig(method="ngram" if speculation else "none", max_tokens=speculation or 1),
        )
        self.known: dict[SequenceKey, list[int]] = {}
        self.events: dict[SequenceKey, list[TokenEvent]] = {}
        self.now_ns = 0
        address, groups = toy_address("toy"), one_group(toy_layout(), 4096)
        self.engine = Engine(config, groups, ROOT, address, 1 << 20, self.execute, lambda: self.now_ns)

    def execute(self, plan: StepPlan, samples: list[SampleInput]) -> StepResult:
        self.now_ns += 1_000_000  # whatever is in it: so drafting pays, always
        inputs, wanted = iter(samples), []
        for row in plan.rows:
            for i in range(row.num_samples):
                tokens = row.token_ids[: len(row.token_ids) - row.num_samples + 1 + i]
                one = next(inputs)
                sequence = self.engine.scheduler.get(one.key)
                assert sequence is not None
                history = [*sequence.tokens, *row.draft[:i]]
                assert history[-len(tokens) :] == tokens, "history and row disagree"
                if one.params.penalises:
                    assert history == [*one.prompt_token_ids, *one.output_token_ids], "the sampler sees another history"
                wanted.append(LOGITS[history[-2], history[-1]])
        return StepResult(sample(torch.stack(wanted), samples) if wanted else [])

    def run(self, params: list[SamplingParams]) -> dict[SequenceKey, list[TokenEvent]]:
        for i, one in enumerate(params):
            key = SequenceKey(RequestId(f"r{i}"), 0, 1)
            self.events[key] = []
            self.engine.submit(
                SequenceRequest(key=key, prompt_token_ids=[i % VOCAB, 1, 2], sampling=one, eos_token_ids=[]), 0
            )
        while self.engine.has_work():
            for event in self.engine.step(0).tokens:
                assert event.error_label is None
                self.events[event.key].append(event)
        return self.events


PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {},
    "filtered": {"temperature": 0.6, "top_k": 5, "top_p": 0.9, "min_p": 0.02},
    "penalties": {"temperature": 0.7, "repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.05},
    "greedy-penalties": {"temperature": 0.0, "frequency_penalty": 0.1},
    "stops": {"temperature": 0.8, "stop_token_ids": [3], "min_tokens": 20},
    "bias": {"temperature": 0.7, "logit_bias": {1: 2.0}},
}


@pytest.mark.parametrize("name", PARAMS)
def test_speculation_changes_no_token(name: str) -> None:
    """Fault: history, position, ban or seed of a drafted position differ from those that a single step would have."""
    params = [SamplingParams(seed=i, max_tokens=120, logprobs=2, **PARAMS[name]) for i in range(12)]
    plain, guessing = MarkovEngine(0), MarkovEngine(5)
    expected, got = plain.run(params), guessing.run(params)
    told = {
        key: [msgspec.structs.replace(e, begin_ns=None, end_ns=None) for e in events] for key, events in got.items()
    }
    for key, events in expected.items():
        assert told[key] == [msgspec.structs.replace(e, begin_ns=None, end_ns=None) for e in events]
    load = guessing.engine.load()
    assert 0 < load.accepted_tokens_total < load.drafted_tokens_total, "nothing was accepted, or nothing rejected"
    assert plain.engine.load().drafted_tokens_total == 0


def test_distribution_is_the_models() -> None:
    """Fault: accepted tokens are more frequent than the model says, as with a rule that favours drafts.

    Pearson's chi-square over 64 contexts with 7 degrees of freedom each; it is nearly normal with so many.
    """
    engine = MarkovEngine(5)
    events = engine.run([SamplingParams(seed=i, max_tokens=1_700) for i in range(60)])
    counts = np.zeros((VOCAB, VOCAB, VOCAB))
    for i, (_, one) in enumerate(sorted(events.items(), key=lambda item: int(item[0].request_id[1:]))):
        tokens = [i % VOCAB, 1, 2, *(event.token_id for event in one if event.token_id is not None)]
        np.add.at(counts, (tokens[1:-2], tokens[2:-1], tokens[3:]), 1)
    draws = counts.sum()
    expected = torch.softmax(LOGITS, -1).double().numpy() * counts.sum(axis=-1, keepdims=True)
    told = expected >= 5  # the approximation needs some in each cell
    statistic = float((((counts - expected) ** 2) / np.where(told, expected, 1))[told].sum())
    freedom = int(told.sum()) - VOCAB * VOCAB
    load = engine.engine.load()
    assert draws >= 100_000
    assert load.accepted_tokens_total > 5_000, "too little came from drafts for this to say anything"
    assert load.drafted_tokens_total - load.accepted_tokens_total > 5_000
    assert abs(statistic - freedom) < 4 * math.sqrt(2 * freedom), (statistic, freedom)
