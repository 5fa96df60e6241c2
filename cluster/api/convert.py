"""Wire messages ↔ the values of `cluster/service.py`, both ways. No I/O.

What comes from a client is checked here for form (known fields, exactly one prompt, lengths of names) and by
`SamplingParams` for ranges. What depends on the model (vocabulary, context, chat template) is the service's to check.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from kvferry.cluster.service import (
    ChatMessage,
    ClusterView,
    Completed,
    Delta,
    Drain,
    GenerateCall,
    GroupView,
    ModelView,
    Operation,
    OperationView,
    Restart,
    Scale,
    SetRole,
    Started,
    StreamEvent,
)
from kvferry.proto import kvferry_pb2 as pb
from kvferry.runtime.errors import InvalidArgument, KvferryError
from kvferry.runtime.ids import RequestId
from kvferry.runtime.request import FinishReason, Logprob, SamplingParams, Usage
from kvferry.runtime.timeline import Cause, Phase, Setback, Span, Timeline

DEFAULT_DRAIN_S = 60.0
MAX_REQUEST_ID_CHARS = 128
MAX_CACHE_SALT_CHARS = 256
SAMPLING_FIELDS = SamplingParams.__struct_fields__

_FINISH = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: pb.FINISH_REASON_CANCELLED,
}
_FINISH_BACK = {wire: str(reason) for reason, wire in _FINISH.items()}
_STATIONS = [name for name in Timeline.__struct_fields__ if name not in ("spans", "setbacks")]
_PHASES = {phase: pb.Phase.Value(f"PHASE_{phase.name}") for phase in Phase}
_PHASES_BACK = {wire: phase for phase, wire in _PHASES.items()}
_CAUSES = {cause: pb.Cause.Value(f"CAUSE_{cause.name}") for cause in Cause}
_CAUSES_BACK = {wire: cause for cause, wire in _CAUSES.items()}
_GROUP_FIELDS = GroupView.__struct_fields__
_COUNTER_FIELDS = ("num_requests", "num_finished", "num_failed", "num_resumed")
_MODEL_FIELDS = ModelView.__struct_fields__
_OPERATIONS: dict[str, type[Operation]] = {
    "DrainRequest": Drain,
    "ScaleRequest": Scale,
    "SetRoleRequest": SetRole,
    "RestartRequest": Restart,
}


# ---------------------------------------------------------------- from a client
def check_known(message: Message, path: str = "") -> None:
    """Raises `InvalidArgument` for a field or an enum value that this server does not know, at any depth."""
    unknown = UnknownFieldSet(message)
    if len(unknown):
        numbers = sorted({unknown[i].field_number for i in range(len(unknown))})
        raise InvalidArgument(
            path or message.DESCRIPTOR.name, f"field numbers {numbers}", "unknown to this server", "update the server"
        )
    for field, value in message.ListFields():
        values = value if field.is_repeated else [value]
        name = f"{path}.{field.name}" if path else field.name
        if field.enum_type is not None:
            known = field.enum_type.values_by_number
            for number in values:
                if number not in known:
                    raise InvalidArgument(name, number, f"must be one of {sorted(known)}")
        elif field.message_type is not None and not field.message_type.GetOptions().map_entry:
            for i, inner in enumerate(values):
                check_known(inner, f"{name}[{i}]" if field.is_repeated else name)


def to_call(request: pb.GenerateRequest, timeout_s: float | None) -> GenerateCall:
    """`timeout_s`: what is left of the call's deadline. Raises `InvalidArgument`."""
    check_known(request)
    kind = request.WhichOneof("prompt")
    if kind is None:
        raise InvalidArgument("prompt", None, "one of text, chat, token_ids must be set")
    if kind == "text" and not request.text:
        raise InvalidArgument("prompt", "", "must not be empty")
    if kind == "token_ids" and not request.token_ids.ids:
        raise InvalidArgument("token_ids", [], "must have at least one token")
    if request.HasField("retry_budget") and request.retry_budget < 0:
        raise InvalidArgument(
            "retry_budget", request.retry_budget, "must be at least 0", "leave it out for the default"
        )
    if len(request.cache_salt) > MAX_CACHE_SALT_CHARS:
        raise InvalidArgument("cache_salt", request.cache_salt, f"must have at most {MAX_CACHE_SALT_CHARS} characters")
    return GenerateCall(
        request_id=_request_id(request),
        prompt=request.text if kind == "text" else None,
        messages=to_messages(request.chat) if kind == "chat" else None,
        token_ids=list(request.token_ids.ids) if kind == "token_ids" else None,
        sampling=to_sampling(request.sampling),
        priority=request.priority,
        cache_salt=request.cache_salt,
        timeout_s=timeout_s,
        retry_budget=request.retry_budget if request.HasField("retry_budget") else None,
    )


