"""Errors ↔ gRPC statuses: one table, both directions.

A status carries `google.rpc` details in the trailer `grpc-status-details-bin`: always an `ErrorInfo` (domain
`kvferry`, reason = the error's label, metadata = its `facts`), for `InvalidArgument` a `BadRequest`, for `QueueFull` a
`RetryInfo`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import grpc
import msgspec
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2

from kvferry.runtime import errors
from kvferry.runtime.errors import KvferryError

DOMAIN = "kvferry"
DETAILS_KEY = "grpc-status-details-bin"
INTERNAL_LABEL = "internal"
"""Of an error that nobody foresaw."""
# gRPC peers refuse metadata beyond 8 KiB. The message travels twice, once percent-encoded (up to three bytes for one).
_MAX_MESSAGE_BYTES = 1000
_MAX_DETAIL_BYTES = 300

STATUS: dict[type[KvferryError], grpc.StatusCode] = {
    errors.InvalidArgument: grpc.StatusCode.INVALID_ARGUMENT,
    errors.MessageTooLarge: grpc.StatusCode.RESOURCE_EXHAUSTED,  # what gRPC itself answers
    errors.UnsupportedModel: grpc.StatusCode.FAILED_PRECONDITION,
    errors.CorruptModel: grpc.StatusCode.DATA_LOSS,
    errors.IncompatiblePeer: grpc.StatusCode.FAILED_PRECONDITION,
    errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    errors.NotFound: grpc.StatusCode.NOT_FOUND,
    errors.NoFreeBlocks: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.QueueFull: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.ResourceMissing: grpc.StatusCode.FAILED_PRECONDITION,
    errors.TransferFailed: grpc.StatusCode.UNAVAILABLE,
    errors.GroupUnavailable: grpc.StatusCode.UNAVAILABLE,
    errors.GroupDied: grpc.StatusCode.UNAVAILABLE,
    errors.StaleAttempt: grpc.StatusCode.ABORTED,
    errors.Cancelled: grpc.StatusCode.CANCELLED,
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.RetriesExhausted: grpc.StatusCode.UNAVAILABLE,
    errors.ClientTooSlow: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.InvariantBroken: grpc.StatusCode.INTERNAL,
    errors.DeviceError: grpc.StatusCode.INTERNAL,
}
_BY_LABEL = {error.label: error for error in STATUS}


class WireStatus(msgspec.Struct, frozen=True):
    """What a server ends a call with."""

    code: grpc.StatusCode
    message: str
    details: bytes
    """A serialised `google.rpc.Status`."""

    @property
    def trailers(self) -> tuple[tuple[str, bytes], ...]:
        return ((DETAILS_KEY, self.details),)


def to_status(error: KvferryError) -> WireStatus:
    """An error without an entry in the table (an inner node of the tree) is INTERNAL."""
    code = STATUS.get(type(error), grpc.StatusCode.INTERNAL)
    details: list[Message] = [error_details_pb2.ErrorInfo(reason=error.label, domain=DOMAIN)]
    for key, text in error.facts.items():
        details[0].metadata[key] = _cut(text, _MAX_DETAIL_BYTES)  # type: ignore[attr-defined]
    if isinstance(error, errors.InvalidArgument):
        said = {"field": error.field, "limit": error.limit, "hint": error.hint, "value": repr(error.value)}
        for key, text in said.items():
            details[0].metadata[key] = _cut(text, _MAX_DETAIL_BYTES)  # type: ignore[attr-defined]
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=_cut(error.field, _MAX_DETAIL_BYTES), description=_cut(error.limit, _MAX_DETAIL_BYTES)
        )
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if isinstance(error, errors.QueueFull):
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(round(error.retry_after_s * 1e9))
        details.append(retry)
    return _pack(code, str(error), details)


def internal_status() -> WireStatus:
    """For an exception that is not one of ours: the client learns that, the log learns what."""
    info = error_details_pb2.ErrorInfo(reason=INTERNAL_LABEL, domain=DOMAIN)
    return _pack(grpc.StatusCode.INTERNAL, "internal error; the server's log has the details", [info])


def _pack(code: grpc.StatusCode, message: str, details: list[Message]) -> WireStatus:
    message = _cut(message, _MAX_MESSAGE_BYTES)
    status = status_pb2.Status(code=code.value[0], message=message)
    for detail in details:
        packed = AnyMessage()
        packed.Pack(detail)
        status.details.append(packed)
    return WireStatus(code, message, status.SerializeToString())


def _cut(text: str, max_bytes: int) -> str:
    """At most so many bytes of UTF-8; lone surrogates, which no wire carries, become `?`."""
    raw = text.encode("utf-8", "replace")
    if len(raw) > max_bytes:
        raw = raw[: max_bytes - 3] + b"..."
    return raw.decode("utf-8", "ignore")


# ---------------------------------------------------------------- the client's side
def to_error(
    code: grpc.StatusCode,
    message: str,
    trailers: Iterable[tuple[str, Any]],
    target: str,
    timeout_s: float | None,
    begun: bool = False,
) -> KvferryError:
    """The error that the server raised; for a status that gRPC made itself, the class that fits."""
    for key, value in trailers:
        if key == DETAILS_KEY and isinstance(value, bytes):
            error = _from_details(value)
            if error is not None:
                return error
    if code is grpc.StatusCode.UNAVAILABLE and begun:
        return errors.GroupUnavailable(f"{target} went away before the answer was complete: {message}")
    if code is grpc.StatusCode.UNAVAILABLE:
        return errors.GroupUnavailable(
            f"no answer from {target}: {message}; is `kvferry serve` running there, with the same TLS settings?"
        )
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        limit = "its deadline" if timeout_s is None else f"{timeout_s:g} s"
        return errors.DeadlineExceeded(f"{target} did not finish within {limit}")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in message:
        return errors.MessageTooLarge(f"{message}; send a shorter prompt")
    kind = _PLAIN.get(code, KvferryError)
    return kind(f"{target}: {message}" if message else f"{target}: {code.name}")


_PLAIN: dict[grpc.StatusCode, type[KvferryError]] = {
    grpc.StatusCode.CANCELLED: errors.Cancelled,
    grpc.StatusCode.UNAUTHENTICATED: errors.Unauthenticated,
    grpc.StatusCode.NOT_FOUND: errors.NotFound,
}


def _from_details(raw: bytes) -> KvferryError | None:
    """`None` if the details are not kvferry's."""
    try:
        status = status_pb2.Status.FromString(raw)
    except DecodeError:
        return None
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    retry_after_s = 0.0
    for detail in status.details:
        detail.Unpack(info)
        if detail.Unpack(retry):
            retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
    if info.domain != DOMAIN:
        return None
    kind = _BY_LABEL.get(info.reason, KvferryError)
    if kind is errors.QueueFull:
        return errors.QueueFull(status.message, retry_after_s).explained(**info.metadata)
    if kind is not errors.InvalidArgument:
        return kind(status.message).explained(**info.metadata)
    # `value` comes as its repr, so the constructor would quote it once more: take the server's words.
    error = errors.InvalidArgument(**{key: info.metadata[key] for key in ("field", "value", "limit", "hint")})
    error.args = (status.message,)
    return error
