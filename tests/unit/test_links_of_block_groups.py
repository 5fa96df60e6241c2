"""Links between groups of workers whose models have two block groups: each block goes to its own storage.

Guards against: ids of the second block group taken for the first one's; a message of both, or of the wrong size.
"""

from __future__ import annotations

import queue
import time

import msgspec
import pytest
import torch

from kvferry.runtime.config import TransferConfig
from kvferry.runtime.ids import BlockHash, BlockId, Epoch, GroupId, Peer, TransferId
from kvferry.runtime.kv.groups import KVGroups, two_groups
from kvferry.runtime.kv.layout import KVLayout
from kvferry.runtime.step import Import, OpenLink, Send, StepPlan
from kvferry.runtime.transfer.factory import make_transport
from kvferry.runtime.transfer.group_span import GroupSpan
from kvferry.runtime.transfer.header import Expected, MessageHeader, parse, seal
from kvferry.runtime.transfer.links import Links
from kvferry.runtime.transfer.secret import NO_SECRET
from kvferry.runtime.transfer.ticket import GroupAddress, LinkReport, Received
from kvferry.runtime.transfer.transport import LinkName

PREFILL, DECODE = Peer(GroupId("prefill-0"), Epoch(1)), Peer(GroupId("decode-0"), Epoch(2))
T = TransferId("t")
FULL = KVLayout(num_layers=1, num_kv_heads=2, head_dim=4, block_size=4, dtype="bfloat16")
WINDOW = msgspec.structs.replace(FULL, num_layers=3)


def kv(tp_size: int, num_blocks: tuple[int, int]) -> KVGroups:
    full, window = (msgspec.structs.replace(layout, tp_size=tp_size) for layout in (FULL, WINDOW))
    return two_groups(full, window, 8, (True, False, True, True), num_blocks)


class Side:
    def __init__(self, peer: Peer, tp_size: int, num_blocks: tuple[int, int]) -> None:
        self.peer, self.kv = peer, kv(tp_size, num_blocks)
        self.reports: queue.Queue[LinkReport] = queue.Queue()
        config = TransferConfig(transport="local", timeout_s=10)
        self.blocks = [
            [torch.randn(g.num_blocks, *g.layout.block_shape).to(torch.bfloat16) for g in self.kv.groups]
            for _ in range(tp_size)
        ]
        self.links = [
            Links(make_transport("local", "127.0.0.1"), self.kv, rank, peer, blocks, config, self.reports.put)
            for rank, blocks in enumerate(self.blocks)
        ]

    @property
    def address(self) -> GroupAddress:
        ranks = [links.address() for links in self.links]
        return GroupAddress(self.peer, len(ranks), self.kv.fingerprint, ranks)

    def step(self, **commands: list[object]) -> None:
        for links in self.links:
            plan = StepPlan(1, **commands)  # type: ignore[arg-type]
            links.begin(plan)

    def block(self, group: int, place: int) -> torch.Tensor:
        return torch.cat([blocks[group][place] for blocks in self.blocks], dim=2)


@pytest.mark.parametrize("sizes", [(1, 1), (1, 2), (2, 1)])
def test_blocks_of_both_groups_arrive_in_their_storage(sizes: tuple[int, int]) -> None:
    source, destination = Side(PREFILL, sizes[0], (6, 9)), Side(DECODE, sizes[1], (10, 4))
    try:
        destination.step(opens=[OpenLink(source.address, inbound=True)])
        source.step(opens=[OpenLink(destination.address, inbound=False)])
        sends = [
            Send(T, 1, 0, DECODE, [BlockHash(b"a" * 16)], [BlockId(5)], [BlockId(9)]),
            Send(T, 1, 1, DECODE, [BlockHash(b"b" * 16), BlockHash(b"c" * 16)], [6, 14], [13, 10]),  # type: ignore[list-item]
        ]
        source.step(sends=list(sends))
        arrived: list[LinkReport] = []
        until = time.monotonic() + 10
        while len(arrived) < 2 * max(sizes):
            report = destination.reports.get(timeout=max(0.01, until - time.monotonic()))
            assert isinstance(report, Received), report
            arrived.append(report)
        destination.step(imports=[Import(T, 1, s.seq, PREFILL, s.destination_block_ids) for s in sends])
        assert torch.equal(destination.block(0, 9), source.block(0, 5))
        assert torch.equal(destination.block(1, 3), source.block(1, 0))
        assert torch.equal(destination.block(1, 0), source.block(1, 8))
    finally:
        assert [links.close() for side in (source, destination) for links in side.links] == [[]] * sum(sizes)


@pytest.mark.parametrize(
    ("block_ids", "num_bytes", "says"),
    [
        ([1, 9], 2 * 128, None),
        ([11], 3 * 128, None),
        ([9, 10], 2 * 128, "of one block group"),
        ([10, 14], 6 * 128, "below 14"),
        ([11], 128, "payload size is 128, expected 384"),
    ],
)
def test_a_message_is_of_one_group(block_ids: list[int], num_bytes: int, says: str | None) -> None:
    groups = kv(1, (10, 4))
    blocks = [torch.zeros(g.num_blocks, *g.layout.block_shape, dtype=torch.bfloat16) for g in groups.groups]
    name = LinkName(PREFILL, 0, DECODE, 0)
    expected = Expected(str(name), groups.fingerprint, GroupSpan(groups, blocks, (0, 2)).ranges, NO_SECRET)
    header = MessageHeader(
        link=str(name),
        link_seq=0,
        fingerprint=groups.fingerprint,
        transfer_id=T,
        attempt=1,
        seq=0,
        hashes=[BlockHash(bytes([b]) * 16) for b in block_ids],
        block_ids=[BlockId(b) for b in block_ids],
        num_bytes=num_bytes,
        crc=None,
    )
    result = parse(seal(header, NO_SECRET), num_bytes, 0, expected)
    assert (says in result) if isinstance(result, str) and says else result == header
