"""A real gRPC server over a `Service` without a model: one token per character, steered by the request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from kvferry.cluster.api.grpc import ApiServer, make_server
from kvferry.cluster.service import (
    ChatMessage,
    ClusterView,
    Completed,
    Delta,
    GenerateCall,
    GroupView,
    ModelView,
    Operation,
    OperationView,
    Started,
    StreamEvent,
)
from kvferry.runtime.errors import InvalidArgument, KvferryError
from kvferry.runtime.request import Logprob, Usage, check_token_ids
from kvferry.runtime.timeline import Timeline

VOCAB = 1 << 17
GROUP = GroupView(
    group="prefill-0",
    role="prefill",
    state="live",
    epoch=3,
    tp_size=2,
    num_blocks=100,
    num_free_blocks=60,
    num_leased_blocks=0,
    num_waiting=1,
    num_running=2,
    hit_rate=0.25,
    prompt_tokens=1000,
    cached_tokens=250,
    output_tokens=77,
    received_bytes=1 << 33,
    num_preemptions=4,
    pids=[11, 12],
    drafted_tokens=40,
    accepted_tokens=30,
)
CLUSTER = ClusterView(model="toy", groups=[GROUP], num_requests=1, num_finished=2, num_failed=3, num_resumed=4)
OPERATED = OperationView(
    seconds=1.5, started=["decode-1@4"], ended=["decode-0@2"], num_moved=3, num_rerouted=0, num_resumed=1
)
MODEL = ModelView(
    model="toy",
    dtype="float32",
    vocab_size=VOCAB,
    max_context=512,
    block_size=16,
    eos_token_ids=[0],
    has_chat_template=True,
)
TIMELINE = Timeline(received_ns=1, first_token_ns=5, finished_ns=9, attempts=2)


class FakeService:
    """The output repeats the prompt's tokens. "hang" in a prompt: waits after the first delta. "flood": never ends."""

    def __init__(self) -> None:
        self.calls: list[GenerateCall] = []
        self.failure: Exception | None = None
        """Raised after the first delta, or before any if `fail_first`."""
        self.fail_first = False
        self.closed = asyncio.Event()
        """A stream was closed before its end."""
        self.num_flooded = 0
        self.findings: list[str] = []
        self.operations: list[Operation] = []

    async def generate(self, call: GenerateCall) -> AsyncIterator[StreamEvent]:
        self.calls.append(call)
        if self.failure is not None and self.fail_first:
            raise self.failure
        whole = False
        try:
            async for event in self._events(call):
                yield event
            whole = True
        finally:
            if not whole:
                self.closed.set()

    async def _events(self, call: GenerateCall) -> AsyncIterator[StreamEvent]:
        if call.messages is not None:
            tokens = self.tokenize_chat(call.messages)
        elif call.prompt is not None:
            tokens = self.tokenize(call.prompt, False)
        else:
            tokens = call.token_ids or []
            check_token_ids("token_ids", tokens, VOCAB)
        yield Started(call.request_id, tokens)
        while call.prompt == "flood":
            self.num_flooded += 1
            yield Delta(0, [1], "x" * (64 << 10))
        num = min(call.sampling.max_tokens, len(tokens))
        for position in range(num):
            for index in range(call.sampling.n):
                yield self._delta(call, index, tokens[position], position == num - 1)
            if position == 0 and self.failure is not None:
                raise self.failure
            if call.prompt is not None and "hang" in call.prompt:
                await asyncio.sleep(60)
        yield Completed(Usage(len(tokens), 1, num * call.sampling.n, 2, 4096), TIMELINE)

    @staticmethod
    def _delta(call: GenerateCall, index: int, token: int, last: bool) -> Delta:
        logprobs = None if call.sampling.logprobs is None else [Logprob(token, -0.5, [(token, -0.5), (1, -1.5)])]
        return Delta(index, [token], chr(token), logprobs, "length" if last else None)

    def tokenize(self, text: str, add_special_tokens: bool) -> list[int]:
        return [1] * add_special_tokens + [ord(c) for c in text]

    def tokenize_chat(self, messages: list[ChatMessage]) -> list[int]:
        for i, message in enumerate(messages):
            if message.role not in ("system", "user", "assistant"):
                raise InvalidArgument(f"messages[{i}].role", message.role, "is refused by the model's chat template")
        return [ord(c) for message in messages for c in message.content]

    def detokenize(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        check_token_ids("token_ids", token_ids, VOCAB)
        return "".join(chr(t) for t in token_ids if t != 1 or not skip_special_tokens)

    def model(self) -> ModelView:
        return MODEL

    async def cluster(self) -> ClusterView:
        if isinstance(self.failure, KvferryError):
            raise self.failure
        return CLUSTER

    async def operate(self, operation: Operation) -> OperationView:
        if self.failure is not None:
            raise self.failure
        self.operations.append(operation)
        return OPERATED

    async def audit(self) -> list[str]:
        return self.findings


@pytest.fixture
def service() -> FakeService:
    return FakeService()


@pytest.fixture
async def api(service: FakeService) -> AsyncIterator[ApiServer]:
    server = make_server(service, "127.0.0.1", 0)
    await server.start()
    server.set_ready(True)
    yield server
    await server.stop(0)


@pytest.fixture
def target(api: ApiServer) -> str:
    return f"127.0.0.1:{api.port}"
