"""Clients of a kvferry server, for threads (`Client`) and for asyncio (`AsyncClient`). Imports neither torch nor Ray.

    with kvferry.Client("127.0.0.1:50051") as client:
        print(client.generate("Once upon a time", max_tokens=32).outputs[0].text)

Failures raise the error class that the server raised (`runtime/errors.py`), with its message.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from typing import Any, Self, TypedDict, Unpack

import grpc
import msgspec
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvferry.cluster.api import convert
from kvferry.cluster.api.channel import INFERENCE, UNARY_TIMEOUT_S, Connection
from kvferry.cluster.config import ClientTls
from kvferry.cluster.service import (
    ChatMessage,
    ClusterView,
    Delta,
    ModelView,
    OperationView,
    Started,
    StreamEvent,
)
from kvferry.runtime.errors import GroupUnavailable
from kvferry.runtime.ids import RequestId
from kvferry.runtime.request import CompletionOutput, RequestOutput, SamplingParams

Messages = Sequence[Mapping[str, str] | ChatMessage]
"""`{"role": "user", "content": "…"}`"""
Prompt = str | Messages | Sequence[int]


class GenerateOptions(TypedDict, total=False):
    """Keyword arguments of `generate` and `stream`. Fields of `SamplingParams` win over the instance `sampling`."""

    messages: Messages
    token_ids: Sequence[int]
    timeout_s: float | None
    priority: int | None
    cache_salt: str | None
    request_id: str | None
    retry_budget: int | None
    n: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int | None
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    max_tokens: int
    min_tokens: int
    logprobs: int | None
    skip_special_tokens: bool


OPERATION_TIMEOUT_S = 3600.0
"""Of calls that change the deployment, unless the client has its own: new groups load the model first."""
_WAIT_ON = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


class AuditReport(msgspec.Struct, frozen=True):
    findings: list[str]
    """Empty: all is well."""


class Collector:
    """Puts the events of one stream together to a `RequestOutput`."""

    def __init__(self) -> None:
        self.output = RequestOutput(request_id=RequestId(""), prompt_token_ids=[], num_cached_tokens=0, outputs=[])
        self._by_index: dict[int, CompletionOutput] = {}

    def add(self, event: StreamEvent) -> None:
        if isinstance(event, Delta):
            self._add_delta(event)
        elif isinstance(event, Started):
            self.output.request_id = event.request_id
            self.output.prompt_token_ids = event.prompt_token_ids
        else:
            self.output.usage = event.usage
            self.output.timeline = event.timeline
            self.output.num_cached_tokens = event.usage.num_cached_tokens
            self.output.outputs = [self._by_index[index] for index in sorted(self._by_index)]

    def _add_delta(self, delta: Delta) -> None:
        output = self._by_index.get(delta.index)
        if output is None:
            output = self._by_index[delta.index] = CompletionOutput(delta.index, "", [], None, None)
        output.text += delta.text
        output.token_ids.extend(delta.token_ids)
        if delta.logprobs is not None:
            output.logprobs = (output.logprobs or []) + delta.logprobs
        output.finish_reason = delta.finish_reason or output.finish_reason


class _Base:
    """What both clients do before and after a call."""

    def __init__(self, connection: Connection, timeout_s: float | None) -> None:
        self._connection = connection
        self._timeout_s = timeout_s

    def _request(
        self, prompt: Prompt | None, sampling: SamplingParams | None, options: Mapping[str, Any]
    ) -> tuple[Any, float | None]:
        """The message and the deadline of a call."""
        rest = dict(options)
        messages, token_ids, timeout_s = (rest.pop(key, None) for key in ("messages", "token_ids", "timeout_s"))
        fields = {key: rest.pop(key, None) for key in ("priority", "cache_salt", "request_id", "retry_budget")}
        request = convert.make_request(prompt, messages, token_ids, sampling, fields, rest)
        return request, self._timeout_s if timeout_s is None else timeout_s

    def _never_ready(self, timeout_s: float, why: str) -> GroupUnavailable:
        return GroupUnavailable(f"{self._connection.target} was not ready within {timeout_s:g} s: {why}")


class Client(_Base):
    """For threads; one client serves many. `token`: the server's bearer token. `tls`: `None` for plain text.

    `timeout_s`: default deadline of every call; without it generation has none and the other calls have 60 s.
    """

    def __init__(
        self, target: str, *, token: str | None = None, tls: ClientTls | None = None, timeout_s: float | None = None
    ) -> None:
        super().__init__(Connection(grpc, target, token, tls), timeout_s)

    def generate(
        self, prompt: Prompt | None = None, sampling: SamplingParams | None = None, **options: Unpack[GenerateOptions]
    ) -> RequestOutput:
        """The whole answer. `prompt`: a text, chat messages or token ids (or use `messages=`, `token_ids=`)."""
        collector = Collector()
        for event in self.stream(prompt, sampling, **options):
            collector.add(event)
        return collector.output

    def stream(
        self, prompt: Prompt | None = None, sampling: SamplingParams | None = None, **options: Unpack[GenerateOptions]
    ) -> Generator[StreamEvent, None, None]:
        """One `Started`, any number of `Delta`s, one `Completed`. Closing the generator cancels the request."""
        request, timeout_s = self._request(prompt, sampling, options)
        return self._events(request, timeout_s)

    def _events(self, request: Any, timeout_s: float | None) -> Generator[StreamEvent, None, None]:
        call, begun = self._connection.call("Generate", request, timeout_s), False
        try:
            for message in call:
                begun = True
                yield convert.to_event(message)
        except grpc.RpcError as failure:
            raise self._connection.error(failure, timeout_s, begun) from None
        finally:
            call.cancel()

    def _unary(self, method: str, request: Any = None, default_timeout_s: float = UNARY_TIMEOUT_S) -> Any:
        timeout_s = default_timeout_s if self._timeout_s is None else self._timeout_s
        try:
            return self._connection.call(method, request, timeout_s)
        except grpc.RpcError as failure:
            raise self._connection.error(failure, timeout_s) from None

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(self._unary("Tokenize", convert.text_request(text, add_special_tokens)).token_ids)

    def tokenize_chat(self, messages: Messages) -> list[int]:
        """The tokens that `generate(messages=…)` would prefill."""
        return list(self._unary("Tokenize", convert.chat_request(messages)).token_ids)

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return str(self._unary("Detokenize", convert.detokenize_request(token_ids, skip_special_tokens)).text)

    def model(self) -> ModelView:
        return convert.to_model(self._unary("GetModel"))

    def cluster(self) -> ClusterView:
        return convert.to_cluster(self._unary("GetCluster"))

    def audit(self) -> AuditReport:
        return AuditReport(list(self._unary("Audit").findings))

    def drain(self, group: str, *, drain_s: float | None = None) -> OperationView:
        """Takes a group out of service; its sequences move within `drain_s` (60), or are computed again elsewhere."""
        return self._operate("Drain", group=group, timeout_s=drain_s)

    def scale(
        self,
        *,
        prefill: int | None = None,
        decode: int | None = None,
        mixed: int | None = None,
        drain_s: float | None = None,
    ) -> OperationView:
        """Adds or removes groups, until there are so many. Raises `ResourceMissing`; then nothing has changed."""
        return self._operate("Scale", prefill=prefill, decode=decode, mixed=mixed, timeout_s=drain_s)

    def set_role(self, group: str, role: str) -> OperationView:
        """`role`: prefill, decode or mixed. The group keeps its cache and what runs there."""
        return self._operate("SetRole", group=group, role=role)

    def restart(self, *, drain_s: float | None = None) -> OperationView:
        """Replaces all groups by new processes, one group after another, while they serve."""
        return self._operate("Restart", timeout_s=drain_s)

    def _operate(self, method: str, **fields: Any) -> OperationView:
        request = convert.operation_request(method, **fields)
        return convert.to_operation_view(self._unary(method, request, OPERATION_TIMEOUT_S))

    def wait_ready(self, timeout_s: float) -> None:
        """Returns once the server can generate. Raises `GroupUnavailable` when the time is over."""
        deadline = time.monotonic() + timeout_s
        why = "nobody answered"
        watch = health_pb2_grpc.HealthStub(self._connection.channel).Watch
        while (left := deadline - time.monotonic()) > 0:
            call = watch(health_pb2.HealthCheckRequest(service=INFERENCE), timeout=left, wait_for_ready=True)
            try:
                for answer in call:
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        return
                    why = "it is still starting"
            except grpc.RpcError as failure:
                if failure.code() not in _WAIT_ON:
                    raise self._connection.error(failure, timeout_s) from None
            finally:
                call.cancel()
        raise self._never_ready(timeout_s, why)

    def close(self) -> None:
        """Cancels what is running."""
        self._connection.channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncClient(_Base):
    """As `Client`, for asyncio. Make and use it in one event loop."""

    def __init__(
        self, target: str, *, token: str | None = None, tls: ClientTls | None = None, timeout_s: float | None = None
    ) -> None:
        super().__init__(Connection(grpc.aio, target, token, tls), timeout_s)

    async def generate(
        self, prompt: Prompt | None = None, sampling: SamplingParams | None = None, **options: Unpack[GenerateOptions]
    ) -> RequestOutput:
        """As `Client.generate`."""
        collector = Collector()
        async with contextlib.aclosing(self.stream(prompt, sampling, **options)) as events:
            async for event in events:
                collector.add(event)
        return collector.output

    def stream(
        self, prompt: Prompt | None = None, sampling: SamplingParams | None = None, **options: Unpack[GenerateOptions]
    ) -> AsyncGenerator[StreamEvent, None]:
        """As `Client.stream`. Leave early through `contextlib.aclosing` or `break` and `aclose()`."""
        request, timeout_s = self._request(prompt, sampling, options)
        return self._events(request, timeout_s)

    async def _events(self, request: Any, timeout_s: float | None) -> AsyncGenerator[StreamEvent, None]:
        call, begun = self._connection.call("Generate", request, timeout_s), False
        try:
            async for message in call:
                begun = True
                yield convert.to_event(message)
        except grpc.RpcError as failure:
            raise self._connection.error(failure, timeout_s, begun) from None
        finally:
            call.cancel()

    async def _unary(self, method: str, request: Any = None, default_timeout_s: float = UNARY_TIMEOUT_S) -> Any:
        timeout_s = default_timeout_s if self._timeout_s is None else self._timeout_s
        try:
            return await self._connection.call(method, request, timeout_s)
        except grpc.RpcError as failure:
            raise self._connection.error(failure, timeout_s) from None

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list((await self._unary("Tokenize", convert.text_request(text, add_special_tokens))).token_ids)

    async def tokenize_chat(self, messages: Messages) -> list[int]:
        """As `Client.tokenize_chat`."""
        return list((await self._unary("Tokenize", convert.chat_request(messages))).token_ids)

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return str((await self._unary("Detokenize", convert.detokenize_request(token_ids, skip_special_tokens))).text)

    async def model(self) -> ModelView:
        return convert.to_model(await self._unary("GetModel"))

    async def cluster(self) -> ClusterView:
        return convert.to_cluster(await self._unary("GetCluster"))

    async def audit(self) -> AuditReport:
        return AuditReport(list((await self._unary("Audit")).findings))

    async def drain(self, group: str, *, drain_s: float | None = None) -> OperationView:
        """As `Client.drain`."""
        return await self._operate("Drain", group=group, timeout_s=drain_s)

    async def scale(
        self,
        *,
        prefill: int | None = None,
        decode: int | None = None,
        mixed: int | None = None,
        drain_s: float | None = None,
    ) -> OperationView:
        """As `Client.scale`."""
        return await self._operate("Scale", prefill=prefill, decode=decode, mixed=mixed, timeout_s=drain_s)

    async def set_role(self, group: str, role: str) -> OperationView:
        """As `Client.set_role`."""
        return await self._operate("SetRole", group=group, role=role)

    async def restart(self, *, drain_s: float | None = None) -> OperationView:
        """As `Client.restart`."""
        return await self._operate("Restart", timeout_s=drain_s)

    async def _operate(self, method: str, **fields: Any) -> OperationView:
        request = convert.operation_request(method, **fields)
        return convert.to_operation_view(await self._unary(method, request, OPERATION_TIMEOUT_S))

    async def wait_ready(self, timeout_s: float) -> None:
        """As `Client.wait_ready`."""
        deadline = time.monotonic() + timeout_s
        why = "nobody answered"
        watch = health_pb2_grpc.HealthStub(self._connection.channel).Watch
        while (left := deadline - time.monotonic()) > 0:
            call = watch(health_pb2.HealthCheckRequest(service=INFERENCE), timeout=left, wait_for_ready=True)
            try:
                async for answer in call:
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        return
                    why = "it is still starting"
            except grpc.RpcError as failure:
                if failure.code() not in _WAIT_ON:
                    raise self._connection.error(failure, timeout_s) from None
            finally:
                call.cancel()
        raise self._never_ready(timeout_s, why)

    async def close(self) -> None:
        """Cancels what is running."""
        await self._connection.channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
