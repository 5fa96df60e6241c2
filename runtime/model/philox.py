"""Philox 4x32-10: random numbers as a pure function of (key, counter), so that any worker draws the same.

Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"; known answers from the Random123 library.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

_MULTIPLIERS = np.array([0xD2511F53, 0xCD9E8D57], dtype=np.uint64)
_WEYL = np.array([0x9E3779B9, 0xBB67AE85], dtype=np.uint32)
_ROUNDS = 10


def philox4x32(counter: npt.NDArray[np.uint32], key: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """counter: `[N, 4]`, key: `[N, 2]`; returns `[N, 4]` random words."""
    c0, c1, c2, c3 = counter.T
    k0, k1 = key.T
    for _ in range(_ROUNDS):
        first = c0 * _MULTIPLIERS[0]
        second = c2 * _MULTIPLIERS[1]
        c0, c1 = (second >> np.uint64(32)).astype(np.uint32) ^ c1 ^ k0, second.astype(np.uint32)
        c2, c3 = (first >> np.uint64(32)).astype(np.uint32) ^ c3 ^ k1, first.astype(np.uint32)
        k0, k1 = k0 + _WEYL[0], k1 + _WEYL[1]
    return np.stack((c0, c1, c2, c3), axis=-1)


class Draw(NamedTuple):
    """What a random number is a function of, besides what it is drawn for."""

    seed: int
    """64 bits."""
    sequence: int
    """Index of the sequence in its request."""
    position: int


def gumbel(draws: Sequence[Draw], items: npt.NDArray[np.int64], kind: int) -> npt.NDArray[np.float64]:
    """One number of the Gumbel distribution for each row's draw and each of its `items` `[R, K]` of some kind."""
    num_rows, num_items = items.shape
    counter = np.empty((num_rows, num_items, 4), dtype=np.uint32)
    counter[..., 0] = np.array([[d.position] for d in draws])
    counter[..., 1] = np.array([[d.sequence] for d in draws])
    counter[..., 2], counter[..., 3] = items, kind
    key = np.array([(d.seed & 0xFFFFFFFF, d.seed >> 32) for d in draws], dtype=np.uint32)
    words = philox4x32(counter.reshape(-1, 4), np.repeat(key, num_items, axis=0))
    high, low = words[:, 0].astype(np.uint64), words[:, 1].astype(np.uint64)
    fraction = ((high << np.uint64(32) | low) >> np.uint64(12)).astype(np.float64) * 2.0**-52 + 2.0**-53
    noise: npt.NDArray[np.float64] = -np.log(-np.log(fraction))  # the fraction is never 0 nor 1
    return noise.reshape(num_rows, num_items)
