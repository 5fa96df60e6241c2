"""What a request costs on each group: the parts of the sum that `router.py` explains, from today's prices.

Of a large fleet only those groups are weighed that may turn out the cheapest. They come in the order of a part of their
cost, so that all others are passed over once that part alone is too much; and each has a bound, which is what it would
cost with the longest prefix that any group has or can be sent. Bounds are computed as the costs are, with a smaller
factor, so rounding cannot put them above.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kvferry.cluster.prices import Cost, Price
from kvferry.runtime.ids import Peer

TRANSFER_LATENCY_S = 0.003
"""Expect, ticket and the last message's way: about three small messages and a step border."""
COST_GRAIN_S = 1e-4
"""Costs closer than this are ties; ties go to who was chosen least recently."""


class Work(NamedTuple):
    """What is to be placed, and what is known of its prompt."""

    num_tokens: int
    num_sequences: int
    num_steps: float
    """Of decode, expected."""
    hits: Mapping[Peer, int]
    """Leading blocks that each group holds or is about to hold, and that it can send."""
    held: Mapping[Peer, int]
    size: int
    """Of a block."""
    num_blocks: int
    """Full ones."""
    usable: int
    """Of these, need not be computed where they are: the last token always is, for its logits."""
    deepest: int
    """Leading ones that some group has."""
    most_held: int
    """Leading ones that some group can send; 0: nothing is fetched."""
    most_fetched: int
    """Of these, the usable ones."""
    least_gain_s: float
    """A fetch that gains less is not worth it."""
    least_tokens: float
    """To compute, wherever that is."""
    least_prefill_s: float
    """Of these, on the fastest group."""

    def firsts(self, prices: Iterable[Price], limit_s: float = math.inf) -> list[Cost]:
        """Seconds of queue, fetch, prefill and stall on each that may be the cheapest. `prices`: by `queue_s`.

        None of more than `limit_s`; all others within a grain of the least.
        """
        near, least_tokens, least_s = list[Cost](), self.least_tokens, self.least_prefill_s
        for price in prices:
            queue_s = price.queue_s
            if queue_s + least_s > limit_s:
                break
            if queue_s + least_tokens * price.token_s > limit_s:
                continue
            cost_s = self._first_s(price)
            if cost_s <= limit_s:
                near.append((cost_s, price))
                if cost_s + COST_GRAIN_S < limit_s:
                    limit_s = cost_s + COST_GRAIN_S
        return near

    def wholes(self, prices: Iterable[Price], limit_s: float = math.inf) -> list[Cost]:
        """As `firsts`, with the seconds of decode. `prices`: by `alone_s`."""
        near, least_tokens, least_s = list[Cost](), self.least_tokens, self.least_prefill_s
        steps, n = float(self.num_steps), float(self.num_sequences)  # floats alone are multiplied faster
        for price in prices:
            least_decode_s = steps * price.alone_s
            if least_s + least_decode_s > limit_s:
                break
            if price.queue_s + least_tokens * price.token_s + least_decode_s > limit_s:
                continue
            decode_s = steps * (price.step_s + n * price.join_s)
            cost_s = self._first_s(price) + decode_s
            if cost_s <= limit_s:
                near.append((cost_s, price))
                if cost_s + COST_GRAIN_S < limit_s:
                    limit_s = cost_s + COST_GRAIN_S
        return near

    def seconds(self, prices: Iterable[Price]) -> list[Cost]:
        """Seconds of transfer and decode on each that may be the cheapest: all within a grain of the least.

        `prices`: by `alone_s`.
        """
        near, hits, num_blocks, limit_s = list[Cost](), self.hits, self.num_blocks, math.inf
        steps, n = float(self.num_steps), float(self.num_sequences)
        for price in prices:
            if TRANSFER_LATENCY_S + steps * price.alone_s > limit_s:
                break
            num = num_blocks - hits.get(price.peer, 0)
            ferry_s = num * price.block_s if price.is_plain else price.ferry_s(num)
            cost_s = TRANSFER_LATENCY_S + ferry_s + steps * (price.step_s + n * price.join_s)
            if cost_s <= limit_s:
                near.append((cost_s, price))
                if cost_s + COST_GRAIN_S < limit_s:
                    limit_s = cost_s + COST_GRAIN_S
        return near

    def _first_s(self, price: Price) -> float:
        num_hits, queue_s, token_s = self.hits.get(price.peer, 0), price.queue_s, price.token_s
        if num_hits > self.usable:
            num_hits = self.usable
        cost_s = queue_s + (self.num_tokens - num_hits * self.size) * token_s
        most = self.most_fetched
        if num_hits < most:  # fetch and queue go on at once
            fetch_s = TRANSFER_LATENCY_S + price.ferry_s(most - num_hits)
            fetched_s = max(fetch_s, queue_s) + (self.num_tokens - most * self.size) * token_s
            if cost_s - fetched_s > self.least_gain_s:
                cost_s = fetched_s
        return cost_s
