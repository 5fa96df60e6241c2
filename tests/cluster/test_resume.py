"""A group dies after each of the first tokens: what the client gets is what it would have got, to the last logarithm.

Real engines over a toy runner, in virtual time, with the real text side (detokenizer, stop strings) on top.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models

from kvferry.cluster.answers import Answer
from kvferry.cluster.budgets import CoordinatorConfig
from kvferry.cluster.client import Collector
from kvferry.cluster.messages import StepFrame
from kvferry.cluster.registry import RegistryConfig
from kvferry.cluster.router import RouterConfig
from kvferry.cluster.service import Completed
from kvferry.runtime.config import SchedulerConfig
from kvferry.runtime.ids import Peer, RequestId
from kvferry.runtime.request import Logprob, Request, RequestOutput, SamplingParams
from kvferry.runtime.step import SampledToken, SampleInput, StepPlan, StepResult
from kvferry.runtime.text.tokenizer import Tokenizer
from kvferry.runtime.timeline import Cause, Timeline
from tests.cluster.test_real_engines import Case, RealGroup
from tests.support.toy_engine import VOCAB, toy_output

pytestmark = pytest.mark.core
PROMPT = [7, 3, 9, 1, 4, 4, 8, 2, 6, 11, 13]
NUM_TOKENS = 14
CHARS = 6
"""Of each token's text."""


def letters(token: int) -> str:
    return f"{token:06b}".replace("0", "a").replace("1", "b")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    raw = tokenizers.Tokenizer(models.WordLevel({letters(token): token for token in range(VOCAB)}, letters(0)))
    raw.decoder = decoders.Fuse()
    return Tokenizer(raw, eos_token_ids=[], special={}, chat_template=None)


