"""When a request passed each station. Wall-clock nanoseconds; `None` for a station it did not pass."""

from __future__ import annotations

import msgspec


class Timeline(msgspec.Struct):
    """The nine events of a request, in the order in which an ordinary disaggregated request passes them.

    `attempts` counts resubmissions after a death (1 = undisturbed).
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
