"""The gRPC server and both clients, over a real connection. `conftest.py` has the service behind them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from typing import Any

import grpc
import pytest
import structlog
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

import kvferry
from kvferry.cluster.api.grpc import ApiServer, make_server
from kvferry.cluster.api.methods import SERVICES
from kvferry.cluster.config import ServerOptions
from kvferry.cluster.service import ClusterView, Completed, Delta, ModelView, Started
from kvferry.runtime import errors
from kvferry.runtime.request import CompletionOutput, Logprob, RequestOutput, SamplingParams, Usage

pytestmark = pytest.mark.integration
CLOSES_WITHIN_S = 2.0
GENERATE = "/kvferry.v1.Inference/Generate"


async def raw_generate(channel: Any, message: bytes) -> grpc.RpcError:
    """What gRPC says to a message, byte for byte."""
    with pytest.raises(grpc.RpcError) as caught:
        async for _ in channel.unary_stream(GENERATE)(message, timeout=30):
            pass
    return caught.value


# ---------------------------------------------------------------- what works
async def test_generate(target: str, service: Any) -> None:
    """A part of the answer is lost between the service and `RequestOutput`."""
    async with kvferry.AsyncClient(target) as client:
        got = await client.generate("héy", n=2, logprobs=1, max_tokens=2, request_id="mine")
    logprobs = [Logprob(token, -0.5, [(token, -0.5), (1, -1.5)]) for token in (104, 233)]
    usage = Usage(3, 1, 4, 2, 4096)
    outputs = [CompletionOutput(index, "hé", [104, 233], logprobs, "length") for index in range(2)]
    timeline = got.timeline
    assert got == RequestOutput("mine", [104, 233, 121], 1, outputs, usage, timeline)
    assert (timeline.received_ns, timeline.first_token_ns, timeline.routed_ns, timeline.attempts) == (1, 5, None, 2)


async def test_sync_client_says_the_same(target: str, service: Any) -> None:
    """The two clients differ."""

    def use() -> tuple[Any, ...]:
        with kvferry.Client(target) as client:
            client.wait_ready(5)
            events = list(
                client.stream([97, 98], SamplingParams(max_tokens=2, temperature=0), priority=-3, cache_salt="s")
            )
            output = client.generate(messages=[{"role": "user", "content": "hi"}], temperature=0.0)
            tokens = client.tokenize("a"), client.tokenize("a", add_special_tokens=False)
            chat = client.tokenize_chat([{"role": "user", "content": "hi"}])
            texts = client.detokenize([1, 97]), client.detokenize([1, 97], skip_special_tokens=False)
            return events, output, tokens, chat, texts, client.model(), client.cluster(), client.audit().findings

    service.findings = ["a block without an owner"]
    events, output, tokens, chat, texts, model, cluster, findings = await asyncio.to_thread(use)
    assert [type(event) for event in events] == [Started, Delta, Delta, Completed]
    assert output.outputs[0].text == "hi"
    assert tokens == ([1, 97], [97])
    assert chat == [104, 105]
    assert texts == ("a", "\x01a")
    assert isinstance(model, ModelView)
    assert model == service.model()
    assert isinstance(cluster, ClusterView)
    assert cluster == await service.cluster()
    assert findings == ["a block without an owner"]
    first = service.calls[0]
    assert (first.priority, first.cache_salt, first.token_ids) == (-3, "s", [97, 98])
    assert first.sampling == SamplingParams(max_tokens=2, temperature=0)
    async with kvferry.AsyncClient(target) as client:
        assert await client.tokenize("a") == tokens[0]
        assert await client.tokenize_chat([{"role": "user", "content": "hi"}]) == chat
        assert await client.detokenize([1, 97]) == texts[0]
        assert (await client.model(), await client.cluster()) == (model, cluster)
        assert (await client.audit()).findings == findings


async def test_reflection(target: str) -> None:
    """grpcurl and its like cannot see the API."""

    def look() -> list[str]:
        with grpc.insecure_channel(target) as channel:
            return list(ProtoReflectionDescriptorDatabase(channel).get_services())

    assert set(SERVICES) <= set(await asyncio.to_thread(look))


# ---------------------------------------------------------------- bad input
@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "token_ids"),
        ({"prompt": [1, 1 << 20]}, "token_ids[1]"),
        ({"prompt": [-1]}, "token_ids[0]"),
        ({"prompt": [{"role": "alien", "content": "x"}]}, "messages[0].role"),
        ({"n": 0}, "n"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"timeout_s": -1.0}, "timeout_s"),
    ],
)
async def test_bad_input_costs_others_nothing(target: str, arguments: dict[str, Any], field: str) -> None:
    """Bad input is accepted, unexplained, or disturbs a stream on the same connection."""
    async with kvferry.AsyncClient(target) as client:
        other = client.stream("hang on")
        assert isinstance(await anext(other), Started)
        with pytest.raises(errors.InvalidArgument) as caught:
            await client.generate(**{"prompt": "x", **arguments})
        assert caught.value.field == field
        assert isinstance(await anext(other), Delta)
        await other.aclose()


@pytest.mark.parametrize(
    "message",
    [
        pytest.param(b"\x0a\x02\xff\xfe", id="invalid UTF-8"),
        pytest.param(b"\x0a\x7f", id="truncated"),
        pytest.param(b"\x0a\x01x\x98\x06\x05", id="unknown field"),
        pytest.param(b"", id="empty"),
    ],
)
async def test_malformed_messages(target: str, service: Any, message: bytes) -> None:
    """What is no request ends as UNKNOWN or INTERNAL, or reaches the service."""
    async with grpc.aio.insecure_channel(target) as channel:
        failure = await raw_generate(channel, message)
    assert failure.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert not service.calls


async def test_huge_message(target: str, service: Any) -> None:
    """A message of 64 MiB takes the server's memory, or the connection and its other streams, with it."""
    async with kvferry.AsyncClient(target) as client:
        other = client.stream("hang on")
        assert isinstance(await anext(other), Started)
        with pytest.raises(errors.MessageTooLarge, match="4194304"):
            await client.generate("x" * (64 << 20))
        assert isinstance(await anext(other), Delta)
        await other.aclose()
        assert (await client.generate("fine")).outputs[0].text == "fine"
    assert len(service.calls) == 2


