"""Which heads go from which source rank to which destination rank, between groups of unequal tensor-parallel size."""

from __future__ import annotations

import msgspec

from kvferry.runtime.errors import IncompatiblePeer
from kvferry.runtime.kv.layout import KVLayout


class Route(msgspec.Struct, frozen=True):
    """Heads (half-open, counted within each rank) that one source rank sends to one destination rank."""

    source_rank: int
    destination_rank: int
    source_heads: tuple[int, int]
    destination_heads: tuple[int, int]
    whole: bool
    """All heads of both ranks: a block travels as its one contiguous span."""

    @property
    def num_heads(self) -> int:
        return self.source_heads[1] - self.source_heads[0]


def copy_plan(source: KVLayout, destination: KVLayout) -> list[Route]:
    """Routes that bring every head of every destination rank exactly once.

    Heads that several source ranks hold are taken from one of them, chosen by destination rank so that the replicas
    share the load. Raises `IncompatiblePeer` if the layouts differ in more than the tensor-parallel size.
    """
    if source.fingerprint != destination.fingerprint:
        raise IncompatiblePeer(
            f"KV layouts differ: source {source.content_fields}, destination {destination.content_fields}; "
            "only groups with the same model, dtype and block size can exchange blocks"
        )
    replicas = max(1, source.tp_size // source.num_kv_heads)
    routes = []
    for rank in range(destination.tp_size):
        first, last = destination.heads(rank)
        head = first
        while head < last:
            holder = head * replicas + rank % replicas if replicas > 1 else head // source.rank_heads
            begin, end = source.heads(holder)
            until = min(end, last)
            routes.append(
                Route(
                    source_rank=holder,
                    destination_rank=rank,
                    source_heads=(head - begin, until - begin),
                    destination_heads=(head - first, until - first),
                    whole=until - head == source.rank_heads == destination.rank_heads,
                )
            )
            head = until
    return routes
