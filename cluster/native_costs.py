"""Groups weighed in C++ (`kernels/cpu/weigh.cpp`): one call for the whole fleet."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable

from kvferry.cluster.costs import COST_GRAIN_S, TRANSFER_LATENCY_S, Found, Work, weigh
from kvferry.cluster.prices import Roster
from kvferry.kernels.cpu.library import short_calls

_REQUEST = struct.Struct("10q5d")
_FOUND = struct.Struct("3d3q")

Weigh = Callable[[Work, Roster, bool], Found]
"""`costs.weigh`, or the same in C++."""


def weigher() -> Weigh:
    """In C++, or in Python where that is not compiled."""
    code = short_calls()
    return weigh if code is None else NativeWeigher(code).weigh


class NativeWeigher:
    """`code`: of `short_calls`."""

    def __init__(self, code: ctypes.CDLL) -> None:
        self._call = code.kvferry_weigh
        self._found = ctypes.create_string_buffer(_FOUND.size)
        self._found_at = ctypes.addressof(self._found)

    def weigh(self, work: Work, live: Roster, anywhere: bool) -> Found:
        """As `costs.weigh`."""
        everyone, levels = live.everyone, work.hits.levels
        prices, rows = everyone.prices, everyone.rows(work.hits.owners)
        words = -(-levels[0][0].bit_length() // 64) if levels else 0
        request = _REQUEST.pack(
            len(prices),
            len(levels),
            words,
            live is not everyone,
            anywhere,
            work.num_tokens,
            work.size,
            work.num_blocks,
            work.usable,
            work.most_fetched,
            work.num_sequences,
            work.num_steps,
            work.least_gain_s,
            TRANSFER_LATENCY_S,
            COST_GRAIN_S,
        )
        for holders, depth in reversed(levels):
            request += (depth | holders << 64).to_bytes(8 + 8 * words, "little")
        if live is not everyone:
            request += bytes([p.peer in live.peers for p in prices])
        self._call(rows.address, request, self._found_at)
        whole_s, first_s, second_s, whole, first, second = _FOUND.unpack_from(self._found)
        pair = None if first < 0 else ((first_s, prices[first]), (second_s, prices[second]))
        return (whole_s, prices[whole]), pair
