"""The stream between a gateway and a leader over real sockets, with a toy engine behind it."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator, Callable

import pytest

from kvferry.cluster import hub as hub_module
from kvferry.cluster import messages as m
from kvferry.cluster import peer_stream as stream_module
from kvferry.cluster import wire as wire_module
from kvferry.cluster.peer_stream import RemoteGroup
from kvferry.cluster.wire import Wire, dial_tcp
from kvferry.runtime.errors import GroupUnavailable, NoFreeBlocks, Unauthenticated
from kvferry.runtime.ids import TransferId
from kvferry.runtime.kv.hashing import hash_chain
from kvferry.runtime.transfer.ticket import ExpectRequest
from tests.support import toy_shell as toy
from tests.support.toy_leader import SECRET, Leader

pytestmark = pytest.mark.integration


class Gateway:
    """Counts what comes, and waits for it."""

    def __init__(self) -> None:
        self.frames: list[m.StepFrame] = []
        self.down: list[str] = []
        self._news = asyncio.Event()

    async def connect(self, target: str, secret: str = SECRET) -> RemoteGroup:
        return await RemoteGroup.connect(target, secret, "gw", self._on_frame, self._on_down, timeout_s=5)

    def _on_frame(self, _port: RemoteGroup, frame: m.StepFrame) -> None:
        self.frames.append(frame)
        self._news.set()

    def _on_down(self, _port: RemoteGroup, reason: str) -> None:
        self.down.append(reason)
        self._news.set()

    async def wait(self, until: Callable[[], bool]) -> None:
        async with asyncio.timeout(5):
            while not until():
                self._news.clear()
                await self._news.wait()

    @property
    def tokens(self) -> list[int | None]:
        return [event.token_id for frame in self.frames for event in frame.tokens]


async def _dial(leader: Leader, first: bytes) -> Wire:
    """A stream that opens by hand."""
    wire = await dial_tcp(leader.target)
    wire.send(first)
    return wire


async def _end_of(wire: Wire) -> None:
    async with asyncio.timeout(5):
        while await wire.receive() is not None:
            pass


@pytest.fixture
async def leader() -> AsyncIterator[Leader]:
    leader = Leader()
    await leader.start()
    yield leader
    await leader.stop()


async def test_submitted_sequence_comes_back_token_by_token(leader: Leader) -> None:
    """Fault: frames lost, repeated or out of order."""
    gateway = Gateway()
    port = await gateway.connect(leader.target)
    assert port.info == toy.info()
    port.submit([toy.sequence("r", [1, 2, 3], max_tokens=20)])
    await gateway.wait(lambda: len(gateway.tokens) == 20)
    expected: list[int] = []
    for _ in range(20):
        expected.append(toy.next_token([1, 2, 3, *expected]))
    assert gateway.tokens == expected
    numbers = [frame.seq for frame in gateway.frames]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    await port.close()


async def test_two_gateways_see_all_kv_events_but_only_their_tokens(leader: Leader) -> None:
    one, two = Gateway(), Gateway()
    ports = [await one.connect(leader.target), await two.connect(leader.target)]
    prompt = list(range(12))
    ports[0].submit([toy.sequence("r", prompt, max_tokens=2)])
    await one.wait(lambda: len(one.tokens) == 2)
    await two.wait(lambda: any(frame.kv for frame in two.frames))
    assert two.tokens == []
    snapshot = await ports[1].snapshot(5)
    assert set(snapshot.hashes) == set(hash_chain(toy.ROOT, prompt, toy.BLOCK_SIZE))
    assert snapshot.seq >= next(frame.seq for frame in two.frames if frame.kv)
    for port in ports:
        await port.close()


async def test_a_gateway_that_vanishes_is_noticed_and_a_quiet_one_is_not(
    leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: a machine that vanishes closes no connection, and what it asked for runs on for nobody."""
    monkeypatch.setattr(hub_module, "GATEWAY_SILENT_S", 1.0)
    monkeypatch.setattr(stream_module, "ALIVE_S", 0.2)
    quiet, vanished = Gateway(), Gateway()
    port = await quiet.connect(leader.target)
    monkeypatch.setattr(stream_module, "ALIVE_S", 60.0)
    other = await vanished.connect(leader.target)
    other.submit([toy.sequence("r", [1, 2, 3], max_tokens=10**6)])
    await vanished.wait(lambda: bool(vanished.tokens))
    await vanished.wait(lambda: bool(vanished.down))
    async with asyncio.timeout(5):
        while leader.engine.running:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert leader.hub.num_connections == 1
    assert not quiet.down
    for each in (port, other):
        await each.close()


async def test_calls_return_tickets_or_the_group_s_own_error(leader: Leader) -> None:
    gateway = Gateway()
    port = await gateway.connect(leader.target)
    request = ExpectRequest(
        transfer_id=TransferId("t"), attempt=1, source=toy.address("s"), token_ids=[1] * 8, cache_salt="", timeout_s=9
    )
    ticket = await port.expect(request, 5)
    assert [block.index for block in ticket.missing] == [0, 1]
    with pytest.raises(NoFreeBlocks, match="64 in all"):
        await port.expect(
            ExpectRequest(
                transfer_id=TransferId("u"),
                attempt=1,
                source=toy.address("s"),
                token_ids=[1] * 4000,
                cache_salt="",
                timeout_s=9,
            ),
            5,
        )
    assert (await port.audit(5)).inbound == ["t"]
    port.end_transfer(TransferId("t"), 1, "over")
    assert (await port.audit(5)).inbound == []
    await port.close()


