"""Requests whose answers are compared, token by token, with those of one engine without a cluster."""

from __future__ import annotations

import random
from contextlib import aclosing

import msgspec

from kvferry.cluster.client import Collector
from kvferry.cluster.service import Delta
from kvferry.runtime.request import RequestOutput, SamplingParams
from tests.support.deployment import Deployment
from tests.support.tiny_model import VOCAB

REQUEST_TIMEOUT_S = 120.0


def tokens(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, VOCAB) for _ in range(count)]


class Call(msgspec.Struct, frozen=True):
    prompt: list[int]
    sampling: SamplingParams


class Stream:
    """One request, read as it comes."""

    def __init__(self, deployment: Deployment, call: Call) -> None:
        self._deployment, self.call = deployment, call
        self.num_tokens = 0
        self.done = False

    async def read(self) -> RequestOutput:
        collector, call = Collector(), self.call
        events = self._deployment.client.stream(call.prompt, call.sampling, timeout_s=REQUEST_TIMEOUT_S)
        async with aclosing(events):
            async for event in events:
                collector.add(event)
                if isinstance(event, Delta):
                    self.num_tokens += len(event.token_ids)
        self.done = True
        return collector.output


def assert_same(got: RequestOutput, wanted: RequestOutput) -> None:
    for ours, theirs in zip(got.outputs, wanted.outputs, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert (ours.text, ours.finish_reason) == (theirs.text, theirs.finish_reason)
        assert [p.token_id for p in ours.logprobs or []] == [p.token_id for p in theirs.logprobs or []]
    assert got.usage is not None
    assert got.usage.num_output_tokens == sum(len(output.token_ids) for output in got.outputs)
