"""Python's garbage collector, and the heap, in processes that serve."""

from __future__ import annotations

import gc

from kvferry.runtime.heap import give_back

YOUNG_OBJECTS = 20_000
"""Collections begin after so many new containers: some megabytes, in place of every 700."""
OLDER = 20, 50


def settle_collector() -> None:
    """Once all is loaded: it stays, so collections pass it by from now on, and come seldom.

    A full collection looks at every object of torch, Ray and gRPC, tens of milliseconds in the midst of answers; and
    with 256 sequences young ones came several times a step. What a step makes holds no cycles.
    """
    give_back()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *OLDER)
