"""Messages over gloo received straight into a group's blocks: which, what is left to import, who is in the way."""

from __future__ import annotations

import time

import pytest
import torch

from kvferry.runtime.ids import BlockId, TransferId
from kvferry.runtime.step import Discard, Grant, Revoke, StepPlan
from kvferry.runtime.transfer import gloo
from kvferry.runtime.transfer.landing import PATIENCE_S
from kvferry.runtime.transfer.ticket import LinkDown, Received, Sent
from tests.unit.test_links import MESSAGES, Group, T, Two, groups, import_of, make_two, message

__all__ = ["groups"]


def blocks(*block_ids: int) -> list[BlockId]:
    return [BlockId(i) for i in block_ids]


def linked(groups: list[Group], **options: object) -> Two:
    two = make_two("gloo", 1, 1, **options)
    groups += [two.source, two.destination]
    two.open()
    return two


@pytest.mark.parametrize("checksum", [True, False])
def test_granted_blocks_are_filled_when_their_message_is_here(groups: list[Group], checksum: bool) -> None:
    """Guards against blocks that change places, strays in others, and an import that lacks or overwrites something."""
    two = linked(groups, checksum=checksum)
    wanted = {i: two.destination.block(i).clone() for i in range(len(two.destination.blocks[0]))}
    sends = [message(seq, *ids) for seq, ids in enumerate(MESSAGES)]
    granted = [b for send in sends[:3] for b in send.destination_block_ids] + sends[3].destination_block_ids[:2]
    two.destination.step(StepPlan(1, grants=[Grant(T, 1, granted)]))
    two.source.step(StepPlan(1, sends=sends))
    two.destination.wait(Received, len(sends))
    for send in sends[:3]:
        for source, target in zip(send.source_block_ids, send.destination_block_ids, strict=True):
            wanted[target] = two.source.block(source)
    for block_id, block in wanted.items():
        assert torch.equal(two.destination.block(block_id), block), block_id
    links = two.destination.links[0]
    assert links.staged_bytes == links.stats.received_bytes * 4 // 10, "what was not granted whole waits for its import"
    two.destination.step(StepPlan(2, imports=[import_of(send) for send in sends]))
    for source, target in zip(sends[3].source_block_ids, sends[3].destination_block_ids, strict=True):
        wanted[target] = two.source.block(source)
    for block_id, block in wanted.items():
        assert torch.equal(two.destination.block(block_id), block), block_id
    assert links.staged_bytes == 0


@pytest.mark.parametrize("command", ["discard", "revoke", "import"])
def test_what_a_plan_has_taken_back_is_not_written(groups: list[Group], command: str) -> None:
    """Guards against a late message that writes blocks which are another sequence's by then."""
    two = linked(groups)
    ids = blocks(3, 4)
    two.destination.step(StepPlan(1, grants=[Grant(T, 1, ids)]))
    send = message(0, [1, 2], [3, 4])
    if command == "import":
        two.source.step(StepPlan(1, sends=[send]))
        two.destination.wait(Received)
        two.destination.step(StepPlan(2, imports=[import_of(send)]))
    elif command == "discard":
        two.destination.step(StepPlan(2, discards=[Discard(T, 1)]))
    else:
        two.destination.step(StepPlan(2, revokes=[Revoke(T, 1, ids[1:])]))
    two.destination.blocks[0].fill_(7)
    two.source.step(StepPlan(2, sends=[message(1, [5, 6], [3, 4])]))
    sent = two.source.wait(Sent, 1 + (command == "import"))
    assert all(isinstance(report, Sent) and report.error is None for report in sent)
    assert bool((two.destination.blocks[0] == 7).all())


def test_a_step_does_not_wait_for_a_peer_that_stops_in_mid_message(
    groups: list[Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against an engine that hangs with its peer, and a message that goes on writing after its transfer."""
    with monkeypatch.context() as patch:
        real = gloo._Pair.isend
        patch.setattr(gloo._Pair, "isend", lambda self, t, tag: None if tag == gloo.END else real(self, t, tag))
        two = linked(groups)
        two.destination.step(StepPlan(1, grants=[Grant(T, 1, blocks(3, 4))]))
        before = two.destination.block(3).clone()
        two.source.step(StepPlan(1, sends=[message(0, [1, 2], [3, 4])]))
        until = time.monotonic() + 5
        while torch.equal(two.destination.block(3), before) and time.monotonic() < until:
            time.sleep(0.01)
        begin = time.monotonic()
        two.destination.step(StepPlan(2, discards=[Discard(T, 1)]))
        assert PATIENCE_S / 2 < time.monotonic() - begin < PATIENCE_S + 1
    two.destination.blocks[0].fill_(7)
    assert isinstance(two.destination.wait(LinkDown)[0], LinkDown)
    failed = two.source.wait(Sent)[0]
    assert isinstance(failed, Sent)
    assert failed.error is not None
    two.source.wait(LinkDown)
    assert bool((two.destination.blocks[0] == 7).all())
    two.open()
    two.destination.step(StepPlan(3, grants=[Grant(TransferId("next"), 1, blocks(3, 4))]))
    two.source.step(StepPlan(3, sends=[message(0, [1, 2], [3, 4], TransferId("next"))]))
    two.destination.wait(Received)
    assert torch.equal(two.destination.block(3), two.source.block(1))
