"""What goes over the wire must come out as it went in; what cannot, must be refused by name."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cluster.api import convert
from kvferry.cluster.client import GenerateOptions
from kvferry.cluster.service import (
    ChatMessage,
    ClusterView,
    Completed,
    Delta,
    GenerateCall,
    GroupView,
    ModelView,
    Started,
    StreamEvent,
)
from kvferry.proto import kvferry_pb2 as pb
from kvferry.runtime.errors import InvalidArgument, KvferryError
from kvferry.runtime.ids import RequestId
from kvferry.runtime.request import Logprob, SamplingParams, Usage
from kvferry.runtime.timeline import Cause, Phase, Setback, Span, Timeline

TOKEN = st.integers(0, (1 << 31) - 1)
TEXT = st.text(max_size=20)  # hypothesis makes no lone surrogates by default in utf-8 mode
COUNT = st.integers(0, 1 << 62)
FLOAT32 = st.floats(allow_nan=False, width=32)
SAMPLING = st.builds(
    SamplingParams,
    n=st.integers(1, 128),
    temperature=st.floats(0, 100),
    top_p=st.floats(0, 1, exclude_min=True),
    top_k=st.integers(0, 1 << 31),
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(0, 100, exclude_min=True),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    logit_bias=st.dictionaries(TOKEN, st.floats(-100, 100), max_size=3),
    seed=st.none() | st.integers(0, (1 << 64) - 1),
    stop=st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=5), max_size=3),
    stop_token_ids=st.lists(TOKEN, max_size=3),
    ignore_eos=st.booleans(),
    max_tokens=st.integers(100, 1 << 31),
    min_tokens=st.integers(0, 100),
    logprobs=st.none() | st.integers(0, 64),
    skip_special_tokens=st.booleans(),
)
LOGPROB = st.builds(Logprob, TOKEN, FLOAT32, st.lists(st.tuples(TOKEN, FLOAT32), max_size=3))
EVENT = (
    st.builds(Started, TEXT.map(RequestId), st.lists(TOKEN, max_size=5))
    | st.builds(
        Delta,
        st.integers(0, 127),
        st.lists(TOKEN, max_size=5),
        TEXT,
        st.none() | st.lists(LOGPROB, max_size=3),
        st.sampled_from([None, "stop", "length", "cancelled"]),
    )
    | st.builds(
        Completed,
        st.builds(Usage, COUNT, COUNT, COUNT, COUNT, COUNT),
        st.builds(
            Timeline,
            COUNT,
            *[st.none() | COUNT] * 8,
            st.integers(1, 9),
            st.lists(st.builds(Span, st.sampled_from(Phase), COUNT, COUNT, TEXT), max_size=3),
            st.lists(st.builds(Setback, st.sampled_from(Cause), TEXT, COUNT, st.integers(0, 127)), max_size=3),
        ),
    )
)
GROUP = st.builds(
    GroupView,
    group=TEXT,
    role=TEXT,
    state=TEXT,
    hit_rate=st.floats(0, 1),
    pids=st.lists(COUNT, max_size=3),
    **{
        name: COUNT
        for name in GroupView.__struct_fields__
        if name not in {"group", "role", "state", "hit_rate", "pids"}
    },
)


def request(prompt: Any = "x", sampling: SamplingParams | None = None, **overrides: Any) -> pb.GenerateRequest:
    wire = convert.make_request(prompt, None, None, sampling, {}, overrides)
    return pb.GenerateRequest.FromString(wire.SerializeToString())


def call(wire: pb.GenerateRequest) -> GenerateCall:
    return convert.to_call(wire, None)


@given(SAMPLING)
def test_sampling_round_trip(sampling: SamplingParams) -> None:
    """A parameter is dropped, rounded, or an explicit zero is taken for a default."""
    assert call(request(sampling=sampling)).sampling == sampling
    assert call(request(**msgspec.structs.asdict(sampling))).sampling == sampling


@given(EVENT)
def test_event_round_trip(event: StreamEvent) -> None:
    """A field of an event is dropped."""
    wire = convert.from_event(event).SerializeToString()
    assert convert.to_event(pb.GenerateResponse.FromString(wire)) == event


@given(st.builds(ClusterView, model=TEXT, groups=st.lists(GROUP, max_size=2), num_requests=COUNT, num_finished=COUNT,
                 num_failed=COUNT, num_resumed=COUNT))  # fmt: skip
def test_cluster_round_trip(view: ClusterView) -> None:
    """A field of the view is missing in the message."""
    assert convert.to_cluster(convert.from_cluster(view)) == view


def test_model_round_trip() -> None:
    """A field of the view is missing in the message."""
    view = ModelView(
        model="m", dtype="d", vocab_size=7, max_context=8, block_size=9, eos_token_ids=[1, 2], has_chat_template=True
    )
    assert convert.to_model(convert.from_model(view)) == view


def test_defaults_are_those_of_the_engine() -> None:
    """The wire has defaults of its own."""
    got = call(request())
    assert got.sampling == SamplingParams()
    assert (got.priority, got.cache_salt, got.timeout_s, got.messages, got.token_ids) == (0, "", None, None, None)
    assert got.request_id != call(request()).request_id


def test_one_list_of_sampling_parameters() -> None:
    """A parameter is added in one place and forgotten in another."""
    names = set(SamplingParams.__struct_fields__)
    assert {field.name for field in pb.Sampling.DESCRIPTOR.fields} == names
    rest = {"messages", "token_ids", "timeout_s", "priority", "cache_salt", "request_id", "retry_budget"}
    assert set(GenerateOptions.__annotations__) == names | rest


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hé", {"prompt": "hé"}),
        ([3, 1], {"token_ids": [3, 1]}),
        ([{"role": "user", "content": "hi"}], {"messages": [ChatMessage("user", "hi")]}),
        ([ChatMessage("user", "hi")], {"messages": [ChatMessage("user", "hi")]}),
    ],
)
def test_prompt_kinds(prompt: Any, expected: dict[str, Any]) -> None:
    """A prompt is read as another kind."""
    got = call(request(prompt))
    found = {"prompt": got.prompt, "token_ids": got.token_ids, "messages": got.messages}
    assert {key: value for key, value in found.items() if value is not None} == expected


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": b"bytes"}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"prompt": []}, "token_ids"),
        ({"prompt": [1 << 31]}, "token_ids"),
        ({"prompt": [1.5]}, "token_ids"),
        ({"prompt": ["a"]}, "token_ids"),
        ({"prompt": [{"role": "user"}]}, "messages[0]"),
        ({"prompt": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"prompt": [{"role": "user", "content": "x", "name": "y"}]}, "messages[0]"),
        ({"n": 0}, "n"),
        ({"n": -1}, "n"),
        ({"n": 1 << 80}, "n"),
        ({"n": "two"}, "n"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"seed": -1}, "seed"),
        ({"seed": 1 << 64}, "seed"),
        ({"stop": [""]}, "stop[0]"),
        ({"stop": [3]}, "stop"),
        ({"logit_bias": {3: 101.0}}, "logit_bias[3]"),
        ({"logit_bias": [3]}, "logit_bias"),
        ({"stop_token_ids": 3}, "stop_token_ids"),
        ({"logprobs": 65}, "logprobs"),
        ({"temprature": 1.0}, "argument"),
    ],
)
def test_bad_input_is_named(arguments: dict[str, Any], field: str) -> None:
    """Bad input is accepted, or fails with somebody else's exception."""
    with pytest.raises(InvalidArgument) as caught:
        call(request(**{"prompt": "x", **arguments}))
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"request_id": ""}, "request_id"),
        ({"request_id": "x" * 129}, "request_id"),
        ({"request_id": "a\nb"}, "request_id"),
        ({"cache_salt": "x" * 257}, "cache_salt"),
    ],
)
def test_bad_names_are_refused(change: dict[str, str], field: str) -> None:
    """Names without limits end up in logs and in every frame of a request."""
    with pytest.raises(InvalidArgument) as caught:
        call(convert.make_request("x", None, None, None, change, {}))
    assert caught.value.field == field


