"""One client's streams: what came, when, and whether it is what the undisturbed answer was. Pure.

running ─▶ complete     all tokens and the final message
        ├▶ cancelled    by this program
        ├▶ cut          its connection was cut by this program
        └▶ failed       anything else
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import msgspec

from kvferry.cluster.chaos.plan import Case, FaultKind
from kvferry.cluster.service import Completed, Delta, StreamEvent


class Fate(StrEnum):
    RUNNING = "running"
    COMPLETE = "complete"
    CANCELLED = "cancelled"
    CUT = "cut"
    FAILED = "failed"


class Reference(msgspec.Struct, frozen=True):
    """The undisturbed answer."""

    token_ids: list[int]
    text: str
    finish_reason: str | None


class Stream(msgspec.Struct, kw_only=True, eq=False):
    """Instants are nanoseconds of one monotonic clock."""

    request_id: str
    case: Case
    client: int
    begin_ns: int
    end_ns: int | None = None
    last_ns: int | None = None
    """When the last tokens came."""
    longest_gap_ns: int = 0
    """Between two deltas that brought tokens."""
    token_ids: list[int] = []
    text: str = ""
    finish_reason: str | None = None
    attempts: int = 1
    fate: Fate = Fate.RUNNING
    error: str = ""
    wanted: FaultKind | None = None
    """What this program has done to it; the fate says whether that came in time."""

    def take(self, event: StreamEvent, now_ns: int) -> None:
        if isinstance(event, Delta):
            self.text += event.text
            self.finish_reason = event.finish_reason or self.finish_reason
            if event.token_ids:
                self.token_ids.extend(event.token_ids)
                if self.last_ns is not None:
                    self.longest_gap_ns = max(self.longest_gap_ns, now_ns - self.last_ns)
                self.last_ns = now_ns
        elif isinstance(event, Completed):
            self.attempts = event.timeline.attempts
            self.end(Fate.COMPLETE, now_ns)

    def end(self, fate: Fate, now_ns: int, error: str = "") -> None:
        """The first one counts."""
        if self.fate is Fate.RUNNING:
            self.fate, self.end_ns, self.error = fate, now_ns, error

    @property
    def early(self) -> bool:
        """Less than half of the answer has come."""
        return 2 * len(self.token_ids) < self.case.sampling.max_tokens

    @property
    def rest_s(self) -> float:
        """What the rest of the answer would take at the pace so far; 0 before the first token."""
        done, left = len(self.token_ids), self.case.sampling.max_tokens - len(self.token_ids)
        return 0.0 if self.last_ns is None else (self.last_ns - self.begin_ns) / 1e9 / done * left


class Change(msgspec.Struct, frozen=True):
    """A stream that was not what it should have been."""

    request_id: str
    case: int
    position: int
    """Of the first token that differs; the number of equal tokens if only the text or the finish reason does."""
    what: str


def difference(reference: Reference, stream: Stream) -> Change | None:
    """Of a stream that has ended, whole or in the middle: what came must be a beginning of the reference."""
    expected, got = reference.token_ids, stream.token_ids
    whole = stream.fate is Fate.COMPLETE
    position = first_difference(expected, got)
    if position < min(len(expected), len(got)):
        what = f"token {got[position]} came, {expected[position]} was expected"
    elif len(got) > len(expected):
        what = f"{len(got)} tokens came, {len(expected)} were expected"
    elif whole and len(got) < len(expected):
        what = f"ended after {len(got)} of {len(expected)} tokens"
    elif whole and stream.finish_reason != reference.finish_reason:
        what = f"finish reason {stream.finish_reason}, {reference.finish_reason} was expected"
    elif whole and stream.text != reference.text:
        what = "the same tokens, another text"
    elif not reference.text.startswith(stream.text):
        what = "another text"
    else:
        return None
    return Change(stream.request_id, stream.case.number, position, what)


def first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    """Number of equal tokens before it, or of all that both have."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept of a stream that has ended: a run of hours has many."""

    request_id: str
    begin_ns: int
    end_ns: int
    fate: Fate
    attempts: int
    longest_gap_s: float
    error: str
    change: Change | None

    @property
    def total_s(self) -> float:
        return (self.end_ns - self.begin_ns) / 1e9

    def overlaps(self, begin_ns: int, end_ns: int) -> bool:
        return self.begin_ns <= end_ns and self.end_ns >= begin_ns


def outcome(stream: Stream, reference: Reference) -> Outcome:
    assert stream.end_ns is not None, f"{stream.request_id} still runs"
    return Outcome(
        request_id=stream.request_id,
        begin_ns=stream.begin_ns,
        end_ns=stream.end_ns,
        fate=stream.fate,
        attempts=stream.attempts,
        longest_gap_s=stream.longest_gap_ns / 1e9,
        error=stream.error,
        change=difference(reference, stream),
    )
