"""How long a gateway's requests may wait, how often they may begin anew, how much they may hold."""

from __future__ import annotations

import msgspec

from kvferry.runtime.config import check_range

MAX_RETRY_PAUSE_S = 5.0
"""Else a large budget means pauses of hours."""


class CoordinatorConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Budgets and bounds of requests' lives."""

    max_in_flight: int = 1024
    """Requests; one more is refused with `QueueFull`."""
    gateway: str = ""
    """A name that no other gateway of the cluster has, so that two requests of one id do not meet in an engine."""
    max_queue_s: float = 120.0
    """A request that is expected to wait longer is refused with `QueueFull`."""
    priority_step_s: float = 10.0
    """Head start that a step of priority gives among requests that wait."""
    max_bypass: int = 16
    """How many requests may pass one that waits for more room than there is."""
    max_unread_bytes: int = 2 << 20
    """Of one stream; beyond that its request ends with `ClientTooSlow`."""
    retry_budget: int = 3
    """How often one sequence may be placed again after a loss or a refusal. A request may ask for less."""
    retry_pause_s: float = 0.1
    """Before a group that had no room is asked again; doubles each time, up to `MAX_RETRY_PAUSE_S`."""
    transfer_timeout_s: float = 20.0
    """Lease of a transfer; renewed three times as often."""
    expect_timeout_s: float = 5.0
    unavailable_timeout_s: float = 60.0
    """How long a request waits for a group to live."""

    def __post_init__(self) -> None:
        check_range("max_in_flight", self.max_in_flight, 1, 1 << 20)
        check_range("retry_budget", self.retry_budget, 0, 1000)
        check_range("retry_pause_s", self.retry_pause_s, 0.0, 60)
        check_range("transfer_timeout_s", self.transfer_timeout_s, 0.01, 3600)
        check_range("expect_timeout_s", self.expect_timeout_s, 0.01, 600)
        check_range("unavailable_timeout_s", self.unavailable_timeout_s, 0.0, 3600)

    def pause_s(self, num_retries: int) -> float:
        """Before a sequence goes to a group that had no room for it, at its `num_retries`th retry."""
        return min(self.retry_pause_s * 2.0 ** (num_retries - 1), MAX_RETRY_PAUSE_S)
