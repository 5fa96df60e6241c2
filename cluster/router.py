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
holds most of it. Load is booked when it is decided; of a booking and a group's report of it the larger counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal

import msgspec

from kvferry.cluster.messages import GroupInfo, Load
from kvferry.cluster.registry import Member
from kvferry.cluster.router_load import Booking, GroupRates, LoadBook
from kvferry.runtime.config import check_range
from kvferry.runtime.ids import Peer

TRANSFER_LATENCY_S = 0.003
"""Expect, ticket and the last message's way: about three small messages and a step border."""
FETCH_PATIENCE = 4.0
"""A fetch is given up when it takes so many times longer than computing its blocks would have taken."""
MIN_FETCH_PATIENCE_S = 1.0
COST_GRAIN_S = 1e-4
"""Costs closer than this are ties; ties go to who was chosen least recently."""


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
    hits: dict[Peer, int]
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


class Router:
    """Keeps rates and booked load per group. Knows nothing of requests' lives."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self.rates = GroupRates(
            config.prior_prefill_tokens_per_s, config.prior_decode_step_s, config.prior_link_bytes_per_s
        )
        self.load = LoadBook()
        self._picked: dict[Peer, int] = {}
        self._num_picks = 0

    # ------------------------------------------------------------ choosing
    def route(
        self,
        demand: Demand,
        members: Sequence[Member],
        hits: Mapping[Peer, int],
        avoid: Iterable[Peer] = (),
        held: Mapping[Peer, int] = MappingProxyType({}),
    ) -> RoutingDecision | None:
        """The cheapest option among the routable members; `None` if there is none.

        Members in `avoid` are chosen only if there is nobody else. `held`: leading blocks that groups can send now.
        """
        live = _preferred(members, avoid)
        if demand.max_new_tokens <= 1:
            return self._cheapest(self._wholes(demand, live, hits, held, "one token: no decode phase"))
        decoders = [m for m in live if m.role != "prefill"]
        prefillers = [m for m in live if m.role != "decode"]
        if not decoders:
            return self._cheapest(self._wholes(demand, live, hits, held, "no decode group lives"))
        why = "cheapest on one group" if prefillers else "no prefill group lives"
        whole = self._wholes(demand, decoders, hits, held, why)
        ship = self._shipped(demand, prefillers, decoders, hits, held)
        if self._config.disaggregate == "never" or not ship:
            return self._cheapest(whole)
        return self._cheapest(ship if self._config.disaggregate == "always" else whole + ship)

    def route_decode(
        self, demand: Demand, prefill: Member, members: Sequence[Member], hits: Mapping[Peer, int]
    ) -> RoutingDecision | None:
        """Another decode group for what `prefill` is computing already; `None` if no other lives."""
        decoders = [m for m in _preferred(members, ()) if m.role != "prefill" and m.peer != prefill.peer]
        return self._cheapest([self._pair(demand, prefill, m, hits, "decode group lost") for m in decoders])

    def route_move(
        self, demand: Demand, source: Member, members: Sequence[Member], hits: Mapping[Peer, int], avoid: Iterable[Peer]
    ) -> RoutingDecision | None:
        """Where a sequence of `source` may go on once its blocks were sent; `None` if nobody else lives."""
        others = _preferred([m for m in members if m.peer != source.peer], avoid)
        homes = [m for m in others if m.role != "prefill"] or others
        best = self._cheapest([self._pair(demand, source, m, hits, "moved") for m in homes])
        return None if best is None else msgspec.structs.replace(best, prefill=None, num_prefill_tokens=0)

    # ------------------------------------------------------------ load
    def book(self, decision: RoutingDecision) -> Booking:
        """Books a decision's load; the caller owns the booking."""
        for peer in (decision.prefill, decision.decode):
            if peer is not None:
                self._num_picks += 1
                self._picked[peer] = self._num_picks
        where = decision.prefill or decision.decode
        num_blocks = decision.num_blocks if decision.num_decoding else 0
        return self.load.book(where, decision.num_prefill_tokens, decision.decode, decision.num_decoding, num_blocks)

    def observe(self, peer: Peer, load: Load) -> None:
        """A group's report."""
        self.rates.observe(peer, load)

    def observe_output(self, num_tokens: int) -> None:
        """How long a sequence became."""
        self.rates.observe_output(num_tokens)

    def forget(self, peer: Peer) -> None:
        """The group is gone; bookings on it are released by their owners."""
        self.rates.forget(peer)
        self._picked.pop(peer, None)

    @property
    def num_bookings(self) -> int:
        return len(self.load.bookings)

    def booked(self, peer: Peer) -> tuple[int, int]:
        """Tokens to prefill and sequences that this router has placed there and that are not yet done."""
        booked = self.load.booked(peer)
        return booked.num_tokens, booked.num_sequences

    def check_invariants(self) -> None:
        self.load.check_invariants()

    def num_blocks(self, demand: Demand, member: Member, hits: Mapping[Peer, int]) -> int:
        """Blocks that the demand is expected to take on a group in the end, besides those that are there.

        With two block groups: of the main one, or as large a share of it as is taken of the other.
        """
        info, size = member.info, member.info.block_size
        num_output = min(demand.max_new_tokens, math.ceil(self.rates.output_tokens))
        shared = demand.num_tokens // size
        own = -(-(demand.num_tokens + num_output) // size) - shared
        if info.max_held is not None:
            return demand.num_sequences * min(shared + own, info.max_held)
        num_blocks = max(0, shared - hits.get(member.peer, 0)) + demand.num_sequences * own
        if (beside := info.beside) is None:
            return num_blocks
        held = demand.num_sequences * min(shared + own, beside.max_held)
        return max(num_blocks, -(-held * info.num_blocks // beside.num_blocks))

    # ------------------------------------------------------------ costs
    def _wholes(
        self,
        demand: Demand,
        members: list[Member],
        hits: Mapping[Peer, int],
        held: Mapping[Peer, int],
        reason: str,
    ) -> list[RoutingDecision]:
        return [
            self._whole(demand, m, hits, fetch, reason)
            for m in members
            for fetch in self._fetches(demand, m, hits, held)
        ]

    def _whole(
        self, demand: Demand, member: Member, hits: Mapping[Peer, int], fetch: Fetch | None, reason: str
    ) -> RoutingDecision:
        queue_s, prefill_s, stall_s, num_tokens = self._prefill(demand, member, hits, fetch)
        return RoutingDecision(
            prefill=None,
            decode=member.peer,
            hits=dict(hits),
            fetch=fetch,
            num_prefill_tokens=num_tokens,
            num_decoding=demand.num_decoding,
            num_blocks=self.num_blocks(demand, member, hits),
            queue_s=queue_s,
            fetch_s=_beyond(queue_s, fetch),
            prefill_s=prefill_s,
            stall_s=stall_s,
            transfer_s=0.0,
            decode_s=self._decode(demand, member),
            reason=reason,
        )

    def _pair(
        self,
        demand: Demand,
        prefill: Member,
        decode: Member,
        hits: Mapping[Peer, int],
        reason: str,
        fetch: Fetch | None = None,
    ) -> RoutingDecision:
        queue_s, prefill_s, stall_s, num_tokens = self._prefill(demand, prefill, hits, fetch)
        missing = demand.num_tokens // decode.info.block_size - hits.get(decode.peer, 0)
        num_bytes = _ferried_bytes(decode.info, max(0, missing))
        return RoutingDecision(
            prefill=prefill.peer,
            decode=decode.peer,
            hits=dict(hits),
            fetch=fetch,
            num_prefill_tokens=num_tokens,
            num_decoding=demand.num_decoding,
            num_blocks=self.num_blocks(demand, decode, hits),
            queue_s=queue_s,
            fetch_s=_beyond(queue_s, fetch),
            prefill_s=prefill_s,
            stall_s=stall_s,
            transfer_s=TRANSFER_LATENCY_S + num_bytes / self.rates.link_bytes_per_s(decode.peer),
            decode_s=self._decode(demand, decode),
            reason=reason,
        )

    def _shipped(
        self,
        demand: Demand,
        prefillers: list[Member],
        decoders: list[Member],
        hits: Mapping[Peer, int],
        held: Mapping[Peer, int],
    ) -> list[RoutingDecision]:
        """Pairs for which there is something to ship."""
        return [
            self._pair(demand, p, d, hits, "cheaper to prefill apart", fetch)
            for p in prefillers
            for fetch in self._fetches(demand, p, hits, held)
            for d in decoders
            if p.peer != d.peer and hits.get(d.peer, 0) < demand.num_tokens // d.info.block_size
        ]

    def _fetches(
        self, demand: Demand, first: Member, hits: Mapping[Peer, int], held: Mapping[Peer, int]
    ) -> list[Fetch | None]:
        """The ways for `first` to come by the prefix that it lacks; `None`: it computes it."""
        size, usable = first.info.block_size, _usable(demand, first)
        others = [peer for peer in held if peer != first.peer]
        if self._config.fetch_prefix == "never" or not others:
            return [None]
        source = max(others, key=lambda peer: (held[peer], str(peer)))
        num_blocks = min(held[source], usable)
        num_fetched = num_blocks - min(hits.get(first.peer, 0), usable)
        if num_fetched <= 0:
            return [None]
        seconds = TRANSFER_LATENCY_S + _ferried_bytes(first.info, num_fetched) / self.rates.link_bytes_per_s(first.peer)
        compute_s = num_fetched * size / self.rates.prefill_tokens_per_s(first.peer)
        fetch = Fetch(source, num_blocks, seconds, max(MIN_FETCH_PATIENCE_S, FETCH_PATIENCE * compute_s))
        return [fetch] if self._config.fetch_prefix == "always" else [None, fetch]

    def _prefill(
        self, demand: Demand, member: Member, hits: Mapping[Peer, int], fetch: Fetch | None
    ) -> tuple[float, float, float, int]:
        """Seconds of queue, prefill and stall; tokens to compute (at least the last one)."""
        rate = self.rates.prefill_tokens_per_s(member.peer)
        num_hits = fetch.num_blocks if fetch is not None else hits.get(member.peer, 0)
        num_tokens = demand.num_tokens - min(num_hits, _usable(demand, member)) * member.info.block_size
        waiting = max(member.load.waiting_tokens, self.load.booked(member.peer).num_tokens)
        # Who is still to come from a prefill elsewhere does not wait for this one.
        decoding = self._num_decoding(member) if member.role == "prefill" else member.load.num_running
        if member.role == "decode":
            decoding = max(1, decoding)
        return waiting / rate, num_tokens / rate, num_tokens / rate * (1 + decoding), num_tokens

    def _decode(self, demand: Demand, member: Member) -> float:
        num_steps = min(demand.max_new_tokens - 1, self.rates.output_tokens)
        return num_steps * self.rates.joined_step_s(member.peer, self._num_decoding(member), demand.num_sequences)

    def _num_decoding(self, member: Member) -> int:
        # What runs on a prefill group is prefill, which counts as queue; only what was placed there to stay decodes.
        reported = 0 if member.role == "prefill" else member.load.num_running
        return max(reported, self.load.booked(member.peer).num_sequences)

    def _cheapest(self, options: list[RoutingDecision]) -> RoutingDecision | None:
        def key(option: RoutingDecision) -> tuple[float, int, int, str]:
            where = option.prefill or option.decode
            return (
                round(option.total_s / COST_GRAIN_S),
                self._picked.get(where, 0),
                self._picked.get(option.decode, 0),
                f"{where} {option.decode}",
            )

        return min(options, key=key, default=None)


def _ferried_bytes(info: GroupInfo, num_blocks: int) -> int:
    """Of so many leading blocks that a group lacks: of windows only the last ones travel."""
    num_bytes = (num_blocks if info.max_held is None else min(num_blocks, info.max_held)) * info.block_bytes
    if info.beside is not None:
        num_bytes += min(num_blocks, info.beside.max_held) * info.beside.block_bytes
    return num_bytes


def _usable(demand: Demand, member: Member) -> int:
    """Blocks of a prefix that a group need not compute: the last token is always computed, for its logits."""
    return max(0, demand.num_tokens - 1) // member.info.block_size


def _beyond(queue_s: float, fetch: Fetch | None) -> float:
    """Seconds that a fetch goes on after the queue is over."""
    return 0.0 if fetch is None else max(0.0, fetch.seconds - queue_s)


def _preferred(members: Sequence[Member], avoid: Iterable[Peer]) -> list[Member]:
    avoided = set(avoid)
    live = [m for m in members if m.routable]
    return [m for m in live if m.peer not in avoided] or live
