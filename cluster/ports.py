"""The borders of the cluster's core: what the coordinator and the registry need from the world around them.

The gateway fills them with gRPC streams and the real clock; the simulator with a virtual network and a virtual clock.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Protocol

from kvferry.cluster.messages import Audit, GroupInfo, KvSnapshot
from kvferry.runtime.ids import BlockHash, Peer, SequenceKey, TransferId
from kvferry.runtime.request import SequenceRequest
from kvferry.runtime.transfer.ticket import ExpectRequest, Ticket


class Clock(Protocol):
    def now_ns(self) -> int:
        """Wall clock."""

    async def sleep(self, seconds: float) -> None: ...


class GroupPort(Protocol):
    """One live incarnation of a group. Messages never block; calls end with an error when the group goes."""

    info: GroupInfo

    @property
    def peer(self) -> Peer: ...

    def submit(self, sequences: list[SequenceRequest]) -> None: ...

    def cancel(self, keys: list[SequenceKey]) -> None: ...

    def expect(self, request: ExpectRequest, timeout_s: float) -> Awaitable[Ticket]:
        """The message leaves at once, before whatever is sent after this call.

        The answer raises `NoFreeBlocks`, `IncompatiblePeer`, `GroupUnavailable` (died, or silent for `timeout_s`).
        """

    def send_ticket(self, ticket: Ticket) -> None: ...

    def end_transfer(self, transfer_id: TransferId, attempt: int, reason: str) -> None: ...

    def shorten_transfer(self, transfer_id: TransferId, attempt: int, lacking: list[BlockHash]) -> None: ...

    def renew(self, transfer_ids: list[TransferId], timeout_s: float) -> None: ...

    def peer_gone(self, peer: Peer) -> None: ...

    async def audit(self, timeout_s: float) -> Audit: ...

    async def snapshot(self, timeout_s: float) -> KvSnapshot: ...
