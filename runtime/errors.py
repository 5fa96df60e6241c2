"""Every error kvferry raises on purpose.

    KvferryError
    ├─ CallerError       the caller's fault; never retried
    │  ├─ InvalidArgument        a field of a request or an option is outside its limit
    │  ├─ MessageTooLarge        a message is larger than the server reads
    │  ├─ UnsupportedModel       the model asks for something kvferry does not have
    │  ├─ CorruptModel           a model's files are damaged or incomplete
    │  ├─ IncompatiblePeer       two groups can never exchange blocks
    │  ├─ Unauthenticated        wrong or missing secret
    │  └─ NotFound               no such request, group, model or file
    ├─ CapacityError     nothing changed; the caller may retry
    │  ├─ NoFreeBlocks           the pool has no room
    │  ├─ QueueFull              a bounded queue is full; carries retry_after_s
    │  └─ ResourceMissing        the Ray cluster lacks what the deployment asks for
    ├─ TransientError    the coordinator retries within its budget
    │  ├─ TransferFailed         blocks did not arrive; they are recomputed
    │  ├─ GroupUnavailable       no group can take the request now
    │  ├─ GroupDied              the group that ran the request is gone
    │  └─ StaleAttempt           a message of an earlier attempt or epoch
    ├─ EndedError        the request is over
    │  ├─ Cancelled
    │  ├─ DeadlineExceeded
    │  ├─ RetriesExhausted
    │  └─ ClientTooSlow          the client does not read its answer
    └─ FatalError        the process exits; never "continue and hope"
       ├─ InvariantBroken
       └─ DeviceError

Each leaf has a stable `label` (used in metrics and on the wire). Its gRPC status stands in `cluster/api/status.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Self


class KvferryError(Exception):
    """Root of the tree. `str(error)` is the whole message for a person, `facts` are for programs."""

    label: ClassVar[str] = "kvferry"
    facts: Mapping[str, str] = MappingProxyType({})

    def explained(self, **facts: object) -> Self:
        """Adds to `facts`; what is known already stays."""
        self.facts = {name: str(value) for name, value in facts.items()} | dict(self.facts)
        return self


class CallerError(KvferryError):
    label: ClassVar[str] = "caller"


class InvalidArgument(CallerError):
    """Names the field, the value, the limit and the way out."""

    label: ClassVar[str] = "invalid_argument"

    def __init__(self, field: str, value: Any, limit: str, hint: str = "") -> None:
        shown = repr(value)
        if len(shown) > 80:
            shown = shown[:77] + "..."
        super().__init__(f"{field}={shown}: {limit}" + (f"; {hint}" if hint else ""))
        self.field = field
        self.value = value
        self.limit = limit
        self.hint = hint


class MessageTooLarge(CallerError):
    label: ClassVar[str] = "message_too_large"


class UnsupportedModel(CallerError):
    label: ClassVar[str] = "unsupported_model"


class CorruptModel(CallerError):
    label: ClassVar[str] = "corrupt_model"


class IncompatiblePeer(CallerError):
    label: ClassVar[str] = "incompatible_peer"


class Unauthenticated(CallerError):
    label: ClassVar[str] = "unauthenticated"


class NotFound(CallerError):
    label: ClassVar[str] = "not_found"


class CapacityError(KvferryError):
    label: ClassVar[str] = "capacity"


class NoFreeBlocks(CapacityError):
    label: ClassVar[str] = "no_free_blocks"


class QueueFull(CapacityError):
    label: ClassVar[str] = "queue_full"

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ResourceMissing(CapacityError):
    label: ClassVar[str] = "resource_missing"


class TransientError(KvferryError):
    label: ClassVar[str] = "transient"


class TransferFailed(TransientError):
    label: ClassVar[str] = "transfer_failed"


class GroupUnavailable(TransientError):
    label: ClassVar[str] = "group_unavailable"


class GroupDied(TransientError):
    label: ClassVar[str] = "group_died"


class StaleAttempt(TransientError):
    label: ClassVar[str] = "stale_attempt"


class EndedError(KvferryError):
    label: ClassVar[str] = "ended"


class Cancelled(EndedError):
    label: ClassVar[str] = "cancelled"


class DeadlineExceeded(EndedError):
    label: ClassVar[str] = "deadline_exceeded"


class RetriesExhausted(EndedError):
    label: ClassVar[str] = "retries_exhausted"


class ClientTooSlow(EndedError):
    label: ClassVar[str] = "client_too_slow"


class FatalError(KvferryError):
    label: ClassVar[str] = "fatal"


class InvariantBroken(FatalError):
    label: ClassVar[str] = "invariant_broken"


class DeviceError(FatalError):
    label: ClassVar[str] = "device_error"


def leaves(root: type[KvferryError] = KvferryError) -> list[type[KvferryError]]:
    """The leaf classes below `root`, in the tree's order."""
    children = root.__subclasses__()
    if not children:
        return [root]
    return [leaf for child in children for leaf in leaves(child)]


_BY_LABEL = {leaf.label: leaf for leaf in leaves()}


def error_of(label: str, message: str) -> KvferryError:
    """The error that travelled as a label and a message; `GroupDied` for a label that this version does not know."""
    kind = _BY_LABEL.get(label, GroupDied)
    if kind is QueueFull:
        return QueueFull(message, retry_after_s=1.0)
    error = kind.__new__(kind)
    Exception.__init__(error, message)
    if isinstance(error, InvalidArgument):  # its message is already composed: take the field's name back out of it
        error.field, error.value, error.limit, error.hint = message.partition("=")[0], None, message, ""
    return error
