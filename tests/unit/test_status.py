"""Errors must reach a client as the class they were raised as, with their words."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from kvferry.cluster.api.status import STATUS, WireStatus, internal_status, to_error, to_status
from kvferry.runtime import errors
from kvferry.runtime.errors import InvalidArgument, KvferryError, QueueFull

MAX_METADATA_BYTES = 8 << 10


def make(kind: type[KvferryError], message: str = "what happened") -> KvferryError:
    if kind is InvalidArgument:
        return InvalidArgument("top_p", 1.5, message, "use 1.0")
    if kind is QueueFull:
        return QueueFull(message, retry_after_s=1.25)
    return kind(message)


def back(status: WireStatus) -> KvferryError:
    return to_error(status.code, status.message, status.trailers, "host:1", None)


def details(status: WireStatus) -> dict[str, Any]:
    found = {}
    for packed in status_pb2.Status.FromString(status.details).details:
        name = packed.TypeName().rpartition(".")[2]
        found[name] = message = getattr(error_details_pb2, name)()
        assert packed.Unpack(message)
    return found


def test_every_leaf_has_a_status() -> None:
    """A new error class would reach clients as INTERNAL."""
    assert set(STATUS) == set(errors.leaves())
    labels = [error.label for error in errors.leaves()]
    assert len(set(labels)) == len(labels)


@pytest.mark.parametrize("kind", errors.leaves(), ids=lambda kind: kind.label)
def test_round_trip(kind: type[KvferryError]) -> None:
    """A class or a message is lost on the way."""
    error = make(kind)
    status = to_status(error)
    assert status.code is STATUS[kind]
    assert details(status)["ErrorInfo"].reason == kind.label
    returned = back(status)
    assert type(returned) is kind
    assert str(returned) == str(error)


def test_invalid_argument_keeps_its_parts() -> None:
    """A client cannot tell which field was wrong."""
    status = to_status(make(InvalidArgument))
    (violation,) = details(status)["BadRequest"].field_violations
    assert (violation.field, violation.description) == ("top_p", "what happened")
    returned = back(status)
    assert isinstance(returned, InvalidArgument)
    assert (returned.field, returned.limit, returned.hint) == ("top_p", "what happened", "use 1.0")


def test_queue_full_keeps_the_delay() -> None:
    """Clients that retry at once make an overload worse."""
    status = to_status(make(QueueFull))
    assert details(status)["RetryInfo"].retry_delay.ToNanoseconds() == 1_250_000_000
    returned = back(status)
    assert isinstance(returned, QueueFull)
    assert returned.retry_after_s == 1.25


@pytest.mark.parametrize("message", ["x" * 100_000, "\N{PILE OF POO}" * 30_000, "\ud800 lone", "a\nb\0"])
@pytest.mark.parametrize("kind", [InvalidArgument, errors.GroupDied])
def test_any_message_fits_the_trailers(kind: type[KvferryError], message: str) -> None:
    """A long or odd message makes gRPC drop the whole status: the client would see UNKNOWN or RESOURCE_EXHAUSTED."""
    status = to_status(make(kind, message))
    percent_encoded = 3 * len(status.message.encode())
    assert percent_encoded + 4 * len(status.details) / 3 < MAX_METADATA_BYTES
    assert type(back(status)) is kind


def test_unforeseen_errors_tell_nothing() -> None:
    """Internals leak to clients."""
    status = internal_status()
    assert status.code is grpc.StatusCode.INTERNAL
    assert type(back(status)) is KvferryError


@pytest.mark.parametrize(
    ("code", "message", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, "connection refused", errors.GroupUnavailable),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "", errors.DeadlineExceeded),
        (grpc.StatusCode.CANCELLED, "", errors.Cancelled),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "Received message larger than max (5 vs. 4)", errors.MessageTooLarge),
        (grpc.StatusCode.UNIMPLEMENTED, "no such method", KvferryError),
    ],
)
@pytest.mark.parametrize("trailers", [(), (("grpc-status-details-bin", b"\xff\xff"),)])
def test_statuses_of_grpc_itself(code: grpc.StatusCode, message: str, kind: type[KvferryError], trailers: Any) -> None:
    """A status without our details (or with somebody else's) is raised as something the caller cannot catch."""
    error = to_error(code, message, trailers, "host:1", 2.0)
    assert type(error) is kind
    assert message in str(error)


def test_a_server_that_goes_away_in_the_middle_was_there() -> None:
    """Fault: the user is told to check whether a server runs that has just answered half of the question."""
    error = to_error(grpc.StatusCode.UNAVAILABLE, "Cancelling all calls", (), "host:1", None, begun=True)
    assert type(error) is errors.GroupUnavailable
    assert str(error).startswith("host:1 went away before the answer was complete")