class LoggingGroup(RealGroup):
    """Log-probabilities that are a function of the token and its position, so that a swapped one shows."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.engine._execute = self.execute

    def execute(self, plan: StepPlan, samples: list[SampleInput]) -> StepResult:
        sampled = self.runner.execute(plan, samples).sampled
        return StepResult(
            [
                SampledToken(drawn.token_id, Logprob(drawn.token_id, -given.position / 64, [(drawn.token_id, -0.5)]))
                for drawn, given in zip(sampled, samples, strict=True)
            ]
        )


class OneRequest(Case):
    """One request on `layout`; `strike(case, number of tokens of sequence 0)` is called as each of them is read."""

    def __init__(self, toy: SimpleNamespace, layout: list[tuple[str, str]], **config: Any) -> None:
        super().__init__(toy, 3)
        self.faulty, self.loss, self.layout = False, 0.0, layout
        self.world = toy.World(
            CoordinatorConfig(retry_pause_s=0.01, **config),
            RegistryConfig(unreachable_after_s=0.8, abandon_after_s=2.0),
            RouterConfig(disaggregate="always"),
        )
        self._arrive = self.world.arrive
        self.world.arrive = self.arrive

    def arrive(self, peer: Peer, frame: StepFrame) -> None:
        """What a dead group had still to say is lost."""
        if any(group.peer == peer and group.alive for group in self.groups):
            self._arrive(peer, frame)

    def group_of(self, index: int) -> RealGroup:
        (record,) = self.world.coordinator._records.values()
        leg = record.sequences[index].leg
        assert leg is not None
        return next(group for group in self.groups if group.peer == leg.peer)

    def add(self, group: RealGroup) -> None:
        if type(group) is RealGroup:  # the successor of one that was killed
            group = LoggingGroup(self, group.peer.group, group.role, group.num_blocks, group.scheduler)
        super().add(group)

    async def run(
        self, request: Request, tokenizer: Tokenizer, strike: Callable[[OneRequest, int], None]
    ) -> RequestOutput:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: self.failures.append(context))
        async with self.world as world, asyncio.TaskGroup() as self.lives:
            for name, role in self.layout:
                self.add(LoggingGroup(self, name, role, 40, SchedulerConfig(max_batch_tokens=8)))
            try:
                output = await self.read(request, tokenizer, strike)
            finally:
                self.over = True
                await world.clock.sleep(5)
                await self.check_rest()
                for group in self.groups:
                    group.die()
        return output

    async def read(
        self, request: Request, tokenizer: Tokenizer, strike: Callable[[OneRequest, int], None]
    ) -> RequestOutput:
        collector = Collector()
        stream = self.world.coordinator.start(request)
        async with aclosing(stream):
            answer = Answer(request, tokenizer, stream.stop)
            async for event in stream:
                for delta in answer.take([event]):
                    collector.add(delta)
                if event.key.index == 0 and event.token_id is not None and event.finish_reason is None:
                    strike(self, event.position + 1)
        collector.add(Completed(stream.usage, stream.timeline))
        return collector.output


def make_request(stop: list[str], **fields: Any) -> Request:
    sampling = SamplingParams(n=2, max_tokens=NUM_TOKENS, seed=5, stop=stop, logprobs=1, ignore_eos=True)
    return Request(
        request_id=RequestId("r"),
        prompt_token_ids=PROMPT,
        sampling=sampling,
        eos_token_ids=[],
        arrival_ns=1_000_000_000_000,
        **fields,
    )


def half_matched(after: int) -> list[str]:
    """A stop string whose first half is in token `after - 1` of sequence 0, its second half in the next one."""
    text = "".join(map(letters, toy_output(PROMPT, NUM_TOKENS, 5, 0)))
    for half in range(2, 40):
        stop = text[max(0, after * CHARS - half) : after * CHARS + min(half, CHARS)]
        if text.find(stop) == after * CHARS - half:
            return [stop]
    raise AssertionError("no such text")


LAYOUTS = {
    "apart": [("p0", "prefill"), ("d0", "decode")],
    "two decodes": [("p0", "prefill"), ("d0", "decode"), ("d1", "decode")],
    "mixed": [("m0", "mixed"), ("m1", "mixed")],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("with_stop", [False, True])
def test_death_after_each_token(toy: Any, tokenizer: Tokenizer, layout: str, with_stop: bool) -> None:
    """Repeated, lost or changed tokens; a stop string that is missed, or found twice, as its halves came from two
    groups; logarithms shifted by one; tokens counted twice. Fault 39 across a death."""
    for after in range(1, NUM_TOKENS):
        request = make_request(half_matched(after) if with_stop else [])
        reference = toy.run(OneRequest(toy, LAYOUTS[layout]).run(request, tokenizer, lambda case, at: None))

        def strike(case: OneRequest, at: int, after: int = after) -> None:
            if at == after:
                case.kill(case.group_of(0))

        got = toy.run(OneRequest(toy, LAYOUTS[layout]).run(request, tokenizer, strike))
        assert got.outputs == reference.outputs
        assert got.usage is not None
        assert reference.usage is not None
        assert got.usage.num_output_tokens == reference.usage.num_output_tokens
        assert got.usage.num_prompt_tokens == len(PROMPT)
        first = got.outputs[0]
        assert first.finish_reason == ("stop" if with_stop else "length")
        assert [p.token_id for p in first.logprobs or []] == first.token_ids
        assert_tells(got.timeline)


def assert_tells(timeline: Timeline) -> None:
    """One death, seen by one sequence or by both; and the time it cost is accounted for."""
    assert timeline.attempts == 2
    assert {setback.cause for setback in timeline.setbacks} == {Cause.GROUP_DIED}
    assert len({(setback.group, setback.index) for setback in timeline.setbacks}) == len(timeline.setbacks)
    assert timeline.finished_ns is not None
    told_s = sum(timeline.seconds().values())
    assert told_s >= 0.98 * (timeline.finished_ns - timeline.received_ns) / 1e9


def test_deaths_one_after_the_other(toy: Any, tokenizer: Tokenizer) -> None:
    """A resumed sequence that is resumed again begins where the first death left it."""
    request = make_request(half_matched(11))
    layout = LAYOUTS["two decodes"]
    reference = toy.run(OneRequest(toy, layout).run(request, tokenizer, lambda case, at: None))

    def strike(case: OneRequest, at: int) -> None:
        if at in (3, 7, 11):
            case.kill(case.group_of(0))

    got = toy.run(OneRequest(toy, layout).run(request, tokenizer, strike))
    assert got.outputs == reference.outputs
    assert got.timeline.attempts == 4
