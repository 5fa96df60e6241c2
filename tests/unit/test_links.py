"""Two groups' links, end to end over real transports: bytes, order of events, and what breaks them."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest
import torch

from kvferry.runtime.config import TransferConfig, TransportName
from kvferry.runtime.errors import InvariantBroken
from kvferry.runtime.ids import BlockHash, BlockId, Epoch, GroupId, Peer, TransferId
from kvferry.runtime.kv.groups import one_group
from kvferry.runtime.kv.layout import KVLayout
from kvferry.runtime.kv.shared import shared_empty
from kvferry.runtime.step import CloseLink, Discard, Import, OpenLink, Send, StepPlan
from kvferry.runtime.transfer import link as link_module
from kvferry.runtime.transfer.factory import make_transport
from kvferry.runtime.transfer.group_span import GroupSpan
from kvferry.runtime.transfer.links import Links
from kvferry.runtime.transfer.secret import NO_SECRET, TAG_BYTES, tag
from kvferry.runtime.transfer.staging import Staged, Staging
from kvferry.runtime.transfer.ticket import GroupAddress, LinkDown, LinkReport, Received, Sent
from kvferry.runtime.transfer.transport import LinkClosed, Payload

NUM_BLOCKS = 24
LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=4, block_size=4, dtype="bfloat16")
PREFILL, DECODE = Peer(GroupId("prefill-0"), Epoch(1)), Peer(GroupId("decode-0"), Epoch(2))
T = TransferId("t")


def tiny_span() -> GroupSpan:
    layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1, block_size=1, dtype="float32")
    return GroupSpan(one_group(layout, 1), [torch.zeros(1, 1, 2, 1, 1, 1)], (0, 1))


class Group:
    """The ranks of one group, and the leader's inbox."""

    def __init__(self, peer: Peer, tp_size: int, transport: TransportName, config: TransferConfig, seed: int) -> None:
        self.peer = peer
        self.layout = msgspec.structs.replace(LAYOUT, tp_size=tp_size)
        self.reports: queue.Queue[LinkReport] = queue.Queue()
        generator = torch.Generator().manual_seed(seed)
        shape = (NUM_BLOCKS, 2, 2, LAYOUT.num_kv_heads, LAYOUT.block_size, LAYOUT.head_dim)
        whole = torch.randn(shape, generator=generator).to(torch.bfloat16)
        parts = [whole[:, :, :, slice(*self.layout.heads(rank))] for rank in range(tp_size)]
        self.blocks = [shared_empty(part.shape, part.dtype).copy_(part) for part in parts]
        self.links = [
            Links(
                make_transport(transport, "127.0.0.1"),
                one_group(self.layout, NUM_BLOCKS),
                r,
                peer,
                [b],
                config,
                self.reports.put,
            )
            for r, b in enumerate(self.blocks)
        ]

    @property
    def address(self) -> GroupAddress:
        ranks = [links.address() for links in self.links]
        return GroupAddress(self.peer, len(ranks), self.layout.fingerprint, ranks)

    def step(self, plan: StepPlan) -> None:
        for links in self.links:
            links.begin(plan)

    def wait(self, kind: type[LinkReport], count: int = 1, timeout_s: float = 10) -> list[LinkReport]:
        found: list[LinkReport] = []
        others: list[LinkReport] = []
        until = time.monotonic() + timeout_s
        while len(found) < count:
            report = self.reports.get(timeout=max(0.01, until - time.monotonic()))
            (found if isinstance(report, kind) else others).append(report)
        for report in others:
            self.reports.put(report)
        return found

    def block(self, block_id: int) -> torch.Tensor:
        """By global head; replicas must agree."""
        heads: dict[int, torch.Tensor] = {}
        for rank, blocks in enumerate(self.blocks):
            for i, head in enumerate(range(*self.layout.heads(rank))):
                mine = blocks[block_id, :, :, i]
                assert torch.equal(heads.setdefault(head, mine), mine)
        return torch.stack([heads[h] for h in range(LAYOUT.num_kv_heads)], dim=2)


class Two:
    def __init__(self, source: Group, destination: Group) -> None:
        self.source, self.destination = source, destination

    def open(self) -> None:
        self.destination.step(StepPlan(0, opens=[OpenLink(self.source.address, inbound=True)]))
        self.source.step(StepPlan(0, opens=[OpenLink(self.destination.address, inbound=False)]))


def make_two(transport: TransportName, source_tp: int, destination_tp: int, **options: object) -> Two:
    config = TransferConfig(transport=transport, timeout_s=options.pop("timeout_s", 10.0), **options)  # type: ignore[arg-type]
    return Two(
        Group(PREFILL, source_tp, transport, config, seed=1), Group(DECODE, destination_tp, transport, config, seed=2)
    )


