"""Where a request's time went, and what went wrong on its way. Wall-clock nanoseconds."""

from __future__ import annotations

from enum import StrEnum

import msgspec

MAX_SETBACKS = 64
"""Noted of one request; more are only counted."""


class Phase(StrEnum):
    """What a span of a request's time was spent on."""

    GATEWAY = "gateway"
    """Read, tokenised, checked."""
    ADMISSION = "admission"
    """Waited at the gateway: for room, for a group to live, for a pause between retries."""
    PREFILL_QUEUE = "prefill_queue"
    """Waited in the engine that computes the prompt, and on the way to it."""
    PREFILL = "prefill"
    TRANSFER = "transfer"
    """Had its first token and waited for its KV blocks to arrive where it decodes."""
    DECODE_QUEUE = "decode_queue"
    """Waited in the engine that decodes, with its blocks there."""
    DECODE = "decode"
    PREEMPTED = "preempted"
    """Waited for blocks again after it had begun: in all, put after what it was doing meanwhile."""
    DELIVERY = "delivery"
    """Tokens on their way to the gateway, or there and not yet read by the client."""
    LOST = "lost"
    """In an engine that was lost, or gave the sequence up, before it said anything of it."""


class Cause(StrEnum):
    """Why a sequence had to begin anew elsewhere."""

    GROUP_DIED = "group_died"
    GROUP_SILENT = "group_silent"
    """No sign of life for so long that its work was given to others."""
    EVENT_GAP = "event_gap"
    """A token never arrived."""
    NO_ROOM = "no_room"
    """The group's pool or queue was full."""
    REFUSED = "refused"
    """The group failed for another reason."""


class Span(msgspec.Struct, frozen=True, array_like=True):
    phase: Phase
    begin_ns: int
    end_ns: int
    group: str = ""
    """Where; empty for the gateway."""


class Setback(msgspec.Struct, frozen=True, array_like=True):
    cause: Cause
    group: str
    at_ns: int
    index: int
    """Of the sequence."""


class Timeline(msgspec.Struct):
    """The nine events of a request, in the order in which an ordinary disaggregated request passes them.

    `None` for a station it did not pass. `attempts`: 1 + how often the sequence that had the most bad luck began anew.
    """

    received_ns: int
    routed_ns: int | None = None
    prefill_begin_ns: int | None = None
    prefill_end_ns: int | None = None
    first_token_ns: int | None = None
    transfer_begin_ns: int | None = None
    transfer_end_ns: int | None = None
    decode_begin_ns: int | None = None
    finished_ns: int | None = None
    attempts: int = 1
    spans: list[Span] = []
    """Consecutive, from `received_ns` to the end: those of the sequence that ended last."""
    setbacks: list[Setback] = []

    def seconds(self) -> dict[Phase, float]:
        """Time spent in each phase, in the order of its first span."""
        total: dict[Phase, float] = {}
        for span in self.spans:
            total[span.phase] = total.get(span.phase, 0.0) + (span.end_ns - span.begin_ns) / 1e9
        return total


class Track:
    """The spans of one sequence as they come to be known: each begins where the last one ended."""

    def __init__(self, begin_ns: int) -> None:
        self.spans: list[Span] = []
        self.end_ns = begin_ns

    def until(self, end_ns: int, phase: Phase, group: str = "") -> None:
        """All time since the last span's end was `phase`. An instant before that (another clock) adds nothing."""
        if end_ns <= self.end_ns:
            return
        last = self.spans[-1] if self.spans else None
        if last is not None and (last.phase, last.group) == (phase, group):
            self.spans[-1] = Span(phase, last.begin_ns, end_ns, group)
        else:
            self.spans.append(Span(phase, self.end_ns, end_ns, group))
        self.end_ns = end_ns