def _request_id(request: pb.GenerateRequest) -> RequestId:
    if not request.HasField("request_id"):
        return RequestId(f"req-{secrets.token_hex(8)}")
    given = request.request_id
    if not 1 <= len(given) <= MAX_REQUEST_ID_CHARS or not given.isprintable():
        raise InvalidArgument("request_id", given, f"must have 1 to {MAX_REQUEST_ID_CHARS} printable characters")
    return RequestId(given)


def to_messages(chat: pb.Chat) -> list[ChatMessage]:
    """Raises `InvalidArgument` for a chat without messages."""
    if not chat.messages:
        raise InvalidArgument("messages", [], "must have at least one message")
    return [ChatMessage(message.role, message.content) for message in chat.messages]


def to_sampling(sampling: pb.Sampling) -> SamplingParams:
    """Absent fields take `SamplingParams`' defaults. Raises `InvalidArgument`."""
    values: dict[str, Any] = {}
    for field, value in sampling.ListFields():
        if field.name == "logit_bias":
            values[field.name] = dict(value)
        else:
            values[field.name] = list(value) if field.is_repeated else value
    return SamplingParams(**values)


def check_tokenize(request: pb.TokenizeRequest) -> str:
    """Which input is set: "text" or "chat". Raises `InvalidArgument`."""
    check_known(request)
    kind: str | None = request.WhichOneof("input")
    if kind is None:
        raise InvalidArgument("input", None, "one of text, chat must be set")
    if kind == "chat" and request.HasField("add_special_tokens"):
        raise InvalidArgument(
            "add_special_tokens",
            request.add_special_tokens,
            "applies to text only",
            "leave it out: the template decides",
        )
    return kind


def to_operation(request: Message) -> Operation:
    """Absent fields take their defaults. Raises `InvalidArgument` for fields that this server does not know."""
    check_known(request)
    kind = _OPERATIONS[request.DESCRIPTOR.name]
    fields = {field.name: value for field, value in request.ListFields()}
    for name in kind.__struct_fields__:
        if name == "timeout_s":
            fields.setdefault(name, DEFAULT_DRAIN_S)
        elif not request.DESCRIPTOR.fields_by_name[name].has_presence:
            fields.setdefault(name, "")
    return kind(**fields)


# ---------------------------------------------------------------- to a client
def from_event(event: StreamEvent) -> pb.GenerateResponse:
    if isinstance(event, Delta):
        return pb.GenerateResponse(delta=_from_delta(event))
    if isinstance(event, Started):
        started = pb.Started(request_id=event.request_id, prompt_token_ids=event.prompt_token_ids)
        return pb.GenerateResponse(started=started)
    usage = event.usage
    completed = pb.Completed(
        usage=pb.Usage(
            prompt_tokens=usage.num_prompt_tokens,
            cached_tokens=usage.num_cached_tokens,
            output_tokens=usage.num_output_tokens,
            ferried_blocks=usage.num_ferried_blocks,
            ferried_bytes=usage.ferried_bytes,
        ),
        timeline=_from_timeline(event.timeline),
    )
    return pb.GenerateResponse(completed=completed)


def _from_timeline(timeline: Timeline) -> pb.Timeline:
    message = pb.Timeline(**{name: getattr(timeline, name) for name in _STATIONS})
    for span in timeline.spans:
        message.spans.add(phase=_PHASES[span.phase], begin_ns=span.begin_ns, end_ns=span.end_ns, group=span.group)
    for setback in timeline.setbacks:
        message.setbacks.add(
            cause=_CAUSES[setback.cause], group=setback.group, at_ns=setback.at_ns, index=setback.index
        )
    return message