# ---------------------------------------------------------------- endings
async def test_closing_a_stream_cancels(target: str, service: Any) -> None:
    """The gateway goes on generating for a client that left."""
    async with kvferry.AsyncClient(target) as client:
        async with contextlib.aclosing(client.stream("hang")) as events:
            async for event in events:
                if isinstance(event, Delta):
                    break
        await asyncio.wait_for(service.closed.wait(), CLOSES_WITHIN_S)


async def test_closing_a_sync_stream_cancels(target: str, service: Any) -> None:
    """As above, for threads."""

    def use() -> None:
        with kvferry.Client(target) as client:
            events = client.stream("hang")
            next(events)
            events.close()

    await asyncio.to_thread(use)
    await asyncio.wait_for(service.closed.wait(), CLOSES_WITHIN_S)


async def test_cancelling_the_task_cancels(target: str, service: Any) -> None:
    """`asyncio.timeout` around `generate` leaves the request behind."""
    async with kvferry.AsyncClient(target) as client:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await client.generate("hang")
        await asyncio.wait_for(service.closed.wait(), CLOSES_WITHIN_S)


async def test_lost_connection_cancels(target: str, service: Any) -> None:
    """A client that dies without a word keeps its blocks."""
    channel = grpc.aio.insecure_channel(target)
    call = channel.unary_stream(GENERATE)(b"\x0a\x04hang")
    await call.read()
    await channel.close()
    await asyncio.wait_for(service.closed.wait(), CLOSES_WITHIN_S)


async def test_deadline(target: str, service: Any) -> None:
    """The call's deadline does not reach the gateway, or does not end the request."""
    async with kvferry.AsyncClient(target, timeout_s=60) as client:
        with pytest.raises(errors.DeadlineExceeded, match=r"0\.3 s"):
            await client.generate("hang", timeout_s=0.3)
        await asyncio.wait_for(service.closed.wait(), CLOSES_WITHIN_S)
        await client.generate("x")
    assert 0 < service.calls[0].timeout_s < 0.4  # gRPC rounds up
    assert 50 < service.calls[1].timeout_s < 62


@pytest.mark.parametrize("fail_first", [True, False])
@pytest.mark.parametrize("stream", [True, False])
async def test_errors_keep_class_and_words(target: str, service: Any, fail_first: bool, stream: bool) -> None:
    """A failure before or amid a stream, or of a plain call, is raised as another class."""
    service.failure, service.fail_first = errors.QueueFull("4096 requests wait", retry_after_s=0.5), fail_first
    async with kvferry.AsyncClient(target) as client:
        with pytest.raises(errors.QueueFull, match="4096 requests wait") as caught:
            await (client.generate("abc") if stream else client.cluster())
    assert caught.value.retry_after_s == 0.5


async def test_bugs_are_logged_not_told(target: str, service: Any) -> None:
    """An exception's text, which may hold somebody's prompt, reaches a client; or nobody learns of it."""
    service.failure = RuntimeError("secret")
    with structlog.testing.capture_logs() as logs:
        async with kvferry.AsyncClient(target) as client:
            with pytest.raises(errors.KvferryError, match="internal error") as caught:
                await client.generate("abc")
            service.failure = None
            assert (await client.generate("abc")).outputs[0].text == "abc"
    assert "secret" not in str(caught.value)
    (entry,) = logs
    assert (entry["event"], entry["error"], entry["exc_info"]) == ("call_failed", "RuntimeError", True)