@pytest.fixture
def groups() -> Iterator[list[Group]]:
    """Guards against threads that outlive their links."""
    made: list[Group] = []
    yield made
    for group in made:
        for links in group.links:
            assert links.close() == []
    until = time.monotonic() + 3
    while any(t.name.startswith("kvferry") for t in threading.enumerate()) and time.monotonic() < until:
        threading.Event().wait(0.02)
    assert not [t.name for t in threading.enumerate() if t.name.startswith("kvferry")]


def message(seq: int, source_ids: list[int], destination_ids: list[int], transfer: TransferId = T) -> Send:
    hashes = [BlockHash(bytes([i]) * 16) for i in source_ids]
    return Send(
        transfer, 1, seq, DECODE, hashes, [BlockId(i) for i in source_ids], [BlockId(i) for i in destination_ids]
    )


def import_of(send: Send) -> Import:
    return Import(send.transfer_id, send.attempt, send.seq, PREFILL, send.destination_block_ids)


MESSAGES = [([3, 4, 5], [0, 1, 2]), ([9, 2], [7, 12]), ([20], [20]), ([6, 8, 10, 7], [11, 6, 5, 4])]


@pytest.mark.parametrize("sizes", [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (2, 4), (4, 4)])
@pytest.mark.parametrize(("transport", "checksum"), [("local", True), ("shm", False)])
def test_bytes_by_global_coordinates(
    groups: list[Group], transport: TransportName, sizes: tuple[int, int], checksum: bool
) -> None:
    """Guards against heads, blocks or ranks that change places between unequal groups, and strays in other blocks."""
    two = make_two(transport, *sizes, checksum=checksum)
    groups += [two.source, two.destination]
    before = [two.destination.block(i).clone() for i in range(NUM_BLOCKS)]
    two.open()
    sends = [message(seq, *ids) for seq, ids in enumerate(MESSAGES)]
    two.source.step(StepPlan(1, sends=sends))
    sent = two.source.wait(Sent, len(sends) * sizes[0])
    assert all(isinstance(report, Sent) and report.error is None for report in sent)
    num_routes = max(sizes[1], min(sizes[0], LAYOUT.num_kv_heads))
    received = two.destination.wait(Received, len(sends) * num_routes)
    per_message = {(r.source_rank, r.rank) for r in received if isinstance(r, Received) and r.seq == 0}
    assert len(per_message) == num_routes
    wanted = dict(enumerate(before))
    for send in reversed(sends):  # in any order
        two.destination.step(StepPlan(2, imports=[import_of(send)]))
        for source, target in zip(send.source_block_ids, send.destination_block_ids, strict=True):
            wanted[target] = two.source.block(source)
    for block_id, block in wanted.items():
        assert torch.equal(two.destination.block(block_id), block), block_id
    assert all(links.staged_bytes == 0 for links in two.destination.links)
    one = two.source.block(3), two.source.block(4)
    assert not torch.equal(*one), "equal blocks would hide a swap"


@pytest.mark.parametrize("closed_by", ["nobody", "source", "destination"])
def test_blocks_may_change_once_they_are_reported(groups: list[Group], closed_by: str) -> None:
    """Guards against an import of what has taken the place of blocks whose link went down, or that waited for long."""
    two = make_two("shm", 1, 1)
    groups += [two.source, two.destination]
    two.open()
    sends = [message(0, [3, 4, 9], [0, 1, 2]), message(1, [7], [9])]
    two.source.step(StepPlan(1, sends=sends))
    two.destination.wait(Received, 2)
    assert two.source.reports.empty(), "nothing is copied yet"
    if closed_by == "source":
        two.source.step(StepPlan(2, closes=[CloseLink(DECODE)]))
    elif closed_by == "destination":
        two.destination.step(StepPlan(2, closes=[CloseLink(PREFILL)]))
    errors = [report.error for report in two.source.wait(Sent, 2) if isinstance(report, Sent)]
    assert [error is None for error in errors] == [closed_by == "nobody"] * 2
    wanted = [two.source.block(i).clone() for i in (3, 4, 9, 7)]
    two.source.blocks[0].zero_()
    two.destination.step(StepPlan(3, imports=[import_of(send) for send in sends]))
    for block_id, block in zip((0, 1, 2, 9), wanted, strict=True):
        assert torch.equal(two.destination.block(block_id), block)