def _from_delta(delta: Delta) -> pb.Delta:
    message = pb.Delta(index=delta.index, token_ids=delta.token_ids, text=delta.text)
    if delta.finish_reason is not None:
        message.finish_reason = _FINISH[FinishReason(delta.finish_reason)]
    if delta.logprobs is not None:
        message.logprobs.SetInParent()
        for entry in delta.logprobs:
            message.logprobs.tokens.add(
                token_id=entry.token_id,
                logprob=entry.logprob,
                top_token_ids=[token for token, _ in entry.top],
                top_logprobs=[logprob for _, logprob in entry.top],
            )
    return message


def from_model(view: ModelView) -> pb.Model:
    return pb.Model(**msgspec.structs.asdict(view))


def from_cluster(view: ClusterView) -> pb.Cluster:
    return pb.Cluster(
        model=view.model,
        groups=[pb.Group(**msgspec.structs.asdict(group)) for group in view.groups],
        **{name: getattr(view, name) for name in _COUNTER_FIELDS},
    )


def from_operation_view(view: OperationView) -> pb.OperationResult:
    return pb.OperationResult(**msgspec.structs.asdict(view))


# ---------------------------------------------------------------- the client's side
def make_request(
    prompt: str | Sequence[Any] | None,
    messages: Sequence[Mapping[str, str] | ChatMessage] | None,
    token_ids: Sequence[int] | None,
    sampling: SamplingParams | None,
    options: Mapping[str, Any],
    overrides: Mapping[str, Any],
) -> pb.GenerateRequest:
    """The wire form of a call. `options`: priority, cache_salt, request_id, retry_budget; `overrides`: sampling.

    Checks only what the wire cannot carry; ranges are the server's to judge. Raises `InvalidArgument`.
    """
    if sum(value is not None for value in (prompt, messages, token_ids)) != 1:
        raise InvalidArgument("prompt", prompt, "exactly one of prompt, messages, token_ids must be given")
    request = pb.GenerateRequest()
    if isinstance(prompt, str):
        _set(request, "text", prompt, "prompt")
    elif isinstance(prompt, bytes) or (prompt is not None and not isinstance(prompt, Sequence)):
        raise InvalidArgument("prompt", prompt, "must be a text, a list of messages or a list of token ids")
    elif messages is not None:
        fill_chat(request.chat, messages)
    elif prompt and isinstance(prompt[0], Mapping | ChatMessage):
        fill_chat(request.chat, prompt)
    else:
        request.token_ids.SetInParent()
        _set(request.token_ids, "ids", token_ids if token_ids is not None else prompt, "token_ids")
    for name, value in options.items():
        if value is not None:
            _set(request, name, value)
    if sampling is not None or overrides:
        given = {} if sampling is None else msgspec.structs.asdict(sampling)
        fill_sampling(request.sampling, {**given, **overrides})
    return request


def fill_chat(chat: pb.Chat, messages: Sequence[Any]) -> None:
    """Raises `InvalidArgument` for an entry that is not exactly a role and a content."""
    chat.SetInParent()
    for i, message in enumerate(messages):
        entry = {"role": message.role, "content": message.content} if isinstance(message, ChatMessage) else message
        if not isinstance(entry, Mapping) or set(entry) != {"role", "content"}:
            raise InvalidArgument(f"messages[{i}]", entry, "must be a mapping with exactly the keys role and content")
        wire = chat.messages.add()
        for key in ("role", "content"):
            _set(wire, key, entry[key], f"messages[{i}].{key}")


def fill_sampling(wire: pb.Sampling, values: Mapping[str, Any]) -> None:
    """Sets the fields that are not `None`. Raises `InvalidArgument` for an unknown name or a value of a wrong type."""
    wire.SetInParent()
    for name, value in values.items():
        if name not in SAMPLING_FIELDS:
            raise InvalidArgument(
                "argument", name, "is not a sampling parameter", f"there are {sorted(SAMPLING_FIELDS)}"
            )
        if value is not None:
            _set(wire, name, [value] if name == "stop" and isinstance(value, str) else value)


def text_request(text: str, add_special_tokens: bool) -> pb.TokenizeRequest:
    request = pb.TokenizeRequest(add_special_tokens=add_special_tokens)
    _set(request, "text", text)
    return request


def chat_request(messages: Sequence[Mapping[str, str] | ChatMessage]) -> pb.TokenizeRequest:
    request = pb.TokenizeRequest()
    fill_chat(request.chat, messages)
    return request


def detokenize_request(token_ids: Sequence[int], skip_special_tokens: bool) -> pb.DetokenizeRequest:
    request = pb.DetokenizeRequest(skip_special_tokens=skip_special_tokens)
    _set(request, "token_ids", token_ids)
    return request


