"""The group's side of the prefix index: what became visible or vanished in its cache since the last frame."""

from __future__ import annotations

from kvferry.cluster.messages import KvEvents
from kvferry.runtime.errors import InvariantBroken
from kvferry.runtime.ids import BlockHash
from kvferry.runtime.kv.hashing import HASH_BYTES


def xor(digest: int, block_hash: BlockHash) -> int:
    """Adds a hash to a digest, or takes it out."""
    return digest ^ int.from_bytes(block_hash, "big")


def digest_bytes(digest: int) -> bytes:
    return digest.to_bytes(HASH_BYTES, "big")


class KvEventLog:
    """Coalesces one step's events: what appears and vanishes (or vanishes and reappears) within it leaves no trace.

    So a hash stands in at most one of the two lists, and their order does not matter. Memory: one step's changes.
    """

    def __init__(self) -> None:
        self._stored: dict[BlockHash, None] = {}
        self._removed: dict[BlockHash, None] = {}
        self._count = 0
        self._digest = 0

    def stored(self, block_hash: BlockHash) -> None:
        """A block became visible. Raises `InvariantBroken` if it already was."""
        if block_hash in self._stored:
            raise InvariantBroken(f"block {block_hash.hex()} was stored twice without being removed in between")
        if block_hash in self._removed:
            del self._removed[block_hash]
        else:
            self._stored[block_hash] = None
        self._count += 1
        self._digest = xor(self._digest, block_hash)

    def removed(self, block_hash: BlockHash) -> None:
        """A block was evicted. Raises `InvariantBroken` if it was not visible."""
        if block_hash in self._removed or self._count == 0:
            raise InvariantBroken(f"block {block_hash.hex()} was removed but is not visible")
        if block_hash in self._stored:
            del self._stored[block_hash]
        else:
            self._removed[block_hash] = None
        self._count -= 1
        self._digest = xor(self._digest, block_hash)

    def take(self) -> KvEvents | None:
        """The changes since the last call, for one frame; `None`: nothing changed."""
        if not self._stored and not self._removed:
            return None
        events = KvEvents(list(self._stored), list(self._removed), self._count, digest_bytes(self._digest))
        self._stored, self._removed = {}, {}
        return events