async def test_thousands_of_calls_at_once_are_all_taken(target: str, service: Any) -> None:
    """gRPC cancels calls, without a word, of which more than 1 000 arrived before the event loop looked."""
    async with grpc.aio.insecure_channel(target) as channel:
        tokenize = channel.unary_unary("/kvferry.v1.Inference/Tokenize")
        answers = await asyncio.gather(*(tokenize(b"\x0a\x01a") for _ in range(3000)), return_exceptions=True)
    assert {type(answer) for answer in answers} == {bytes}


async def test_slow_client(target: str, service: Any) -> None:
    """A client that does not read makes the server buffer without bound."""
    async with grpc.aio.insecure_channel(target) as channel:
        call = channel.unary_stream(GENERATE)(b"\x0a\x05flood")
        await call.read()
        seen, deadline = -1, time.monotonic() + 10
        while service.num_flooded != seen and time.monotonic() < deadline:
            seen = service.num_flooded
            await asyncio.sleep(0.2)
        assert service.num_flooded == seen < 1000
        call.cancel()
        await asyncio.wait_for(service.closed.wait(), CLOSES_WITHIN_S)


async def test_a_client_that_stops_reading_loses_its_request_and_disturbs_nobody(service: Any) -> None:
    """It holds its request's blocks for ever, holds up others on its connection, or never learns what became of it."""
    server = make_server(service, "127.0.0.1", 0, ServerOptions(slow_reader_s=0.3))
    await server.start()
    async with (
        kvferry.AsyncClient(f"127.0.0.1:{server.port}") as client,
        contextlib.aclosing(client.stream("flood", timeout_s=60)) as stalled,
    ):
        await anext(stalled)
        began = time.monotonic()
        while not service.closed.is_set():
            assert (await client.generate("abc")).outputs[0].text == "abc"
            assert time.monotonic() - began < 10
            await asyncio.sleep(0.02)
        with pytest.raises(errors.ClientTooSlow, match="--slow-reader-s"):
            async for _ in stalled:
                pass
    await server.stop(0)


# ---------------------------------------------------------------- being there
async def test_ready(service: Any) -> None:
    """Clients are sent to a server that is still loading; a watcher that leaves takes the others' news away."""
    server = make_server(service, "127.0.0.1", 0)
    await server.start()
    async with kvferry.AsyncClient(f"127.0.0.1:{server.port}") as client:
        with pytest.raises(errors.GroupUnavailable, match="still starting"):
            await client.wait_ready(0.2)
        async with asyncio.TaskGroup() as tasks:
            waiter = tasks.create_task(client.wait_ready(10))
            leaver = tasks.create_task(client.wait_ready(10))
            await asyncio.sleep(0.1)
            leaver.cancel()
            await asyncio.sleep(0.1)
            assert not waiter.done()
            server.set_ready(True)
        await client.wait_ready(1)
        await server.stop(0)
        with pytest.raises(errors.GroupUnavailable):
            await client.wait_ready(0.2)


async def test_health_per_service(target: str, api: ApiServer) -> None:
    """Balancers ask for a service by name."""
    async with grpc.aio.insecure_channel(target) as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        for name in ("", *SERVICES):
            assert await check(b"\x0a" + bytes([len(name)]) + name.encode()) == b"\x08\x01"
        api.set_ready(False)
        assert await check(b"") == b"\x08\x02"
        with pytest.raises(grpc.RpcError) as caught:
            await check(b"\x0a\x04nope")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_nobody_there() -> None:
    """A user who forgot to start the server is told of a "group"."""
    async with kvferry.AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(errors.GroupUnavailable, match=r"127\.0\.0\.1:1.*kvferry serve"):
            await client.generate("x")
    with pytest.raises(errors.InvalidArgument, match="HOST:PORT"):
        kvferry.Client("localhost")


async def test_closed_client(target: str) -> None:
    """Using a closed client ends in an exception of gRPC's insides."""
    client = kvferry.AsyncClient(target)
    await client.close()
    with pytest.raises(errors.InvalidArgument, match="closed"):
        await client.generate("x")
    sync_client = kvferry.Client(target)
    sync_client.close()
    for use in (sync_client.model, lambda: sync_client.generate("x")):
        with pytest.raises(errors.InvalidArgument, match="closed"):
            use()


async def test_port_in_use(api: ApiServer, service: Any) -> None:
    """Two servers share a port and get half of the calls each (SO_REUSEPORT)."""
    with pytest.raises(errors.InvalidArgument, match="in use") as caught:
        make_server(service, "127.0.0.1", api.port)
    assert caught.value.field == "port"
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(errors.InvalidArgument, match="in use"):
            make_server(service, "127.0.0.1", other.getsockname()[1])


@pytest.mark.parametrize("host", ["no-such-host.invalid", "192.0.2.1"])
async def test_bad_host(service: Any, host: str) -> None:
    """An address that is not ours fails with gRPC's own words, or is bound as 0.0.0.0."""
    with pytest.raises(errors.InvalidArgument) as caught:
        make_server(service, host, 0)
    assert caught.value.field == "host"
