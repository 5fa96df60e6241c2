"""How many leading blocks of a prompt each group has, as few sets of groups: a group is looked up only when it is asked
for, so a fleet's size costs nothing here."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from kvferry.cluster.holders import bits
from kvferry.runtime.ids import Peer

Level = tuple[int, int]
"""A set of groups, one bit each, and a depth: leading blocks that all of them have."""


class Owners:
    """Whose each bit is. Never changed once it was made."""

    def __init__(self, bit_of: Mapping[Peer, int]) -> None:
        self.bit_of = bit_of
        self.peer_of = {bit: peer for peer, bit in bit_of.items()}
        self._peers: Collection[Peer] = ()
        self._mask = 0

    def mask(self, peers: Collection[Peer]) -> int:
        """Of those of `peers` that have a bit. The same collection again means the same ones."""
        if peers is not self._peers:
            self._mask = sum(self.bit_of.get(peer, 0) for peer in peers)
            self._peers = peers
        return self._mask


class Depths(Mapping[Peer, int]):
    """Those who have none are left out. `levels`: deeper and deeper, each set within the one before."""

    __slots__ = ("levels", "owners")

    def __init__(self, levels: list[Level], owners: Owners) -> None:
        self.levels = levels
        self.owners = owners

    @classmethod
    def of(cls, depths: Mapping[Peer, int], owners: Owners) -> Depths:
        """Of those that have bits."""
        levels, holders = list[Level](), 0
        known = {bit: depth for peer, bit in owners.bit_of.items() if (depth := depths.get(peer, 0))}
        for depth in sorted(set(known.values()), reverse=True):
            holders |= sum(bit for bit, its_depth in known.items() if its_depth == depth)
            levels.append((holders, depth))
        return cls(levels[::-1], owners)

    def depth(self, peer: Peer) -> int:
        bit = self.owners.bit_of.get(peer, 0)
        for holders, depth in reversed(self.levels):
            if holders & bit:
                return depth
        return 0

    @property
    def deepest(self) -> int:
        return self.levels[-1][1] if self.levels else 0

    def having_most(self) -> list[Peer]:
        """Who has `deepest`."""
        return self._peers(-1)

    def among(self, peers: Collection[Peer]) -> Depths:
        """Only those of `peers`."""
        mask = self.owners.mask(peers)
        if not self.levels or not self.levels[0][0] & ~mask:
            return self
        return Depths([(left, depth) for holders, depth in self.levels if (left := holders & mask)], self.owners)

    def __getitem__(self, peer: Peer) -> int:
        if depth := self.depth(peer):
            return depth
        raise KeyError(peer)

    def __iter__(self) -> Iterator[Peer]:
        return iter(self._peers(0))

    def __len__(self) -> int:
        return self.levels[0][0].bit_count() if self.levels else 0

    def _peers(self, level: int) -> list[Peer]:
        return [self.owners.peer_of[bit] for bit in bits(self.levels[level][0])] if self.levels else []