def test_import_of_what_is_not_there(groups: list[Group]) -> None:
    """Guards against a step that goes on with garbage when leader and rank disagree."""
    two = make_two("local", 2, 1)
    groups += [two.source, two.destination]
    two.open()
    send = message(0, [1], [1])
    two.source.links[0].send(send)  # rank 1 has sent nothing yet
    two.destination.wait(Received)
    with pytest.raises(InvariantBroken, match="1 payloads are here"):
        two.destination.links[0].import_(import_of(send))
    with pytest.raises(InvariantBroken, match="0 payloads are here"):
        two.destination.links[0].import_(import_of(send))


def test_discard_at_every_stage(groups: list[Group]) -> None:
    """Guards against payloads of ended transfers that fill the staging memory, are reported, or block their link."""
    two = make_two("shm", 1, 1)
    groups += [two.source, two.destination]
    two.open()
    links = two.destination.links[0]
    two.source.step(StepPlan(1, sends=[message(0, [1], [1])]))
    two.destination.wait(Received)
    assert links.staged_bytes > 0
    two.destination.step(StepPlan(1, discards=[Discard(T, 1)]))
    assert links.staged_bytes == 0
    two.source.step(StepPlan(2, sends=[message(1, [2], [2]), message(0, [3], [3], TransferId("next"))]))
    assert [r.transfer_id for r in two.destination.wait(Received) if isinstance(r, Received)] == ["next"]
    assert links.stats.dropped_messages == 1
    two.source.step(StepPlan(3, discards=[Discard(T, 1)], sends=[message(2, [4], [4])]))
    errors = {(r.transfer_id, r.seq): r.error for r in two.source.wait(Sent, 4) if isinstance(r, Sent)}
    assert errors.pop((T, 2)) == "the transfer was ended"
    assert [*errors.values()] == [None] * 3
    two.source.step(StepPlan(4, sends=[message(0, [3], [3], TransferId("next"))]))
    two.source.step(StepPlan(4, sends=[message(1, [3], [3], TransferId("next"))]))
    assert [r.seq for r in two.destination.wait(Received) if isinstance(r, Received)] == [1], "a repeat is dropped"


def tampered(monkeypatch: pytest.MonkeyPatch, **changes: object) -> None:
    def seal(header: link_module.MessageHeader, secret: bytes) -> bytes:
        data: bytes = msgspec.msgpack.encode(msgspec.structs.replace(header, **changes))
        return tag(secret, data) + data

    monkeypatch.setattr(link_module, "seal", seal)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"link": "prefill-0@0.0>decode-0@2.0"}, "link name is prefill-0@0.0"),
        ({"link": "prefill-0@1.0>decode-0@1.0"}, "expected prefill-0@1.0>decode-0@2.0"),
        ({"fingerprint": b"x" * 16}, "layout fingerprint"),
        ({"link_seq": 1}, "link sequence number is 1, expected 0"),
        ({"block_ids": [1]}, "number of hashes"),
        ({"block_ids": [1, 1]}, "block ids must differ"),
        ({"block_ids": [1, NUM_BLOCKS]}, "below 24"),
        ({"num_bytes": 3}, "payload size"),
        ({"version": 2}, "version is 2"),
        ({"crc": 1}, "wrong checksum"),
        ({"hashes": "not bytes"}, "unreadable header"),
    ],
)
def test_header_that_does_not_match(
    groups: list[Group], monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], says: str
) -> None:
    """Guards against blocks of another incarnation, layout or message that land in the pool."""
    two = make_two("local", 1, 1)
    groups += [two.source, two.destination]
    with monkeypatch.context() as patch:
        tampered(patch, **changes)
        two.open()
        two.source.step(StepPlan(1, sends=[message(0, [1, 2], [1, 2])]))
        down = two.destination.wait(LinkDown)[0]
        assert isinstance(down, LinkDown)
        assert down.peer == PREFILL
        assert says in down.reason
        assert two.destination.links[0].stats.refused_messages == 1
        assert two.destination.links[0].staged_bytes == 0
        two.source.step(StepPlan(2, sends=[message(1, [1, 2], [1, 2])]))
        two.source.wait(LinkDown)
    two.open()  # makes it again
    two.source.step(StepPlan(3, sends=[message(2, [1, 2], [1, 2])]))
    assert isinstance(two.destination.wait(Received)[0], Received)


