"""What a request costs on each group: the parts of the sum that `router.py` explains, from today's prices.

Of a large fleet only those groups are weighed that may turn out the cheapest: each has a bound, which is what it would
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

    def decodes(self, prices: list[Price]) -> list[Cost]:
        """Seconds of decode, on each."""
        steps, n = float(self.num_steps), float(self.num_sequences)  # floats alone are multiplied faster
        return [(steps * (p.step_s + n * p.join_s), p) for p in prices]

    def firsts(self, then: Iterable[Cost], limit_s: float = math.inf) -> list[Cost]:
        """Seconds of queue, fetch, prefill and stall, and what comes then, on each that may be the cheapest.

        None of more than `limit_s`; all others within a grain of the least.
        """
        hits, size, usable, num_tokens, most = self.hits, self.size, self.usable, self.num_tokens, self.most_fetched
        left, least_gain_s = num_tokens - most * size, self.least_gain_s
        least_tokens = float(num_tokens - max(most, min(self.deepest, usable)) * size)
        near = []
        for then_s, price in then:
            queue_s, token_s = price.queue_s, price.token_s
            if queue_s + least_tokens * token_s + then_s > limit_s:
                continue
            num_hits = hits.get(price.peer, 0)
            if num_hits > usable:
                num_hits = usable
            cost_s = queue_s + (num_tokens - num_hits * size) * token_s
            if num_hits < most:  # fetch and queue go on at once
                num = most - num_hits
                fetch_s = TRANSFER_LATENCY_S + (num * price.block_s if price.is_plain else price.ferry_s(num))
                fetched_s = (fetch_s if fetch_s > queue_s else queue_s) + left * token_s
                if cost_s - fetched_s > least_gain_s:
                    cost_s = fetched_s
            cost_s += then_s
            if cost_s <= limit_s:
                near.append((cost_s, price))
                if cost_s + COST_GRAIN_S < limit_s:
                    limit_s = cost_s + COST_GRAIN_S
        return near

    def seconds(self, decodes: Iterable[Cost]) -> list[Cost]:
        """Seconds of transfer and decode, on each that may be the cheapest: all within a grain of the least."""
        hits, num_blocks, limit_s = self.hits, self.num_blocks, math.inf
        near = []
        for decode_s, price in decodes:
            if TRANSFER_LATENCY_S + decode_s > limit_s:
                continue
            num = num_blocks - hits.get(price.peer, 0)
            ferry_s = num * price.block_s if price.is_plain else price.ferry_s(num)
            cost_s = TRANSFER_LATENCY_S + ferry_s + decode_s
            if cost_s <= limit_s:
                near.append((cost_s, price))
                if cost_s + COST_GRAIN_S < limit_s:
                    limit_s = cost_s + COST_GRAIN_S
        return near