def test_chat_without_messages() -> None:
    """An empty chat reaches the template."""
    wire = pb.GenerateRequest()
    wire.chat.SetInParent()
    with pytest.raises(InvalidArgument, match="messages"):
        call(wire)


@pytest.mark.parametrize(
    ("wire", "place"),
    [
        (b"\x0a\x01x\x98\x06\x05", "GenerateRequest"),  # field 99 beside text
        (b"\x0a\x01x\x22\x03\x98\x06\x05", "sampling"),  # inside sampling
        (b"\x12\x05\x0a\x03\x98\x06\x05", "chat.messages[0]"),
    ],
)
def test_unknown_fields_are_refused(wire: bytes, place: str) -> None:
    """A newer client's option is accepted and ignored."""
    with pytest.raises(InvalidArgument, match="99") as caught:
        call(pb.GenerateRequest.FromString(wire))
    assert caught.value.field == place


def test_unknown_enum_values_are_refused() -> None:
    """An enum's unknown number is accepted and ignored (proto3 keeps it). No request has one yet."""
    wire = pb.GenerateResponse.FromString(b"\x12\x02\x28\x63")
    with pytest.raises(InvalidArgument, match=r"delta\.finish_reason=99"):
        convert.check_known(wire)
    with pytest.raises(KvferryError, match="99"):
        convert.to_event(wire)


def test_newer_events_are_not_skipped() -> None:
    """A client drops an event that it does not understand, and with it text."""
    with pytest.raises(KvferryError, match="update the client"):
        convert.to_event(pb.GenerateResponse())


def test_special_tokens_with_chat() -> None:
    """An option that cannot have an effect is accepted and ignored."""
    wire = convert.chat_request([{"role": "user", "content": "x"}])
    assert convert.check_tokenize(wire) == "chat"
    wire.add_special_tokens = True
    with pytest.raises(InvalidArgument, match="add_special_tokens"):
        convert.check_tokenize(wire)
    with pytest.raises(InvalidArgument, match="input"):
        convert.check_tokenize(pb.TokenizeRequest())


def test_stop_as_one_text() -> None:
    """`stop="END"` becomes three stop texts."""
    assert call(request(stop="END")).sampling.stop == ["END"]
