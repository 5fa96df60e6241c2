"""Clients of a run, and the judgement of what each got."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import msgspec

from kvferry.cluster.legs import engine_id
from kvferry.cluster.sim.faults import PlannedRequest, Scenario
from kvferry.cluster.sim.gateway import SimGateway
from kvferry.cluster.sim.model import expected, logprob_of
from kvferry.cluster.sim.trace import Trace
from kvferry.cluster.stream import RequestStream
from kvferry.runtime.errors import (
    Cancelled,
    ClientTooSlow,
    DeadlineExceeded,
    GroupUnavailable,
    InvalidArgument,
    KvferryError,
    QueueFull,
    RetriesExhausted,
)
from kvferry.runtime.ids import RequestId
from kvferry.runtime.request import FinishReason, Request, SamplingParams, TokenEvent, Usage

DEADLINE_SLACK_NS = 2_000_000
"""Between a deadline and the end that it brings."""


class Client:
    """One request: sent, read as planned, judged token for token while it is read."""

    def __init__(
        self, plan: PlannedRequest, limits: Scenario, trace: Trace, num_cached: Callable[[RequestId], int | None]
    ) -> None:
        """`num_cached`: of a request's prompt, the tokens that nobody computed, as far as that is known for sure."""
        self.plan = plan
        self.outcome = "not sent"
        self.tokens: list[list[int]] = [[] for _ in range(plan.n)]
        self._ended: list[FinishReason | None] = [None] * plan.n
        self._limits = limits
        self._windows = limits.windows
        self._trace = trace
        self._num_cached = num_cached
        self._stopped = False
        self._left = False
        self._truth: list[list[int]] = []

    async def run(self, gateway: SimGateway) -> None:
        plan = self.plan
        request = self._request(gateway.clock.now_ns())
        self._engine_id = engine_id(gateway.name, request.request_id)
        try:
            stream = gateway.coordinator.start(request)
        except InvalidArgument:
            self._ends("refused: its id is in flight")
            return
        except (QueueFull, GroupUnavailable) as error:
            self._ends(f"refused: {error.label}")
            return
        self.outcome = "running"
        self._truth = [expected(request, index, self._windows) for index in range(plan.n)]
        self._trace.note("client", plan.name)
        leave = None
        if plan.behaviour.close_at_s is not None:
            leave = asyncio.get_running_loop().call_later(plan.behaviour.close_at_s, self._leave, stream)
        try:
            async with contextlib.aclosing(stream):
                await self._read(stream, request)
        except asyncio.CancelledError:
            if gateway.process.alive:
                raise
            self._ends("its gateway died")
        finally:
            if leave is not None:
                leave.cancel()

    def _request(self, now_ns: int) -> Request:
        plan = self.plan
        return Request(
            request_id=RequestId(plan.name),
            prompt_token_ids=plan.prompt,
            sampling=SamplingParams(
                n=plan.n,
                max_tokens=plan.max_tokens,
                min_tokens=plan.min_tokens,
                seed=plan.seed,
                logprobs=1 if plan.logprobs else None,
            ),
            eos_token_ids=plan.eos,
            cache_salt=plan.salt,
            priority=plan.priority,
            arrival_ns=now_ns,
            deadline_ns=None if plan.deadline_s is None else now_ns + int(plan.deadline_s * 1e9),
        )

    async def _read(self, stream: RequestStream, request: Request) -> None:
        behaviour = self.plan.behaviour
        num_read = 0
        try:
            async for event in stream:
                self._take(event)
                num_read += 1
                if behaviour.close_after is not None and num_read > behaviour.close_after:
                    self._leave(stream)
                if behaviour.stop_after is not None and len(self.tokens[0]) == behaviour.stop_after:
                    self._stop(stream)
                if behaviour.pause_s:
                    if num_read == 1:
                        self._trace.fault("slow client", self.plan.name)
                    await asyncio.sleep(behaviour.pause_s)
                if self._left:
                    break
        except KvferryError as error:
            self._judge_error(error, stream, request)
        else:
            self._judge_end(stream)
        finished_ns, deadline_ns = stream.timeline.finished_ns, request.deadline_ns
        if deadline_ns is not None and finished_ns is not None and finished_ns > deadline_ns + DEADLINE_SLACK_NS:
            self._wrong(f"ended {(finished_ns - deadline_ns) / 1e9:.3f} s after its deadline")

    def _leave(self, stream: RequestStream) -> None:
        if self.outcome == "running" and not self._left:
            self._left = True
            if stream.timeline.finished_ns is None:
                self._trace.fault("cancel", self.plan.name)
            stream.close()

    def _stop(self, stream: RequestStream) -> None:
        if not self._stopped:
            self._stopped = True
            if self._ended[0] is None:
                self._trace.fault("stop string", self.plan.name)
            stream.stop(0)

    # ------------------------------------------------------------ judgement
    def _take(self, event: TokenEvent) -> None:
        index, tokens = event.key.index, self.tokens[event.key.index]
        truth = self._truth[index]
        if self._ended[index] is not None:
            self._wrong(f"sequence {index} goes on after its end")
        if self._stopped and index == 0:
            self._wrong("sequence 0 goes on after it was stopped")
        if event.token_id is not None:
            if event.position != len(tokens):
                self._wrong(f"sequence {index}: position {event.position} after {len(tokens)} tokens")
            if [*tokens, event.token_id] != truth[: len(tokens) + 1]:
                self._wrong(f"sequence {index}: {[*tokens, event.token_id]} instead of {truth}")
            if self.plan.logprobs and (
                event.logprob is None or event.logprob.logprob != logprob_of(event.token_id, event.position)
            ):
                self._wrong(f"sequence {index}: logprob {event.logprob} at {event.position}")
            tokens.append(event.token_id)
        self._ended[index] = event.finish_reason
        if event.finish_reason is not None:
            by_length = len(truth) == self.plan.max_tokens and truth[-1] not in self.plan.eos
            wanted = FinishReason.LENGTH if by_length else FinishReason.STOP
            if event.finish_reason is not wanted or len(tokens) != len(truth):
                self._wrong(f"sequence {index} ended with {event.finish_reason} after {len(tokens)} of {len(truth)}")

    def _judge_end(self, stream: RequestStream) -> None:
        if self._left:
            self._ends("cancelled by its client")
            return
        for index, reason in enumerate(self._ended):
            if reason is None and not (self._stopped and index == 0):
                self._wrong(f"sequence {index} never ended")
        self._judge_usage(stream.usage)
        self._ends("complete")
        if stream.timeline.attempts > 1:
            self._trace.observed["request outlived a loss"] += 1

    def _judge_usage(self, usage: Usage) -> None:
        num_output = sum(len(tokens) for tokens in self.tokens)
        if usage.num_prompt_tokens != len(self.plan.prompt) or usage.num_output_tokens != num_output:
            self._wrong(f"usage {usage} for {len(self.plan.prompt)} + {num_output} tokens")
        if not 0 <= usage.num_cached_tokens < max(1, usage.num_prompt_tokens):
            self._wrong(f"usage: {usage.num_cached_tokens} of {usage.num_prompt_tokens} prompt tokens cached")
        truth = self._num_cached(self._engine_id)
        if truth is not None and usage.num_cached_tokens != truth:
            self._wrong(f"usage: {usage.num_cached_tokens} prompt tokens cached, in truth {truth}")

    def next_turn(self) -> PlannedRequest | None:
        """What it asks next, with the answer as part of the prompt."""
        plan = self.plan
        if self.outcome != "complete" or not plan.turns:
            return None
        turn = plan.turns[0]
        self._trace.observed["another turn"] += 1
        return msgspec.structs.replace(
            plan,
            name=f"{plan.name}+",
            at_s=turn.think_s,
            gateway=plan.gateway + 1,
            prompt=[*plan.prompt, *self.tokens[0], *turn.message],
            n=1,
            max_tokens=turn.max_tokens,
            min_tokens=0,
            turns=plan.turns[1:],
        )

    def _judge_error(self, error: KvferryError, stream: RequestStream, request: Request) -> None:
        """Every error needs a cause that really happened."""
        finished_ns = stream.timeline.finished_ns or 0
        waited_ns = finished_ns - stream.timeline.received_ns
        if isinstance(error, Cancelled) and self._left:
            self._ends("cancelled by its client")
        elif isinstance(error, DeadlineExceeded):
            deadline_ns = request.deadline_ns
            if deadline_ns is None or finished_ns < deadline_ns - DEADLINE_SLACK_NS:
                self._wrong(f"ended early: {error}; deadline {deadline_ns}, now {finished_ns}")
            self._trace.fault("deadline", self.plan.name)
            self._ends("deadline")
        elif isinstance(error, ClientTooSlow) and self.plan.behaviour.pause_s:
            self._trace.fault("client too slow", self.plan.name)
            self._ends(error.label)
        elif self._may_give_up(error, stream.timeline.attempts, waited_ns):
            self._given_up(error)
        else:
            self._wrong(f"ended with {type(error).__name__}: {error}")

    def _may_give_up(self, error: KvferryError, attempts: int, waited_ns: int) -> bool:
        if isinstance(error, GroupUnavailable):
            return waited_ns >= self._limits.unavailable_timeout_s * 1e9
        return isinstance(error, RetriesExhausted | QueueFull) and attempts > self._limits.retry_budget

    def _given_up(self, error: KvferryError) -> None:
        if not self._limits.faults and not isinstance(error, QueueFull):
            self._wrong(f"given up although nothing happened: {error}")
        self._trace.fault(f"given up: {error.label}", self.plan.name)
        self._ends(error.label)

    def _ends(self, outcome: str) -> None:
        if self.outcome not in ("not sent", "running"):
            self._wrong(f"ended twice: {self.outcome}, then {outcome}")
        self.outcome = outcome
        self._trace.note("client ends", self.plan.name, outcome, sum(map(len, self.tokens)))

    def _wrong(self, what: str) -> None:
        self._trace.failed(f"request {self.plan.name}: {what}")