def _set(message: Message, name: str, value: Any, shown: str = "") -> None:
    """Sets a field from a caller's value; what protobuf refuses becomes `InvalidArgument` naming `shown`."""
    field = message.DESCRIPTOR.fields_by_name[name]
    if field.type == field.TYPE_INT32 and field.is_repeated and isinstance(value, Iterable):
        value = list(value)
        for i, number in enumerate(value):
            if not isinstance(number, int) or not -(1 << 31) <= number < 1 << 31:
                raise InvalidArgument(shown or name, number, f"must be a whole number of 32 bits (at index {i})")
    try:
        if not field.is_repeated:
            setattr(message, name, value)
        elif isinstance(value, Mapping):
            getattr(message, name).update(value)
        else:
            getattr(message, name).extend(value)
    except (TypeError, ValueError, AttributeError) as error:  # UnicodeEncodeError (a lone surrogate) is a ValueError
        raise InvalidArgument(shown or name, value, f"does not fit its type: {error}") from None


def to_event(message: pb.GenerateResponse) -> StreamEvent:
    """Raises `KvferryError` for an event that a newer server sends and this client cannot read."""
    kind = message.WhichOneof("event")
    if kind == "delta":
        return _to_delta(message.delta)
    if kind == "started":
        return Started(RequestId(message.started.request_id), list(message.started.prompt_token_ids))
    if kind == "completed":
        usage = message.completed.usage
        return Completed(
            Usage(
                num_prompt_tokens=usage.prompt_tokens,
                num_cached_tokens=usage.cached_tokens,
                num_output_tokens=usage.output_tokens,
                num_ferried_blocks=usage.ferried_blocks,
                ferried_bytes=usage.ferried_bytes,
            ),
            to_timeline(message.completed.timeline),
        )
    raise KvferryError("the server sent an event that this client does not know; update the client")


def to_timeline(message: pb.Timeline) -> Timeline:
    """Spans and setbacks of kinds that only a newer server knows are left out."""
    stations = {
        name: getattr(message, name)
        for name in _STATIONS
        if name in ("received_ns", "attempts") or message.HasField(name)
    }
    spans = [
        Span(_PHASES_BACK[span.phase], span.begin_ns, span.end_ns, span.group)
        for span in message.spans
        if span.phase in _PHASES_BACK
    ]
    setbacks = [
        Setback(_CAUSES_BACK[setback.cause], setback.group, setback.at_ns, setback.index)
        for setback in message.setbacks
        if setback.cause in _CAUSES_BACK
    ]
    return Timeline(**stations, spans=spans, setbacks=setbacks)


def _to_delta(message: pb.Delta) -> Delta:
    logprobs = None
    if message.HasField("logprobs"):
        logprobs = [
            Logprob(entry.token_id, entry.logprob, list(zip(entry.top_token_ids, entry.top_logprobs, strict=True)))
            for entry in message.logprobs.tokens
        ]
    finish = _FINISH_BACK.get(message.finish_reason) if message.finish_reason else None
    if message.finish_reason and finish is None:
        raise KvferryError(f"finish_reason {message.finish_reason} is unknown to this client; update the client")
    return Delta(message.index, list(message.token_ids), message.text, logprobs, finish)


def to_model(message: pb.Model) -> ModelView:
    return ModelView(**_plain(message, _MODEL_FIELDS))


def to_cluster(message: pb.Cluster) -> ClusterView:
    return ClusterView(
        model=message.model,
        groups=[GroupView(**_plain(group, _GROUP_FIELDS)) for group in message.groups],
        **{name: getattr(message, name) for name in _COUNTER_FIELDS},
    )


def _plain(message: Message, names: Iterable[str]) -> dict[str, Any]:
    fields = message.DESCRIPTOR.fields_by_name
    return {n: list(getattr(message, n)) if fields[n].is_repeated else getattr(message, n) for n in names}


def operation_request(method: str, **fields: Any) -> Message:
    """Of one of the four methods that change a deployment. `None`: absent."""
    request: Message = getattr(pb, f"{method}Request")()
    for name, value in fields.items():
        if value is not None:
            _set(request, name, value)
    return request


def to_operation_view(message: pb.OperationResult) -> OperationView:
    return OperationView(**_plain(message, OperationView.__struct_fields__))