@pytest.mark.parametrize("forged", ["no tag", "another secret", "another header's tag"])
def test_header_of_a_stranger(groups: list[Group], monkeypatch: pytest.MonkeyPatch, forged: str) -> None:
    """Fault 40: whoever gets bytes onto a link decides what a cache holds."""
    real = link_module.seal

    def seal(header: link_module.MessageHeader, secret: bytes) -> bytes:
        if forged == "no tag":
            return real(header, secret)[TAG_BYTES:]
        if forged == "another secret":
            return real(header, b"guessed")
        data = real(header, NO_SECRET)[TAG_BYTES:]
        return tag(NO_SECRET, data + b"x") + data

    two = make_two("local", 1, 1)
    groups += [two.source, two.destination]
    monkeypatch.setattr(link_module, "seal", seal)
    two.open()
    two.source.step(StepPlan(1, sends=[message(0, [1, 2], [1, 2])]))
    down = two.destination.wait(LinkDown)[0]
    assert isinstance(down, LinkDown)
    assert "does not know the cluster's secret" in down.reason
    assert two.destination.links[0].staged_bytes == 0


def test_every_send_is_reported(groups: list[Group]) -> None:
    """Guards against pins that stay for ever: peer never opened, peer that is gone, peer that never answers."""
    two = make_two("shm", 1, 1, timeout_s=0.4)
    groups += [two.source, two.destination]
    two.source.step(StepPlan(1, sends=[message(0, [1], [1])]))
    never = two.source.wait(Sent)[0]
    assert isinstance(never, Sent)
    assert "no link" in str(never.error)
    two.source.step(StepPlan(2, opens=[OpenLink(two.destination.address, inbound=False)]))
    two.source.step(StepPlan(2, sends=[message(i, [1], [1]) for i in (1, 2, 3)]))
    unanswered = two.source.wait(Sent, 3, timeout_s=2)
    assert all(isinstance(r, Sent) and r.error and "no answer" in r.error for r in unanswered)
    assert isinstance(two.source.wait(LinkDown)[0], LinkDown)
    two.source.step(StepPlan(3, opens=[OpenLink(two.destination.address, inbound=False)]))
    two.source.step(StepPlan(3, sends=[message(4, [1], [1])]))
    two.source.step(StepPlan(4, closes=[CloseLink(DECODE)], sends=[message(5, [1], [1])]))
    gone = two.source.wait(Sent, 2, timeout_s=2)
    assert all(isinstance(r, Sent) and r.error for r in gone)
    assert two.source.reports.empty(), "a link closed on purpose is no news"


def test_other_layout_is_reported(groups: list[Group]) -> None:
    """Guards against a rank that dies because of a peer's mistake."""
    two = make_two("local", 1, 1)
    groups += [two.source, two.destination]
    strange = msgspec.structs.replace(two.source.address, fingerprint=b"?" * 16)
    odd = GroupAddress(PREFILL, 3, LAYOUT.fingerprint, [two.source.address.ranks[0]] * 3)
    two.destination.step(StepPlan(0, opens=[OpenLink(strange, inbound=True), OpenLink(odd, inbound=True)]))
    reasons = [r.reason for r in two.destination.wait(LinkDown, 2) if isinstance(r, LinkDown)]
    assert "another KV layout" in reasons[0]
    assert "tensor parallel size=3" in reasons[1]


def test_staging_is_bounded_but_never_stuck() -> None:
    """Guards against memory that grows with a slow engine, and against routes that starve each other of room."""
    staging = Staging(budget=100)
    span = tiny_span()
    staging.reserve("a", 60, 1)
    staging.reserve("a", 40, 1)
    with pytest.raises(LinkClosed, match="room"):
        staging.reserve("a", 1, 0.05)
    staging.reserve("b", 500, 0.05)  # the first of its link may always come
    for seq, link, size in ((0, "a", 60), (1, "a", 40), (0, "b", 500)):
        staged = Staged(link, Payload([torch.empty(size, dtype=torch.uint8)], lambda: None), [BlockId(0)], span, 1)
        assert staging.put((PREFILL, TransferId(link), 1, seq), 0, staged)
    waiting = threading.Thread(target=staging.reserve, args=("a", 60, 5))
    waiting.start()
    staging.discard(Discard(TransferId("b"), 1))
    assert waiting.is_alive()
    staging.discard(Discard(TransferId("a"), 1))
    waiting.join(2)
    assert not waiting.is_alive()
    assert staging.num_bytes == 60


def test_payload_that_arrives_while_its_transfer_is_discarded() -> None:
    """Guards against bytes that stay for ever because the discard came between header and payload."""
    staging = Staging()
    freed = []
    payload = Payload([torch.empty(60, dtype=torch.uint8)], lambda: freed.append(True))
    staged = Staged("a", payload, [BlockId(0)], tiny_span(), 1)
    staging.reserve("a", 60, 1)
    staging.discard(Discard(T, 1))
    assert not staging.put((PREFILL, T, 1, 0), 0, staged)
    assert staging.num_bytes == 0
    assert freed == [True]
