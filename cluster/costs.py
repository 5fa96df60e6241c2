"""What a request costs on each group: the parts of the sum that `router.py` explains, from today's prices, and the
cheapest groups. `kernels/cpu/weigh.cpp` does the same for whole fleets, with the same results (`native_costs.py`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kvferry.cluster.depths import Depths
from kvferry.cluster.prices import Price, Roster

TRANSFER_LATENCY_S = 0.003
"""Expect, ticket and the last message's way: about three small messages and a step border."""
COST_GRAIN_S = 1e-4
"""Costs closer than this are ties; ties go to who was chosen least recently."""

Cost = tuple[float, Price]
"""Seconds of some of the work on a group."""


class Work(NamedTuple):
    """What is to be placed, and what is known of its prompt."""

    num_tokens: int
    num_sequences: int
    num_steps: float
    """Of decode, expected."""
    hits: Depths
    """Leading blocks that each group holds or is about to hold."""
    size: int
    """Of a block."""
    num_blocks: int
    """Full ones."""
    usable: int
    """Of these, need not be computed where they are: the last token always is, for its logits."""
    most_fetched: int
    """Usable leading ones that some group can send; 0: nothing is fetched."""
    least_gain_s: float
    """A fetch that gains less is not worth it."""

    def first_s(self, price: Price) -> float:
        """Queue, fetch, prefill and stall."""
        num_hits = min(self.hits.depth(price.peer), self.usable)
        computed_s = price.queue_s + (self.num_tokens - num_hits * self.size) * price.token_s
        if num_hits >= self.most_fetched:
            return computed_s
        fetch_s = TRANSFER_LATENCY_S + price.ferry_s(self.most_fetched - num_hits)  # fetch and queue go on at once
        left_s = (self.num_tokens - self.most_fetched * self.size) * price.token_s
        fetched_s = max(fetch_s, price.queue_s) + left_s
        return fetched_s if computed_s - fetched_s > self.least_gain_s else computed_s

    def second_s(self, price: Price) -> float:
        """Transfer and decode."""
        num_blocks = self.num_blocks - self.hits.depth(price.peer)
        return TRANSFER_LATENCY_S + price.ferry_s(num_blocks) + self.decode_s(price)

    def whole_s(self, price: Price) -> float:
        """All on one group."""
        return self.first_s(price) + self.decode_s(price)

    def decode_s(self, price: Price) -> float:
        return self.num_steps * (price.step_s + self.num_sequences * price.join_s)


Found = tuple[Cost, tuple[Cost, Cost] | None]
"""The cheapest group for all of it, and the cheapest pair of two groups between which there is something to ship: who
prefills, and who decodes; `None` if there is none."""


def weigh(work: Work, live: Roster, anywhere: bool) -> Found:
    """Among those that live.

    `anywhere`: all may be done on a group that only prefills, too. It must be where there is no other.
    """
    whole = cheapest(work.whole_s, live.prices if anywhere else live.homes)
    assert whole is not None, "nobody lives"
    return whole, _pair(work, live)


def cheapest(cost_s: Callable[[Price], float], prices: list[Price]) -> Cost | None:
    """Among ties who was chosen least recently."""
    costs = [(cost_s(price), price) for price in prices]
    if not costs:
        return None
    limit_s = min([cost_s for cost_s, _ in costs]) + COST_GRAIN_S
    return min([cost for cost in costs if cost[0] <= limit_s], key=lambda cost: cost[1].turn)


def _pair(work: Work, live: Roster) -> tuple[Cost, Cost] | None:
    firsts, lacking = live.prefillers, [p for p in live.homes if work.hits.depth(p.peer) < work.num_blocks]
    first, second = cheapest(work.first_s, firsts), cheapest(work.second_s, lacking)
    if first is None or second is None:
        return None
    busy = first[1]
    if busy is not second[1]:
        return first, second
    pairs = list[tuple[Cost, Cost]]()  # one of the two goes elsewhere
    if other := cheapest(work.first_s, [p for p in firsts if p is not busy]):
        pairs.append((other, second))
    if other := cheapest(work.second_s, [p for p in lacking if p is not busy]):
        pairs.append((first, other))
    return min(pairs, key=lambda pair: (pair[0][0] + pair[1][0], firsts.index(pair[0][1])), default=None)
