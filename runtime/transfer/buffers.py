"""Memory for payloads, used again: the pages of fresh memory cost more than what is copied into them."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import torch

KEPT_BYTES = 64 << 20
MAX_KEPT = 64


def best_fit(kept: Iterable[tuple[int, int]], size: int) -> int | None:
    """Of (key, bytes) the key of the smallest that holds `size`; of equal ones the last: it is in the cache."""
    fitting = [one for one in kept if one[1] >= size]
    return min(reversed(fitting), key=lambda one: one[1])[0] if fitting else None


class Buffers:
    """Thread-safe. Keeps at most `KEPT_BYTES` that nobody uses."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: list[torch.Tensor] = []
        """The one used last at the end."""

    def take(self, size: int) -> torch.Tensor:
        """1-d uint8, at least `size`: the smallest that fits, or a new one."""
        with self._lock:
            place = best_fit(((i, kept.numel()) for i, kept in enumerate(self._kept)), size)
            if place is not None:
                return self._kept.pop(place)
        return torch.empty(size, dtype=torch.uint8)

    def free(self, memory: torch.Tensor) -> None:
        with self._lock:
            self._kept.append(memory)
            while len(self._kept) > MAX_KEPT or sum(kept.numel() for kept in self._kept) > KEPT_BYTES:
                del self._kept[0]
