"""What the tests of both ledgers share: peers, chains of hashes, requests. `Twin` of a transfer is each test's own."""

from __future__ import annotations

from hypothesis import strategies as st

from kvferry.runtime.ids import BlockHash, Epoch, GroupId, Peer, TransferId
from kvferry.runtime.kv.groups import Named
from kvferry.runtime.transfer.ticket import (
    ExpectRequest,
    GroupAddress,
)

Key = tuple[TransferId, int]
NS = 10**9
SOURCES = [Peer(GroupId("p0"), Epoch(1)), Peer(GroupId("p1"), Epoch(2))]
OWN = GroupAddress(Peer(GroupId("d0"), Epoch(3)), 1, b"f", [])
ROUTES = {(0, 0), (1, 0)}
CHAINS = [[BlockHash(bytes([10 * c + i]) * 16) for i in range(5)] for c in range(8)]
for chain in range(1, 8, 2):
    CHAINS[chain][:2] = CHAINS[chain - 1][:2]  # a shared prefix
IDS = st.sampled_from([TransferId(x) for x in "abc"])
NEWER = st.sampled_from([1, 1, 1, 1, 0, -1])
"""Added to the latest attempt."""
RARELY = st.integers(0, 4).map(lambda draw: draw == 4)
PICK = st.integers(0, 1 << 16)


def named(chain: list[BlockHash]) -> list[list[Named]]:
    """All of it, in one block group."""
    return [[Named(i, block_hash, chain[i - 1] if i else None) for i, block_hash in enumerate(chain)]]


def expect_request(
    transfer_id: TransferId, attempt: int, chain: int, source: Peer, timeout_s: float = 10, fingerprint: bytes = b"f"
) -> ExpectRequest:
    return ExpectRequest(
        transfer_id=transfer_id,
        attempt=attempt,
        source=GroupAddress(source, 2, fingerprint, []),
        token_ids=[block_hash[0] for block_hash in CHAINS[chain]],
        cache_salt="",
        timeout_s=timeout_s,
    )
