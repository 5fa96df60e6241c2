"""Who may begin, and when: a queue at the gateway for what groups have no room for, and how long that takes.

    start ──▶ estimate: too long, or past the deadline? ── QueueFull(retry after)
                  │
                  ▼
              the line ── some group has room, and those before cannot use it ──▶ routed and booked

A booking is the permit: it is made when a request is routed and released with its last leg, whatever ends that. Groups
are filled a little beyond their pools, so that the next prompts are being computed while decodes end; who waits beyond
that waits here, where it holds no blocks and no leases and every group is open to it. The order is that of the engines:
arrival, with a head start per step of priority. Who needs more room than there is, is passed `max_bypass` times.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Mapping, Sequence

import msgspec

from kvferry.cluster.prices import AHEAD
from kvferry.cluster.registry import Member
from kvferry.cluster.router import Demand, Router
from kvferry.runtime.errors import QueueFull
from kvferry.runtime.ids import Peer
from kvferry.runtime.request import Request

MAX_LOOK = 16
"""Places at the head of the line that are tried when room appears."""
DOUBT = 0.5
"""Of an estimate, what must already be too long for a deadline: a request that is refused is lost for sure."""
MIN_RETRY_S = 0.1


class Place:
    """A request in the line. Leave it with `Line.leave`, whatever happens."""

    def __init__(self, rank: tuple[int, int], demand: Demand, wake: Callable[[], None]) -> None:
        self.rank = rank
        self.demand = demand
        self.wake = wake
        self.blocked = False
        """It was tried and there was no room for it."""
        self.num_passed = 0


class Line:
    """Those that wait, in order. Whoever may be next is woken, tries, and either leaves or says `block`."""

    def __init__(self, max_bypass: int) -> None:
        self._max_bypass = max_bypass
        self.places: list[Place] = []
        self._num_entered = 0

    def enter(self, rank_ns: int, demand: Demand, wake: Callable[[], None]) -> Place:
        self._num_entered += 1
        place = Place((rank_ns, self._num_entered), demand, wake)
        insort(self.places, place, key=lambda p: p.rank)
        return place

    def may_try(self, place: Place) -> bool:
        """Whether all before it were tried in vain, and none of them was passed too often."""
        for before in self.places[:MAX_LOOK]:
            if before is place:
                return True
            if not before.blocked or before.num_passed >= self._max_bypass:
                return False
        return False

    def block(self, place: Place) -> None:
        """There is no room for it: the next one may try."""
        place.blocked = True
        self._wake_next()

    def leave(self, place: Place, admitted: bool = False) -> None:
        """Idempotent."""
        if place not in self.places:
            return
        if admitted:
            for before in self.places[: self.places.index(place)]:
                before.num_passed += 1
        self.places.remove(place)
        self._wake_next()

    def call(self) -> None:
        """There may be room: all are tried again, one after the other."""
        for place in self.places[:MAX_LOOK]:
            place.blocked = False
        self._wake_next()

    def _wake_next(self) -> None:
        for place in self.places[:MAX_LOOK]:
            if not place.blocked:
                place.wake()
                return
            if place.num_passed >= self._max_bypass:
                return


class Estimate(msgspec.Struct, frozen=True):
    wait_s: float
    """Until work on the request begins."""
    prefill_s: float
    """From then to its first token."""


class Admission:
    """Rooms and estimates, from what the router has measured and booked. The line is open to whoever routes."""

    def __init__(self, router: Router, max_queue_s: float, max_bypass: int) -> None:
        self._router = router
        self._max_queue_s = max_queue_s
        self.line = Line(max_bypass)
        router.load.on_less = self.line.call

    # ------------------------------------------------------------ room
    def closed_to(
        self, demand: Demand, members: Sequence[Member], hits: Mapping[Peer, int], new: bool
    ) -> set[Peer] | None:
        """The members that the demand cannot be routed to; `None`: it must wait.

        What has begun already (not `new`) takes a place in an engine's queue rather than here.
        """
        if demand.num_decoding == 0:
            return set()
        roster = self._router.prices.roster(members)
        homes = roster.homes or roster.prices
        best, num_tokens = homes, demand.num_tokens + 1
        if num_tokens > roster.least_context:
            best = [p for p in homes if num_tokens <= p.max_context] or homes  # could ever hold one of them
        num_blocks = float(self._router.num_blocks(demand, homes[0].member))  # without hits it takes the most
        num_sequences = float(demand.num_sequences)
        if new and (num_blocks > roster.least_room_blocks or num_sequences > roster.least_room_sequences):
            best = [
                p
                for p in best
                if (num_blocks <= p.room_blocks and num_sequences <= p.room_sequences)
                or self._has_room(demand, p.member, hits)
            ]
        if not best:
            return None
        return set() if len(best) == len(homes) else {p.peer for p in homes} - {p.peer for p in best}

    def _has_room(self, demand: Demand, member: Member, hits: Mapping[Peer, int]) -> bool:
        booked, info = self._router.load.booked(member.peer), member.info
        num_blocks = booked.num_blocks + self._router.num_blocks(demand, member, hits.get(member.peer, 0))
        num_sequences = booked.num_sequences + demand.num_sequences
        return num_blocks <= AHEAD * info.num_blocks and num_sequences <= AHEAD * info.max_sequences

    # ------------------------------------------------------------ time
    def check(self, request: Request, demand: Demand, rank_ns: int, members: Sequence[Member], now_ns: int) -> None:
        """Raises `QueueFull` for a request that would wait too long, or miss its deadline before its first token."""
        estimate = self.estimate(demand, rank_ns, members)
        if estimate is None:
            return
        facts = {"estimated_wait_s": f"{estimate.wait_s:.1f}"}
        what = f"request {request.request_id}: it would wait for about {estimate.wait_s:.1f} s"
        if estimate.wait_s > self._max_queue_s:
            retry_s = max(MIN_RETRY_S, estimate.wait_s - self._max_queue_s)
            raise QueueFull(
                f"{what}, at most {self._max_queue_s:g} s (--max-queue-s); retry in {retry_s:.1f} s", retry_s
            ).explained(limit="queue", **facts)
        if request.deadline_ns is None:
            return
        left_s = (request.deadline_ns - now_ns) / 1e9
        late_s = DOUBT * (estimate.wait_s + estimate.prefill_s) - left_s
        if left_s > 0 and late_s > 0:
            retry_s = max(MIN_RETRY_S, late_s)
            raise QueueFull(
                f"{what} and its first token needs {estimate.prefill_s:.1f} s more, but its deadline is in "
                f"{left_s:.1f} s; allow more time, or retry in {retry_s:.1f} s",
                retry_s,
            ).explained(limit="deadline", **facts)

    def estimate(self, demand: Demand, rank_ns: int, members: Sequence[Member]) -> Estimate | None:
        """`None`: nothing was measured yet, or nobody lives.

        Prefill and decode are emptied at the same time, so the slower one counts. Work of decodes: what was given
        away beyond the pools must first come free, and a pool comes free once in a sequence's stay.
        """
        rates = self._router.rates
        if not members or not rates.measured:
            return None
        roster = self._router.prices.roster(members)
        before = [place.demand for place in self.line.places if place.rank[0] <= rank_ns]
        speeds = [p.rate for p in roster.prefillers or roster.prices]
        missing = _share_missing(members)
        waiting = sum([p.waiting for p in roster.prices])
        prefill_wait_s = (waiting + missing * sum(d.num_tokens for d in before)) / sum(speeds)
        homes, wanted = roster.homes or roster.prices, [*before, demand]
        excess = max(
            _excess(
                sum([p.booked.num_blocks for p in homes]),
                sum(self._router.num_blocks(d, homes[0].member) for d in wanted),
                sum([p.num_blocks for p in homes]),
            ),
            _excess(
                sum([p.booked.num_sequences for p in homes]),
                sum(d.num_decoding for d in wanted),
                sum([p.max_sequences for p in homes]),
            ),
        )
        wait_s = prefill_wait_s
        if excess > 0:
            step_s = max(p.base_s + p.slope_s * p.member.load.num_running for p in homes)
            wait_s = max(wait_s, excess * rates.output_tokens * step_s)
        return Estimate(wait_s, missing * demand.num_tokens / max(speeds))


def _excess(booked: int, wanted: int, room: int) -> float:
    """What is booked and wanted beyond what the groups hold, as a share of that."""
    return max(0.0, (booked + wanted - room) / room)


def _share_missing(members: Sequence[Member]) -> float:
    """Of prompts' tokens, the share that groups did not find in their caches so far."""
    seen = sum([m.load.prompt_tokens_total for m in members])
    return 1.0 - sum([m.load.cached_tokens_total for m in members]) / seen if seen else 1.0