async def test_closed_stream_frees_what_its_gateway_held(leader: Leader) -> None:
    """Fault: a gateway dies and its sequences run on to nobody."""
    gateway, observer = Gateway(), Gateway()
    port, other = await gateway.connect(leader.target), await observer.connect(leader.target)
    port.submit([toy.sequence("r", [1], max_tokens=1 << 20)])
    await gateway.wait(lambda: len(gateway.tokens) > 3)
    await port.close()
    await observer.wait(lambda: any(call[0] == "cancel" for call in leader.engine.calls))
    assert (await other.audit(5)).sequences == []
    assert gateway.down == [], "on_down is for streams that were not closed on purpose"
    await other.close()


async def test_lost_leader_ends_pending_calls_and_is_reported_once(
    leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: a call that waits for its deadline although the group is known to be gone."""
    gateway = Gateway()
    port = await gateway.connect(leader.target)
    monkeypatch.setattr(leader.engine_loop._driver, "_reply", lambda *_: None)
    audit = asyncio.create_task(port.audit(60))
    await asyncio.sleep(0.05)
    await leader.server.stop()
    with pytest.raises(GroupUnavailable, match="gone"):
        await audit
    await gateway.wait(lambda: bool(gateway.down))
    with pytest.raises(GroupUnavailable):
        await port.audit(5)
    port.submit([toy.sequence("r", [1])])
    assert len(gateway.down) == 1
    await port.close()


async def test_silent_call_ends_at_its_deadline(leader: Leader, monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = Gateway()
    port = await gateway.connect(leader.target)
    monkeypatch.setattr(leader.engine_loop._driver, "_reply", lambda *_: None)
    with pytest.raises(GroupUnavailable, match="not answered"):
        await port.audit(0.05)
    assert not port._calls
    await port.close()


@pytest.mark.parametrize("secret", ["", "wrong", "s3cret ", "ß"])
async def test_wrong_secret_is_refused(leader: Leader, secret: str) -> None:
    """Fault: anybody who finds the port can submit and read."""
    with pytest.raises(Unauthenticated):
        await Gateway().connect(leader.target, secret)
    assert not leader.hub._connections


@pytest.mark.parametrize(
    "first", [b"", b"\xc1garbage", m.encode(m.Cancel(keys=[])), m.encode(m.Hello(99, SECRET, "g"))]
)
async def test_stream_that_opens_badly_is_refused(leader: Leader, first: bytes) -> None:
    """Fault: a stream that is served before it has named its version and secret."""
    wire = await _dial(leader, first)
    async with asyncio.timeout(5):
        answer = m.decode_from_group(await wire.receive() or b"")
    assert isinstance(answer, m.Refused)
    assert answer.error_label in ("unauthenticated", "incompatible_peer")
    await _end_of(wire)


async def test_stranger_cannot_make_the_leader_keep_megabytes(leader: Leader) -> None:
    """Fault: a length is believed before its sender has shown who it is."""
    reader, writer = await asyncio.open_connection("127.0.0.1", leader.server.port)
    writer.write(struct.pack("<I", wire_module.MAX_FIRST_BYTES + 1) + bytes(8))
    async with asyncio.timeout(5):
        with contextlib.suppress(ConnectionError):  # it may find our bytes unread
            await reader.read()
    writer.close()
    assert leader.hub.num_connections == 0


async def test_garbage_after_the_welcome_ends_only_its_own_stream(leader: Leader) -> None:
    gateway = Gateway()
    port = await gateway.connect(leader.target)
    wire = await _dial(leader, m.encode(m.Hello(m.PROTOCOL_VERSION, SECRET, "bad")))
    await wire.receive()
    wire.send(b"\xc1")
    await _end_of(wire)
    assert (await port.audit(5)).broken == []
    await port.close()


async def test_unreachable_group_is_an_error_in_time() -> None:
    with pytest.raises(GroupUnavailable, match="no welcome"):
        await RemoteGroup.connect("127.0.0.1:1", SECRET, "gw", lambda *_: None, lambda *_: None, timeout_s=0.3)


async def test_heartbeats_come_when_idle_and_stop_when_the_engine_hangs(
    leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: a stuck engine that looks alive for ever, or an idle one that looks dead."""
    gateway = Gateway()
    port = await gateway.connect(leader.target)
    await gateway.wait(lambda: len(gateway.frames) >= 2)
    assert all(not frame.tokens and frame.kv is None for frame in gateway.frames)
    monkeypatch.setattr(hub_module, "STALL_S", -1.0)
    await asyncio.sleep(0.1)
    num = len(gateway.frames)
    await asyncio.sleep(1.2)
    assert len(gateway.frames) == num
    assert port.silent_s() > 1.0
    await port.close()


async def test_gateway_that_does_not_read_is_cut_off(leader: Leader, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: one slow gateway fills the leader's memory or stops the engine."""
    monkeypatch.setattr(wire_module, "MAX_UNSENT_FRAMES", 4)
    reader, writer = await asyncio.open_connection("127.0.0.1", leader.server.port, limit=1)
    hello = m.encode(m.Hello(m.PROTOCOL_VERSION, SECRET, "slow"))
    writer.write(struct.pack("<I", len(hello)) + hello)
    await reader.readexactly(4)
    (connection,) = leader.hub._connections.values()
    for _ in range(20):
        connection.send(bytes(1 << 20))
    observer = Gateway()
    port = await observer.connect(leader.target)
    await observer.wait(lambda: len(leader.hub._connections) == 1)
    await port.close()
    writer.close()
