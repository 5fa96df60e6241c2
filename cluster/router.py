"""Chooses groups for a request by cost in seconds, from measured rates.

    cost = queue + fetch + prefill + stall + transfer + decode

    queue      tokens waiting before it / prefill rate
    fetch      bytes of a prefix that a peer holds / link rate + a message's latency, less the queue: both go on at once
    prefill    tokens of the prompt that the group lacks (after the fetch) / prefill rate
    stall      prefill seconds x (1 + sequences that decode on the same group now): each of them waits meanwhile, and so
               does whoever comes next, so computing anew what another group holds has its price. A `decode` group
               is kept free for decodes about to arrive and counts at least one. This is what makes prefilling
               elsewhere worth a transfer
    transfer   bytes of the full blocks that the destination lacks / link rate + a message's latency
    decode     expected output tokens x (step time at the batch joined + what that adds to each other's steps)

Seconds of others' waiting weigh as much as the request's own. Options compared: everything on one group; prefill on one
group and ship to another; each with what the first group lacks of the prefix computed, or fetched from the peer that
holds most of it. What the first group costs does not depend on who decodes, nor the other way round: the best pair is
the best of each, and not searched for among all pairs. Load is booked when it is decided; of a booking and a group's
report of it the larger counts.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple

import msgspec

from kvferry.cluster.costs import COST_GRAIN_S, TRANSFER_LATENCY_S, Work, cheapest
from kvferry.cluster.depths import Depths, Owners
from kvferry.cluster.messages import Load
from kvferry.cluster.native_costs import weigher
from kvferry.cluster.prices import Price, Prices, Roster
from kvferry.cluster.registry import Member
from kvferry.cluster.router_load import Booking, GroupRates, LoadBook
from kvferry.runtime.config import check_range
from kvferry.runtime.ids import Peer

FETCH_PATIENCE = 4.0
"""A fetch is given up when it takes so many times longer than computing its blocks would have taken."""
MIN_FETCH_PATIENCE_S = 1.0


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Policy, and what is assumed before anything was measured."""

    disaggregate: Literal["auto", "always", "never"] = "auto"
    """`auto`: where it costs fewer seconds. `always`: whenever there are blocks to ship and groups of both roles."""
    fetch_prefix: Literal["auto", "always", "never"] = "auto"
    """From a peer that holds more of it. `auto`: where it costs fewer seconds than computing it."""
    prior_prefill_tokens_per_s: float = 500.0
    prior_decode_step_s: float = 0.03
    prior_link_bytes_per_s: float = 500e6

    def __post_init__(self) -> None:
        check_range("prior_prefill_tokens_per_s", self.prior_prefill_tokens_per_s, 1e-3, 1e9)
        check_range("prior_decode_step_s", self.prior_decode_step_s, 1e-6, 1e3)
        check_range("prior_link_bytes_per_s", self.prior_link_bytes_per_s, 1.0, 1e13)


class Demand(msgspec.Struct, frozen=True):
    """What is to be placed: `num_sequences` that share their first `num_tokens` tokens."""

    num_tokens: int
    num_sequences: int
    max_new_tokens: int
    """Of the longest sequence, still to be drawn."""

    @property
    def num_decoding(self) -> int:
        return self.num_sequences if self.max_new_tokens > 1 else 0


class Fetch(msgspec.Struct, frozen=True):
    """Blocks that the first group gets from a peer before it computes the rest."""

    source: Peer
    num_blocks: int
    """Leading ones that the first group has afterwards."""
    seconds: float
    patience_s: float
    """After so long it is given up, and they are computed."""


class RoutingDecision(msgspec.Struct, frozen=True, kw_only=True):
    """Where to, why, and the parts of the cost in seconds."""

    prefill: Peer | None
    """`None`: all is done on `decode`."""
    decode: Peer
    hits: Mapping[Peer, int]
    """Leading blocks that each group was thought to hold."""
    fetch: Fetch | None
    num_prefill_tokens: int
    """To be computed by whoever prefills."""
    num_decoding: int
    """Sequences that will decode on `decode`."""
    num_blocks: int
    """That these are expected to take there."""
    queue_s: float
    fetch_s: float
    prefill_s: float
    stall_s: float
    transfer_s: float
    decode_s: float
    reason: str

    @property
    def total_s(self) -> float:
        return self.queue_s + self.fetch_s + self.prefill_s + self.stall_s + self.transfer_s + self.decode_s


class _Option(NamedTuple):
    cost_s: float
    decode: Price
    reason: str
    prefill: Price | None = None

    @property
    def first(self) -> Price:
        return self.prefill or self.decode


