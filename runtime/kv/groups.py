"""Block groups: layers whose blocks live and die together.

    full      a block lives as long as its sequence, which may be all layers' wish, or some layers'
    window    a layer sees the last `window` tokens only (its own included): older blocks are given back as it runs

A model has one group or both. Each has a pool and storage of its own; block ids of the second follow those of the
first, so one id names one block. What a block of a group holds depends on the tokens before it and on the group, so
the name of a window group beside a full one is the chain's hash with a constant mixed in: pools, tickets and messages
need not know of groups.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvferry.runtime.errors import InvalidArgument
from kvferry.runtime.ids import BlockHash, BlockId
from kvferry.runtime.kv.hashing import HASH_BYTES, hash_root
from kvferry.runtime.kv.layout import KVLayout

_BESIDE_FULL = int.from_bytes(b"window-beside-16", "big")


class Named(msgspec.Struct, frozen=True):
    """A block by the place and the name it has in its group."""

    index: int
    """In the chain."""
    hash: BlockHash
    parent: BlockHash | None
    """The block without which it could not be found."""


class BlockGroup(msgspec.Struct, frozen=True, kw_only=True):
    layout: KVLayout
    """Of its layers alone."""
    layers: tuple[int, ...]
    """Which of the model's they are."""
    num_blocks: int
    first_block: BlockId = BlockId(0)
    window: int | None = None
    """Tokens that the furthest-sighted of its layers sees; `None`: all."""
    beside_full: bool = False

    def first_needed(self, position: int) -> int:
        """Index of the first block that the token at `position`, or a later one, reads."""
        if self.window is None:
            return 0
        return max(0, position - self.window + 1) // self.layout.block_size

    @property
    def max_held(self) -> int | None:
        """Blocks with what a token sees, back from the last full one, and with itself; `None`: all that there are."""
        return None if self.window is None else -(-(self.window - 1) // self.layout.block_size) + 1

    def held_bytes(self, num_tokens: int) -> int:
        """Of one rank, for one sequence of so many tokens."""
        count = -(-num_tokens // self.layout.block_size)
        return self.layout.block_bytes * (count if self.max_held is None else min(count, self.max_held))

    @property
    def max_tokens(self) -> int | None:
        """Of a sequence that has the pool for itself; `None`: no limit."""
        if self.max_held is not None and self.max_held <= self.num_blocks:
            return None
        return self.num_blocks * self.layout.block_size

    def name(self, block_hash: BlockHash) -> BlockHash:
        """Of the group's block that a chain's hash stands for."""
        if not self.beside_full:
            return block_hash
        return BlockHash((int.from_bytes(block_hash, "big") ^ _BESIDE_FULL).to_bytes(HASH_BYTES, "big"))

    def named(self, hashes: Sequence[BlockHash], index: int) -> Named:
        """Blocks of a window have no parent: they are found although those before them are gone."""
        if self.window is not None:
            return Named(index, self.name(hashes[index]), None)
        return Named(index, hashes[index], hashes[index - 1] if index else None)

    def needed(self, hashes: Sequence[BlockHash]) -> list[Named]:
        """Blocks of a chain of full ones without which it is no prefix for the token after it."""
        first = self.first_needed(len(hashes) * self.layout.block_size)
        return [self.named(hashes, i) for i in range(first, len(hashes))]


class KVGroups(msgspec.Struct, frozen=True):
    """All blocks of one rank; the same numbers on each rank of its group. The first group is the full one, if any."""

    groups: tuple[BlockGroup, ...]

    @property
    def main(self) -> BlockGroup:
        """The one that the router knows of."""
        return self.groups[0]

    @property
    def block_size(self) -> int:
        return self.main.layout.block_size

    @property
    def num_blocks(self) -> int:
        """Of the main group."""
        return self.main.num_blocks

    @property
    def tp_size(self) -> int:
        return self.main.layout.tp_size

    @property
    def num_bytes(self) -> int:
        """Of one rank."""
        return sum(group.num_blocks * group.layout.block_bytes for group in self.groups)

    def held_bytes(self, num_tokens: int) -> int:
        """Of one rank, for one sequence of so many tokens, in all block groups."""
        return sum(group.held_bytes(num_tokens) for group in self.groups)

    def max_context(self, wanted: int) -> int:
        """At most `wanted`, and no more than one sequence can hold."""
        return min([wanted, *(limit for group in self.groups if (limit := group.max_tokens) is not None)])

    def index_of(self, block_id: BlockId) -> int:
        """Of the group that has a block."""
        return next(i for i, g in enumerate(self.groups) if block_id < g.first_block + g.num_blocks)

    @property
    def content_fields(self) -> dict[str, str]:
        """What two groups of workers must share to exchange blocks."""
        if len(self.groups) == 1 and self.main.window is None:
            return self.main.layout.content_fields
        fields: dict[str, str] = {}
        for i, group in enumerate(self.groups):
            fields |= {f"{name}.{i}": value for name, value in group.layout.content_fields.items()}
            fields |= {f"window.{i}": str(group.window), f"layers.{i}": ",".join(map(str, group.layers))}
        return fields

    @property
    def fingerprint(self) -> bytes:
        """16 bytes; equal for groups of workers whose blocks are interchangeable up to the tensor-parallel size."""
        return hash_root(self.content_fields)


def one_group(layout: KVLayout, num_blocks: int, window: int | None = None) -> KVGroups:
    """All layers alike."""
    return KVGroups(
        (BlockGroup(layout=layout, layers=tuple(range(layout.num_layers)), num_blocks=num_blocks, window=window),)
    )


def two_groups(
    full: KVLayout, window: KVLayout, size: int, is_local: Sequence[bool], num_blocks: tuple[int, int]
) -> KVGroups:
    """Layers that see all, and those (`is_local`) that see a window of `size` tokens."""
    if any(count < 1 for count in num_blocks):
        raise InvalidArgument("num_blocks", num_blocks, "each block group needs at least one block")
    local = tuple(i for i, is_ in enumerate(is_local) if is_)
    whole = tuple(i for i, is_ in enumerate(is_local) if not is_)
    return KVGroups(
        (
            BlockGroup(layout=full, layers=whole, num_blocks=num_blocks[0]),
            BlockGroup(
                layout=window,
                layers=local,
                num_blocks=num_blocks[1],
                first_block=BlockId(num_blocks[0]),
                window=size,
                beside_full=True,
            ),
        )
    )
