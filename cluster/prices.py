"""What work on each group costs at the moment: its seconds per token, per step, per block sent there.

A price is made from a group's rates, its last report and what is booked there, and made anew when one of them has
changed. So a decision, which weighs every group, is a few multiplications for each of them.
"""

from __future__ import annotations

import ctypes
import math
import struct
import sys
from collections.abc import Collection, Sequence
from operator import attrgetter

from kvferry.cluster.depths import Owners
from kvferry.cluster.messages import Load
from kvferry.cluster.registry import Member
from kvferry.cluster.router_load import NOTHING_BOOKED, GroupRates, LoadBook
from kvferry.runtime.ids import Peer

AHEAD = 1.25
"""Of a group's blocks and sequences, how many are given away: the next prompts are computed while decodes end. With
more there would be no room for their blocks when they are sent, and prompts would be computed twice (docs/log.md)."""


class Price:
    """Of one group. Valid once it came out of `Prices.roster`."""

    def __init__(self, member: Member) -> None:
        self.member = member
        self.peer = member.peer
        self.name = str(member.peer)
        self.role = member.role
        info = member.info
        self.max_context, self.max_sequences, self.num_blocks = info.max_context, info.max_sequences, info.num_blocks
        self.load: Load | None = None
        """The report that went into it; `None`: something else has changed since."""
        self.is_measured = False
        """Whether its rates went into it."""
        self.base_s = self.slope_s = 0.0
        """Of a decode step: with nobody, and for each sequence."""
        self.booked = NOTHING_BOOKED
        self.waiting, self.rate = 0, 1.0
        """Tokens to prefill, and how many it does in a second."""
        self.queue_s = 0.0
        """Until what waits there already is prefilled."""
        self.prefill_s = self.stall_s = self.token_s = 0.0
        """Per token: its own; others' meanwhile; both."""
        self.step_s = self.join_s = 0.0
        """Of a decode step; what each sequence that joins adds to its own steps and the others'."""
        self.block_s = 0.0
        """Per block of the main group that is sent there."""
        self.room_blocks = self.room_sequences = 0.0
        """A demand for no more than these has room for sure."""
        self.turn = (0, self.name)
        """Of groups that cost the same, the least is chosen: the number of its last choice, and its name."""

    def ferry_s(self, num_blocks: int) -> float:
        """Of so many leading blocks that the group lacks: of windows only the last ones travel."""
        info = self.member.info
        num_sent: float = num_blocks if info.max_held is None else min(num_blocks, info.max_held)
        if info.beside is not None:
            num_sent += min(num_blocks, info.beside.max_held) * info.beside.block_bytes / info.block_bytes
        return num_sent * self.block_s


class Rows:
    """The prices of a roster as `kernels/cpu/weigh.cpp` reads them."""

    _ROW = struct.Struct("5d8q")
    _STRIDE = _ROW.size + 3 * 8  # the rest is for what it computes

    def __init__(self, prices: list[Price], owners: Owners) -> None:
        self._buffer = ctypes.create_string_buffer(self._STRIDE * len(prices))
        self.address = ctypes.addressof(self._buffer)
        self.owners = owners
        self._places = {price.peer: (i, price, self._facts(price)) for i, price in enumerate(prices)}
        self._ranks = {name: rank for rank, name in enumerate(sorted([p.name for p in prices]))}
        for price in prices:
            self.write(price)

    def write(self, price: Price) -> None:
        """After it has changed."""
        i, present, facts = self._places.get(price.peer, (0, None, ()))
        if present is price:
            prices = price.queue_s, price.token_s, price.step_s, price.join_s, price.block_s
            picked, name = price.turn
            self._ROW.pack_into(self._buffer, self._STRIDE * i, *prices, *facts, picked, self._ranks[name])

    def _facts(self, price: Price) -> tuple[int, ...]:
        """What does not change: blocks that travel, the role, and the number of the group's bit."""
        info, beside = price.member.info, price.member.info.beside
        max_held = sys.maxsize if info.max_held is None else info.max_held
        others = (0, 0) if beside is None else (beside.max_held, beside.block_bytes)
        roles = (price.role != "decode") | (price.role != "prefill") << 1
        return max_held, *others, info.block_bytes, roles, self.owners.bit_of.get(price.peer, 0).bit_length() - 1


_room_blocks, _room_sequences = attrgetter("room_blocks"), attrgetter("room_sequences")