class Router:
    """Keeps rates and booked load per group. Knows nothing of requests' lives."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self.rates = GroupRates(
            config.prior_prefill_tokens_per_s, config.prior_decode_step_s, config.prior_link_bytes_per_s
        )
        self.load = LoadBook()
        self.prices = Prices(self.rates, self.load)
        self.load.on_change = self.prices.changed
        self._least_gain_s = -math.inf if config.fetch_prefix == "always" else COST_GRAIN_S
        """A fetch that gains less is not worth it."""
        self._num_picks = 0
        self._weigh = weigher()

    # ------------------------------------------------------------ choosing
    def route(
        self,
        demand: Demand,
        members: Sequence[Member],
        hits: Mapping[Peer, int],
        avoid: Collection[Peer] = (),
        held: Mapping[Peer, int] = MappingProxyType({}),
        closed: Collection[Peer] = (),
    ) -> RoutingDecision | None:
        """The cheapest option among the routable members; `None` if there is none.

        Members in `avoid` are chosen only if there is nobody else, those in `closed` never. `held`: leading blocks that
        groups can send now.
        """
        live = _preferred(self.prices.roster(members).without(closed), avoid)
        if not live.prices:
            return None
        hits, held = _as_depths(hits, held)
        most_held = 0 if self._config.fetch_prefix == "never" else held.deepest
        work = self._work(demand, hits, most_held, live.prices[0])
        return self._decide(demand, work, held, self._cheapest(demand, work, live))

    def _cheapest(self, demand: Demand, work: Work, live: Roster) -> _Option:
        decodes = demand.max_new_tokens > 1
        (whole_s, price), pair = self._weigh(work, live, not (decodes and live.homes))
        if not decodes:
            return _Option(whole_s, price, "one token: no decode phase")
        if not live.homes:
            return _Option(whole_s, price, "no decode group lives")
        whole = _Option(whole_s, price, "cheapest on one group" if live.prefillers else "no prefill group lives")
        if pair is None or self._config.disaggregate == "never":
            return whole
        (first_s, prefill), (second_s, decode) = pair
        apart = _Option(first_s + second_s, decode, "cheaper to prefill apart", prefill)
        if self._config.disaggregate == "always" or apart.cost_s < whole_s - COST_GRAIN_S:
            return apart
        if whole_s < apart.cost_s - COST_GRAIN_S:
            return whole
        return min(whole, apart, key=lambda option: (option.first.turn, option.decode.turn))

    def route_decode(
        self, demand: Demand, prefill: Member, members: Sequence[Member], hits: Mapping[Peer, int]
    ) -> RoutingDecision | None:
        """Another decode group for what `prefill` is computing already; `None` if no other lives."""
        live = self.prices.roster(members).without((prefill.peer,))
        return self._receiver(demand, prefill, live.homes, hits, "decode group lost")

    def route_move(
        self,
        demand: Demand,
        source: Member,
        members: Sequence[Member],
        hits: Mapping[Peer, int],
        avoid: Collection[Peer],
    ) -> RoutingDecision | None:
        """Where a sequence of `source` may go on once its blocks were sent; `None` if nobody else lives."""
        others = _preferred(self.prices.roster(members).without((source.peer,)), avoid)
        best = self._receiver(demand, source, others.homes or others.prices, hits, "moved")
        return None if best is None else msgspec.structs.replace(best, prefill=None, num_prefill_tokens=0)

    # ------------------------------------------------------------ load
    def book(self, decision: RoutingDecision) -> Booking:
        """Books a decision's load; the caller owns the booking."""
        for peer in (decision.prefill, decision.decode):
            if peer is not None:
                self._num_picks += 1
                self.prices.turns[peer] = self._num_picks
        where = decision.prefill or decision.decode
        num_blocks = decision.num_blocks if decision.num_decoding else 0
        return self.load.book(where, decision.num_prefill_tokens, decision.decode, decision.num_decoding, num_blocks)

    def observe(self, peer: Peer, load: Load) -> None:
        """A group's report."""
        self.rates.observe(peer, load)
        self.prices.measured(peer)

    def observe_output(self, num_tokens: int) -> None:
        """How long a sequence became."""
        self.rates.observe_output(num_tokens)

    def forget(self, peer: Peer) -> None:
        """The group is gone; bookings on it are released by their owners."""
        self.rates.forget(peer)
        self.prices.forget(peer)

    @property
    def num_bookings(self) -> int:
        return len(self.load.bookings)

    def booked(self, peer: Peer) -> tuple[int, int]:
        """Tokens to prefill and sequences that this router has placed there and that are not yet done."""
        booked = self.load.booked(peer)
        return booked.num_tokens, booked.num_sequences

    def check_invariants(self) -> None:
        self.load.check_invariants()

    def num_blocks(self, demand: Demand, member: Member, num_hits: int = 0) -> int:
        """Blocks that the demand is expected to take on a group in the end, besides those that are there.

        With two block groups: of the main one, or as large a share of it as is taken of the other.
        """
        info, size = member.info, member.info.block_size
        num_output = min(demand.max_new_tokens, math.ceil(self.rates.output_tokens))
        shared = demand.num_tokens // size
        own = -(-(demand.num_tokens + num_output) // size) - shared
        if info.max_held is not None:
            return demand.num_sequences * min(shared + own, info.max_held)
        num_blocks = max(0, shared - num_hits) + demand.num_sequences * own
        if (beside := info.beside) is None:
            return num_blocks
        held = demand.num_sequences * min(shared + own, beside.max_held)
        return max(num_blocks, -(-held * info.num_blocks // beside.num_blocks))

    # ------------------------------------------------------------ costs
    def _work(self, demand: Demand, hits: Depths, most_held: int, price: Price) -> Work:
        size = price.member.info.block_size  # the same in a whole cluster
        usable = max(0, demand.num_tokens - 1) // size
        return Work(
            demand.num_tokens,
            demand.num_sequences,
            min(demand.max_new_tokens - 1, self.rates.output_tokens),
            hits,
            size,
            demand.num_tokens // size,
            usable,
            min(most_held, usable),
            self._least_gain_s,
        )

    def _receiver(
        self, demand: Demand, source: Member, prices: list[Price], hits: Mapping[Peer, int], reason: str
    ) -> RoutingDecision | None:
        first = self.prices.one(source)
        known, nothing = _as_depths(hits, {})
        work = self._work(demand, known, 0, first)
        best = cheapest(work.second_s, prices)
        return None if best is None else self._decide(demand, work, nothing, _Option(*best, reason, first))

    def _fetch(self, work: Work, held: Depths, first: Price) -> Fetch | None:
        """What of the prefix `first` should get from a peer; `None`: it computes what it lacks."""
        num_fetched = work.most_fetched - min(work.hits.depth(first.peer), work.usable)
        if num_fetched <= 0:
            return None
        seconds = TRANSFER_LATENCY_S + first.ferry_s(num_fetched)
        gain_s = num_fetched * work.size * first.token_s - max(0.0, seconds - first.queue_s)
        if gain_s <= self._least_gain_s:
            return None
        patience_s = max(MIN_FETCH_PATIENCE_S, FETCH_PATIENCE * num_fetched * work.size * first.prefill_s)
        sources = held.having_most()
        source = sources[0] if len(sources) == 1 else max(sources, key=str)
        return Fetch(source, work.most_fetched, seconds, patience_s)

    def _decide(self, demand: Demand, work: Work, held: Depths, option: _Option) -> RoutingDecision:
        hits, first, decode = work.hits, option.first, option.decode
        fetch, num_there = self._fetch(work, held, first), hits.depth(decode.peer)
        num_hits = fetch.num_blocks if fetch is not None else min(hits.depth(first.peer), work.usable)
        num_tokens = demand.num_tokens - num_hits * work.size
        missing = work.num_blocks - num_there
        return RoutingDecision(
            prefill=None if option.prefill is None else option.prefill.peer,
            decode=decode.peer,
            hits=hits,
            fetch=fetch,
            num_prefill_tokens=num_tokens,
            num_decoding=demand.num_decoding,
            num_blocks=self.num_blocks(demand, decode.member, num_there),
            queue_s=first.queue_s,
            fetch_s=0.0 if fetch is None else max(0.0, fetch.seconds - first.queue_s),
            prefill_s=num_tokens * first.prefill_s,
            stall_s=num_tokens * first.stall_s,
            transfer_s=0.0 if option.prefill is None else TRANSFER_LATENCY_S + decode.ferry_s(max(0, missing)),
            decode_s=work.decode_s(decode),
            reason=option.reason,
        )


def _as_depths(hits: Mapping[Peer, int], held: Mapping[Peer, int]) -> tuple[Depths, Depths]:
    """With the same bits."""
    if isinstance(hits, Depths) and isinstance(held, Depths):
        return hits, held
    owners = Owners({peer: 1 << i for i, peer in enumerate(hits.keys() | held.keys())})
    return Depths.of(hits, owners), Depths.of(held, owners)


def _preferred(roster: Roster, avoid: Collection[Peer]) -> Roster:
    others = roster.without(avoid)
    return others if others.prices else roster
