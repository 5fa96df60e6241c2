"""Duplicated, late and unknown messages to every handler; leases of unequal length.

Guards against: a handler that raises, or believes, what its sender should not have said; what is left behind after it.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.cluster import messages as m
from kvferry.cluster.engine_driver import EngineDriver, GatewayClosed
from kvferry.cluster.prefix_index import PrefixIndex
from kvferry.runtime.errors import KvferryError
from kvferry.runtime.ids import BlockHash, Epoch, GroupId, Peer, RequestId, SequenceKey, TransferId
from kvferry.runtime.request import FinishReason, TokenEvent
from kvferry.runtime.transfer.ticket import (
    ExpectRequest,
    LinkDown,
    Received,
    Sent,
    Ticket,
    TransferEvent,
    TransferState,
)
from tests.support import cluster_groups as groups
from tests.support import cluster_world as world
from tests.support.toy_engine import ToyEngine, toy_address, toy_request

pytestmark = pytest.mark.core
NAMES = st.sampled_from(["a", "b", "c"])
SMALL = st.integers(0, 3)
NS = 1_000_000_000


# ---------------------------------------------------------------- a group's leader
class Leader:
    """A real engine behind its driver."""

    def __init__(self) -> None:
        self.toy = ToyEngine(num_blocks=24, max_batch_tokens=7, name="here")
        self.tickets: list[Ticket] = []
        self.now_ns = NS
        self.driver = EngineDriver(self.toy.engine, self._reply, lambda _: None, lambda: self.now_ns)

    def _reply(self, _gateway: str, reply: Any) -> None:
        if isinstance(reply, m.Reply) and reply.ticket is not None:
            self.tickets.append(reply.ticket)

    def message(self, kind: str, name: str, number: int) -> Any:
        transfer_id, key = TransferId(f"{name}/t"), SequenceKey(RequestId(name), number % 2, number)
        prompt = [ord(name)] * (5 + 4 * number)
        source = toy_address("there", number % 2 + 1)
        match kind:
            case "submit":
                return m.Submit([toy_request(name, prompt, 5, index=number % 2, attempt=number)])
            case "waits":
                return m.Submit([toy_request(name, prompt, 5, attempt=number, transfer_id=transfer_id)])
            case "sends":
                leg = toy_request(name, prompt, 5, attempt=number, handoff_after=1, sends_transfer_id=transfer_id)
                return m.Submit([leg])
            case "cancel":
                return m.Cancel([key, key])
            case "expect":
                return m.Expect(
                    number,
                    ExpectRequest(
                        transfer_id=transfer_id,
                        attempt=number,
                        source=source,
                        token_ids=prompt,
                        cache_salt="",
                        timeout_s=1.0 + number,
                    ),
                )
            case "ticket":
                ticket = self.tickets[number % len(self.tickets)] if self.tickets else None
                return m.Renew([transfer_id], 1.0) if ticket is None else self._for_elsewhere(ticket, number)
            case "end":
                return m.EndTransfer(transfer_id, number, "said so")
            case "shorten":
                ticket = self.tickets[number % len(self.tickets)] if self.tickets else None
                hashes = [] if ticket is None else [block.hash for block in ticket.missing[number % 3 :]]
                return m.ShortenTransfer(transfer_id, number, [*hashes, BlockHash(b"x" * 16)])
            case "renew":
                return m.Renew([transfer_id, TransferId("unknown")], float(number))
            case "gone":
                return m.PeerGone(source.peer.group, source.peer.epoch)
            case "received":
                return self._received(transfer_id, number)
            case "sent":
                return Sent(transfer_id, number, number, number % 2, "cut" if number == 3 else None)
            case "down":
                return LinkDown(source.peer, 0, "cut")
            case "query":
                return m.Query(number, name)
        return GatewayClosed()

    def _for_elsewhere(self, ticket: Ticket, number: int) -> m.SendTicket:
        return m.SendTicket(msgspec.structs.replace(ticket, destination=toy_address("there", number % 2 + 1)))

    def _received(self, transfer_id: TransferId, number: int) -> Received:
        """Of a ticket, if there is one: then its payload is staged, as a link does it."""
        source = toy_address("there", number % 2 + 1).peer
        for ticket in self.tickets:
            if ticket.missing and (number + len(ticket.missing)) % 2:
                block = ticket.missing[number % len(ticket.missing)]
                name = (ticket.transfer_id, ticket.attempt, number)
                self.toy.runner.staged.setdefault(name, [[ord(ticket.transfer_id[0])] * 4])
                source = toy_address("there", ticket.attempt % 2 + 1).peer
                return Received(*name, source, 0, 0, [block.hash], [block.block_id], 4)
        return Received(transfer_id, number, number, source, 0, 0, [BlockHash(b"x" * 16)], [], 4)

    def step(self) -> None:
        self.now_ns += 1_000_000
        self.driver.step(self.now_ns)
        self.toy.runner.sends.clear()
        assert self.toy.engine.audit().broken == []


KINDS = [
    *(
        "submit",
        "waits",
        "sends",
        "cancel",
        "expect",
        "ticket",
        "end",
        "shorten",
        "renew",
        "gone",
        "received",
        "sent",
        "down",
    ),
    *("query", "close", "step", "step", "step"),
]


@given(st.lists(st.tuples(st.sampled_from(KINDS), NAMES, SMALL, st.integers(1, 2)), max_size=40))
@settings(max_examples=250, deadline=None)
def test_a_leader_bears_whatever_it_is_told(story: list[tuple[str, str, int, int]]) -> None:
    """Whatever comes, twice and in any order: invariants hold; one lease after the gateways left nothing is held."""
    leader = Leader()
    for kind, name, number, times in story:
        if kind == "step":
            leader.step()
            continue
        message = leader.message(kind, name, number)
        for _ in range(times):
            leader.driver.handle(f"gateway {name}", message)
        assert leader.toy.engine.audit().broken == []
    for gateway in "abc":
        leader.driver.handle(f"gateway {gateway}", GatewayClosed())
    for send in leader.toy.engine.outbound.ids():  # what flies is reported, sooner or later
        for attempt in range(4):
            for seq in range(10):
                leader.driver.handle("", Sent(send, attempt, seq, 0, "cut"))
    leader.now_ns += 10 * NS
    for _ in range(30):
        leader.step()
    for send in leader.toy.engine.outbound.ids():
        for attempt in range(4):
            for seq in range(10):
                leader.driver.handle("", Sent(send, attempt, seq, 0, "cut"))
    leader.step()
    held = leader.toy.engine.audit()
    assert (held.sequences, held.inbound, held.outbound, held.num_leased_blocks) == ([], [], [], 0)


# ---------------------------------------------------------------- the reaper
@given(
    leases=st.lists(st.tuples(st.floats(0.01, 5.0), st.integers(1, 3)), min_size=1, max_size=6),
    renewals=st.lists(st.tuples(st.integers(0, 5), st.floats(0.0, 3.0), st.floats(0.0, 3.0)), max_size=10),
)
@settings(max_examples=200, deadline=None)
def test_each_lease_lapses_at_its_own_time(
    leases: list[tuple[float, int]], renewals: list[tuple[int, float, float]]
) -> None:
    """Fault: a reaper that looks at the oldest lease only, or frees one because another lapsed."""
    leader, ends = Leader(), {}
    engine = leader.toy.engine
    for i, (timeout_s, size) in enumerate(leases):
        request = ExpectRequest(
            transfer_id=TransferId(f"t{i}"),
            attempt=1,
            source=toy_address("there"),
            token_ids=[i] * 4 * size,
            cache_salt="",
            timeout_s=timeout_s,
        )
        engine.expect(request, NS)
        ends[f"t{i}"] = NS + int(timeout_s * NS)
    now_ns = NS
    for which, wait_s, timeout_s in [*renewals, *((0, 0.7, -1.0) for _ in range(12))]:
        now_ns += int(wait_s * NS)
        engine.step(now_ns)
        ends = {name: end for name, end in ends.items() if end > now_ns}
        assert set(engine.inbound.ids()) == set(ends)
        assert engine.next_deadline_ns() == min(ends.values(), default=None)
        if timeout_s >= 0:
            engine.renew([TransferId(f"t{which}")], timeout_s, now_ns)
            if f"t{which}" in ends:
                ends[f"t{which}"] = max(ends[f"t{which}"], now_ns + int(timeout_s * NS))
    assert engine.pool.num_leased == 0


# ---------------------------------------------------------------- a gateway
EVENTS = st.builds(
    lambda name, index, attempt, position, token, reason, error: TokenEvent(
        key=SequenceKey(RequestId(name), index, attempt),
        position=position,
        token_id=token,
        finish_reason=reason,
        error_label=error,
    ),
    name=st.sampled_from(["r", "unknown"]),
    index=st.integers(0, 3),
    attempt=st.integers(0, 4),
    position=st.integers(0, 7),
    token=st.sampled_from([None, 5, 6]),
    reason=st.sampled_from([None, None, None, FinishReason.LENGTH, FinishReason.HANDOFF, FinishReason.CANCELLED]),
    error=st.sampled_from([None, None, None, "no_free_blocks", "group_died", "nonsense"]),
)
REPORTS = st.builds(
    lambda number, attempt, state: TransferEvent(transfer_id=TransferId(f"r/{number}.0"), attempt=attempt, state=state),
    number=SMALL,
    attempt=SMALL,
    state=st.sampled_from(TransferState),
)
HASHES = st.lists(st.integers(0, 5).map(lambda i: BlockHash(bytes([i]) * 16)), max_size=3, unique=True)
KV = st.none() | st.builds(
    m.KvEvents, stored=HASHES, removed=HASHES, count=SMALL, digest=st.sampled_from([b"\0" * 16, b"\1" * 16])
)
FRAMES = st.tuples(
    st.sampled_from(["p", "d", "stranger"]),
    st.integers(1, 2),
    st.integers(1, 2),
    st.integers(0, 5),
    st.lists(EVENTS, max_size=2),
    st.lists(REPORTS, max_size=2),
    KV,
)


@given(st.lists(FRAMES, max_size=25))
@settings(max_examples=150, deadline=None)
def test_a_gateway_bears_whatever_it_is_told(frames: list[tuple[Any, ...]]) -> None:
    """Registry, index and coordinator: any frame from anybody. Positions come once, in order; nothing is left."""

    async def life() -> None:
        async with world.World() as cluster:
            for group, role in (("p", "prefill"), ("d", "decode")):
                cluster.up(groups.ManualPort(group, 1, role))
            stream = cluster.coordinator.start(groups.request(n=2, max_tokens=6))
            await world.turns()
            for group, epoch, frame_epoch, seq, events, reports, kv in frames:
                peer = Peer(GroupId(group), Epoch(epoch))
                frame = m.StepFrame(Epoch(frame_epoch), seq, events, reports, kv, m.Load())
                cluster.arrive(peer, m.decode_from_group(m.encode(frame)))  # type: ignore[arg-type]
                await asyncio.sleep(0.01)
                cluster.coordinator.check_invariants()
            seen = [0, 0]
            for event in stream.arrived():
                if event.token_id is not None:
                    assert event.position == seen[event.key.index]
                    seen[event.key.index] += 1
            await stream.aclose()
            await world.turns()
            cluster.coordinator.check_invariants()
            assert (cluster.coordinator.in_flight, cluster.router.num_bookings) == (0, 0)

    world.run(life())


@given(
    st.lists(
        st.tuples(st.sampled_from(["apply", "snapshot", "forget"]), NAMES, st.integers(0, 6), KV, HASHES), max_size=30
    )
)
@settings(max_examples=300, deadline=None)
def test_an_index_bears_whatever_it_is_told(story: list[tuple[Any, ...]]) -> None:
    """Frames and snapshots that repeat, overtake each other or belong to nobody."""
    index = PrefixIndex()
    for kind, group, seq, events, hashes in story:
        peer = Peer(GroupId(group), Epoch(1))
        try:
            if kind == "apply":
                index.apply(peer, seq, events)
            elif kind == "snapshot":
                index.snapshot(peer, seq, hashes)
            else:
                index.forget(peer)
        except KvferryError as error:
            raise AssertionError(f"refused {kind}: {error}") from error
        index.check_invariants()


@pytest.mark.parametrize("ahead_s", [-100, 0, 100])
def test_deadlines_hold_between_skewed_clocks(ahead_s: int) -> None:
    """Fault (found by seed 6): a worker whose clock is ahead ends requests long before their deadline."""
    leader = Leader()
    sent_ns = leader.now_ns - ahead_s * NS
    request = toy_request("r", [1, 2, 3], 1000, arrival_ns=sent_ns, deadline_ns=sent_ns + NS, sent_ns=sent_ns)
    leader.driver.handle("gateway", m.Submit([request]))
    leader.step()
    assert leader.toy.engine.next_deadline_ns() == NS + NS
    leader.now_ns += NS
    leader.step()
    leader.step()
    assert leader.driver.owners() == []


def test_a_submission_that_comes_late_has_no_owner() -> None:
    """Fault: the older attempt that arrives after the newer one is remembered for ever."""
    leader = Leader()
    newer = toy_request("r", [1, 2, 3], 3, attempt=2)
    for request in (newer, msgspec.structs.replace(newer, key=msgspec.structs.replace(newer.key, attempt=1)), newer):
        leader.driver.handle("gateway", m.Submit([request]))
    assert len(leader.driver.owners()) == 1
    while leader.toy.engine.has_work():
        leader.step()
    assert leader.driver.owners() == []