class Roster:
    """Groups that can be routed to."""

    def __init__(self, prices: list[Price], part_of: Roster | None = None) -> None:
        self.prices = prices
        self._part_of = part_of
        self.homes = [p for p in prices if p.role != "prefill"]
        self.prefillers = [p for p in prices if p.role != "decode"]
        self.peers = {p.peer for p in prices}
        self.least_context = min([p.max_context for p in self.homes or prices], default=0)
        self._rows: Rows | None = None
        self.renewed([])

    def renewed(self, prices: list[Price]) -> None:
        """These have changed."""
        homes = self.homes or self.prices
        self.least_room_blocks = min(map(_room_blocks, homes), default=0.0)
        self.least_room_sequences = min(map(_room_sequences, homes), default=0.0)
        if self._rows is not None:
            for price in prices:
                self._rows.write(price)

    def rows(self, owners: Owners) -> Rows:
        if self._rows is None or self._rows.owners is not owners:
            self._rows = Rows(self.prices, owners)
        return self._rows

    def without(self, peers: Collection[Peer]) -> Roster:
        return Roster([p for p in self.prices if p.peer not in peers], self.everyone) if peers else self

    @property
    def everyone(self) -> Roster:
        """Those whom this was taken from."""
        return self._part_of or self


class Prices:
    """Of all groups that were asked for."""

    def __init__(self, rates: GroupRates, book: LoadBook) -> None:
        self._rates = rates
        self._book = book
        self._prices: dict[Peer, Price] = {}
        self._borrowers: set[Peer] = set()
        """Those that were not measured themselves: others' rates went into their prices."""
        self._outdated: list[Price] = []
        self.turns: dict[Peer, int] = {}
        """When each was chosen last, counted in choices; tell `changed` too."""
        self._members: Sequence[Member] = ()
        self._roster = Roster([])

    def roster(self, members: Sequence[Member]) -> Roster:
        """The routable ones of `members`, at today's prices.

        The same list again means the same members in the same state, and `measured` was called for each new report.
        """
        if members is not self._members:
            self._roster = Roster([self._price(m) for m in members if m.routable])
            self._members = members
            self._outdated = [p for p in self._roster.prices if p.load is not p.member.load]
        if self._outdated:
            for price in self._outdated:
                self._renew(price)
            self._roster.renewed(self._outdated)
            self._outdated.clear()
        return self._roster

    def one(self, member: Member) -> Price:
        """Whether it is routable or not."""
        price = self._price(member)
        self._renew(price)
        return price

    def changed(self, peer: Peer) -> None:
        """Something is booked there, or no more."""
        price = self._prices.get(peer)
        if price is not None and price.load is not None:
            price.load = None
            self._outdated.append(price)

    def measured(self, peer: Peer) -> None:
        """A group has reported: its load and its rates have changed."""
        for outdated in (peer, *self._borrowers):
            self.changed(outdated)
            if price := self._prices.get(outdated):
                price.is_measured = False
        self._borrowers.clear()

    def forget(self, peer: Peer) -> None:
        """The group is gone: whoever borrowed its rates borrows others'."""
        self._prices.pop(peer, None)
        self.turns.pop(peer, None)
        self._members, self._roster = (), Roster([])
        self.measured(peer)

    def _price(self, member: Member) -> Price:
        price = self._prices.get(member.peer)
        if price is None or price.member is not member or price.role != member.role:
            price = self._prices[member.peer] = Price(member)
        return price

    def _renew(self, price: Price) -> None:
        if not price.is_measured:
            self._measure(price)
        load, info, booked = price.member.load, price.member.info, self._book.booked(price.peer)
        price.load, price.booked, rate = load, booked, price.rate
        price.waiting = max(load.waiting_tokens, booked.num_tokens)
        price.queue_s = price.waiting / rate
        # What runs on a prefill group is prefill, which counts as queue; only what was placed there to stay decodes.
        decoding = max(0 if price.role == "prefill" else load.num_running, booked.num_sequences)
        # Who is still to come from a prefill elsewhere does not wait for this one.
        waiting = decoding if price.role == "prefill" else load.num_running
        if price.role == "decode":
            waiting = max(1, waiting)
        price.stall_s, price.token_s = (1 + waiting) / rate, (2 + waiting) / rate
        price.step_s, price.join_s = price.base_s + price.slope_s * decoding, price.slope_s * (1 + decoding)
        price.turn = self.turns.get(price.peer, 0), price.name
        if booked.num_sequences == 0:
            price.room_blocks = price.room_sequences = math.inf
        else:  # of two block groups either may be full
            price.room_blocks = -math.inf if info.beside else AHEAD * info.num_blocks - booked.num_blocks
            price.room_sequences = AHEAD * info.max_sequences - booked.num_sequences

    def _measure(self, price: Price) -> None:
        peer, rates = price.peer, self._rates
        price.is_measured = True
        if not rates.knows(peer):
            self._borrowers.add(peer)
        price.rate = rates.prefill_tokens_per_s(peer)
        price.prefill_s = 1 / price.rate
        price.base_s, price.slope_s = rates.step_line(peer)
        price.block_s = price.member.info.block_bytes / rates.link_bytes_per_s(peer)
