"""Leases of unequal length, and messages in any order to everything that takes some."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.runtime.errors import InvalidArgument, NoFreeBlocks, StaleAttempt
from kvferry.runtime.ids import BlockHash, BlockId, RequestId, SequenceKey, TransferId
from kvferry.runtime.transfer.ticket import ExpectRequest, LinkDown, Received, Sent, Ticket, TicketBlock, TransferState
from tests.support.toy_engine import ToyEngine, toy_address, toy_output, toy_request

pytestmark = pytest.mark.core
NS = 10**9
SIZE = 4
NAMES = ["a", "b", "c"]
PEERS = [toy_address("p0"), toy_address("p1", epoch=2)]


def prompt_of(name: str) -> list[int]:
    """Two blocks of its own and a tail."""
    return [ord(name)] * 9


def expect_request(name: str, attempt: int = 1, timeout_s: float = 10.0, source: int = 0) -> ExpectRequest:
    return ExpectRequest(
        transfer_id=TransferId(name),
        attempt=attempt,
        source=PEERS[source],
        token_ids=prompt_of(name),
        cache_salt="",
        timeout_s=timeout_s,
    )


def is_empty(side: ToyEngine) -> bool:
    audit = side.engine.audit()
    return not (audit.broken or audit.sequences or audit.inbound or audit.outbound or audit.num_leased_blocks)


@given(st.lists(st.integers(1, 100), min_size=2, max_size=8), st.lists(st.integers(1, 130), max_size=6))
@settings(max_examples=150, deadline=None)
def test_every_lapsed_lease_is_freed(timeouts: list[int], looks: list[int]) -> None:
    """Fault 2: the reaper stopped at the first lease that had not lapsed and stranded those behind it."""
    destination, source = ToyEngine(num_blocks=64), ToyEngine(num_blocks=64, name="source")
    start_ns = destination.clock()
    for i, timeout_s in enumerate(timeouts):
        ticket = destination.engine.expect(expect_request(chr(97 + i), timeout_s=timeout_s), start_ns)
        source.engine.send(ticket, start_ns)
    for look in sorted({*looks, 200}):
        now_ns = start_ns + look * NS
        alive = {chr(97 + i) for i, timeout_s in enumerate(timeouts) if timeout_s > look}
        for side in (destination, source):
            side.engine.step(now_ns)
            audit = side.engine.audit()
            assert set(audit.inbound) | set(audit.outbound) == alive
            deadline_ns = side.engine.next_deadline_ns()
            assert deadline_ns == min((start_ns + t * NS for t in timeouts if t > look), default=None)
        assert destination.engine.pool.num_leased == 2 * len(alive)
    assert is_empty(destination)
    assert is_empty(source)


def test_lease_lapses_while_its_sequence_waits() -> None:
    """Fault 5: the blocks of a lapsed lease were read all the same, and the client got fluent nonsense."""
    side = ToyEngine(num_blocks=16, max_sequences=1, max_batch_tokens=8)
    side.submit(toy_request("other", [1] * 8, 20))
    side.step()
    ticket = side.engine.expect(expect_request("a"), side.clock())
    (first, second) = ticket.missing
    report = Received(TransferId("a"), 1, 0, PEERS[0].peer, 0, 0, [first.hash], [first.block_id], 1)
    side.runner.staged[TransferId("a"), 1, 0] = [prompt_of("a")[:SIZE]]
    side.engine.report(report)
    side.step()
    side.submit(toy_request("r", prompt_of("a"), 6, transfer_id=TransferId("a")))
    lapsed_ns = side.engine.next_deadline_ns()
    assert lapsed_ns is not None
    events = side.engine.step(lapsed_ns).transfers
    assert [e.state for e in events] == [TransferState.EXPIRED]
    side.runner.poison([second.block_id])
    late = Received(TransferId("a"), 1, 1, PEERS[0].peer, 0, 0, [second.hash], [second.block_id], 1)
    side.engine.report(late)
    assert side.engine.inbound.counters.stale == 1
    side.run()
    assert side.tokens[toy_request("r", []).key] == toy_output(prompt_of("a"), 6)
    assert is_empty(side)


def test_source_that_gives_up_says_so_at_once() -> None:
    """Fault 12: a hundred requests were ended at the source, and the destination waited minutes for each."""
    source = ToyEngine(num_blocks=1024, max_sequences=4, max_batch_tokens=8, name="source")
    destination = ToyEngine(num_blocks=1024)
    names = [chr(200 + i) for i in range(100)]
    for name in names:
        source.submit(toy_request(name, prompt_of(name), 4, handoff_after=1, sends_transfer_id=TransferId(name)))
        source.engine.send(destination.engine.expect(expect_request(name), destination.clock()), source.clock())
    source.step()
    for name in names:
        source.engine.cancel(toy_request(name, []).key)
    failed = source.step().transfers
    assert sorted(e.transfer_id for e in failed) == sorted(names)
    for event in failed:
        destination.engine.end_transfer(event.transfer_id, event.attempt, event.reason)
    destination.step()
    assert is_empty(destination)


def test_the_departed_take_no_steps() -> None:
    """Fault 14: prompts of clients that had left were computed, and the next request waited behind ten of them."""
    side = ToyEngine(num_blocks=1024, max_batch_tokens=8)
    for name in "abcdefghij":
        side.submit(toy_request(name, [ord(name)] * 200, 4))
    side.step()
    for name in "abcdefghij":
        side.engine.cancel(toy_request(name, []).key)
    side.submit(toy_request("next", [5] * 6, 1))
    side.step()
    assert side.tokens[toy_request("next", []).key] == toy_output([5] * 6, 1)


def test_swapped_blocks_are_seen() -> None:
    """Fault 19: the check compared texts in which a swapped block changes nothing, so it could find nothing."""
    side = ToyEngine(num_blocks=16)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    request = ExpectRequest(
        transfer_id=TransferId("t"), attempt=1, source=PEERS[0], token_ids=prompt, cache_salt="", timeout_s=10
    )
    missing = side.engine.expect(request, side.clock()).missing
    side.runner.staged[TransferId("t"), 1, 0] = [prompt[SIZE : 2 * SIZE], prompt[:SIZE]]
    hashes, blocks = [b.hash for b in missing], [b.block_id for b in missing]
    side.engine.report(Received(TransferId("t"), 1, 0, PEERS[0].peer, 0, 0, hashes, blocks, 2))
    side.submit(toy_request("r", prompt, 4, transfer_id=TransferId("t")))
    side.run()
    assert side.engine.load().cached_tokens_total == 2 * SIZE
    assert side.tokens[toy_request("r", []).key] != toy_output(prompt, 4)


names, attempts, numbers = st.sampled_from(NAMES), st.integers(0, 2), st.integers(0, 3)
hashes = st.lists(st.integers(0, 3).map(lambda i: BlockHash(bytes([i]) * 16)), max_size=2)
block_ids = st.lists(st.integers(0, 20).map(BlockId), max_size=2)
ACTIONS = st.one_of(
    st.tuples(st.just("submit"), names, attempts, st.booleans(), st.booleans()),
    st.tuples(st.just("cancel"), names, attempts),
    st.tuples(st.just("expect"), names, attempts, st.integers(0, 1)),
    st.tuples(st.just("send"), names, attempts),
    st.tuples(st.just("end"), names, attempts),
    st.tuples(st.just("renew"), names),
    st.tuples(st.just("gone"), st.integers(0, 1)),
    st.tuples(st.just("received"), names, attempts, numbers, numbers, hashes, block_ids),
    st.tuples(st.just("sent"), names, attempts, numbers, numbers, st.booleans()),
    st.tuples(st.just("down"), st.integers(0, 1)),
    st.tuples(st.just("step")),
)


def act(side: ToyEngine, action: tuple[Any, ...]) -> None:
    """One message, which may be late, repeated, of an unknown transfer or of no sense at all."""
    engine = side.engine
    match action:
        case ("submit", name, attempt, takes, sends):
            extra = {"transfer_id": TransferId(name)} if takes else {}
            extra |= {"sends_transfer_id": TransferId(name), "handoff_after": 1} if sends and not takes else {}
            request = toy_request(name, prompt_of(name), 5, attempt=attempt, **extra)
            if engine.scheduler.get(request.key) is None:
                side.tokens.pop(request.key, None)  # of one that has ended: it is said again, from the beginning
            side.submit(request)
        case ("cancel", name, attempt):
            engine.cancel(SequenceKey(RequestId(name), 0, attempt))
        case ("expect", name, attempt, source):
            engine.expect(expect_request(name, attempt, source=source), side.clock())
        case ("send", name, attempt):
            chain = ToyEngine(num_blocks=8).engine.expect(expect_request(name), 0).missing
            missing = [TicketBlock(b.index, b.hash, b.block_id) for b in chain]
            ticket = Ticket(
                transfer_id=TransferId(name), attempt=attempt, destination=PEERS[1], missing=missing, timeout_s=5
            )
            engine.send(ticket, side.clock())
        case ("end", name, attempt):
            engine.end_transfer(TransferId(name), attempt, "test")
        case ("renew", name):
            engine.renew([TransferId(name), TransferId("unknown")], 10.0, side.clock())
        case ("gone", which):
            engine.peer_gone(PEERS[which].peer)
        case ("received", name, attempt, seq, rank, some, blocks):
            engine.report(Received(TransferId(name), attempt, seq, PEERS[0].peer, rank, 0, some, blocks, 1))
        case ("sent", name, attempt, seq, rank, fails):
            engine.report(Sent(TransferId(name), attempt, seq, rank, "cut" if fails else None))
        case ("down", which):
            engine.report(LinkDown(PEERS[which].peer, 0, "cut"))
        case _:
            side.step()


@given(st.lists(ACTIONS, max_size=40))
@settings(max_examples=200, deadline=None)
def test_any_message_at_any_time(actions: list[tuple[Any, ...]]) -> None:
    """Fault 7: a repeated, late, reordered or unknown message crashed a group or left something behind."""
    side = ToyEngine(num_blocks=20, max_batch_tokens=7)
    for action in actions:
        with contextlib.suppress(NoFreeBlocks, StaleAttempt, InvalidArgument):
            act(side, action)
        assert side.engine.audit().broken == []
    for name in NAMES:
        for attempt in range(3):
            side.engine.cancel(SequenceKey(RequestId(name), 0, attempt))
            side.engine.end_transfer(TransferId(name), attempt, "over")
    for send, _ in side.runner.sends:
        side.engine.report(Sent(send.transfer_id, send.attempt, send.seq, 0))
    side.step()
    for send, _ in side.runner.sends:
        side.engine.report(Sent(send.transfer_id, send.attempt, send.seq, 0))
    side.engine.step(side.clock() + 100 * NS)
    side.engine.step(side.clock() + 200 * NS)
    assert is_empty(side), side.engine.audit()
    for key, tokens in side.tokens.items():
        prompt = prompt_of(key.request_id)
        assert tokens == toy_output(prompt, len(tokens)), key
