"""Frames over TCP: whole, in order, bounded, from any thread."""

from __future__ import annotations

import asyncio
import contextlib
import struct
import threading
from collections.abc import AsyncIterator

import pytest

from kvferry.cluster import wire as wire_module
from kvferry.cluster.wire import Wire, WireServer, dial_tcp


class Pair:
    """Both ends of a connection, and its server."""

    def __init__(self) -> None:
        self.accepted: asyncio.Future[Wire] = asyncio.get_running_loop().create_future()
        self._over = asyncio.Event()
        self.server = WireServer("127.0.0.1", self._serve)
        self.server.start()

    async def _serve(self, wire: Wire) -> None:
        wire.trust()
        self.accepted.set_result(wire)
        await self._over.wait()

    async def connect(self) -> tuple[Wire, Wire]:
        ours = await dial_tcp(f"127.0.0.1:{self.server.port}")
        async with asyncio.timeout(5):
            return ours, await self.accepted


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    pair = Pair()
    yield pair
    await pair.server.stop()


async def _frames(wire: Wire, num: int) -> list[bytes]:
    async with asyncio.timeout(10):
        return [await wire.receive() or b"" for _ in range(num)]


async def test_frames_of_all_sizes_arrive_whole_and_in_order_from_a_thread(pair: Pair) -> None:
    """Fault: a partial write, or one that overtakes what still waits, tears the stream of frames."""
    ours, theirs = await pair.connect()
    sizes = [0, 1, 3, 200, 65_535, 65_536, 3 << 20, 5, 1 << 20, 0, 70_000] * 4
    sent = [bytes([number % 251]) * size for number, size in enumerate(sizes)]
    thread = threading.Thread(target=lambda: [theirs.send(frame) for frame in sent])
    thread.start()
    assert await _frames(ours, len(sent)) == sent
    thread.join(5)
    ours.send(b"back")
    assert await _frames(theirs, 1) == [b"back"]
    ours.close()


async def test_a_reader_that_waits_stops_the_socket_and_loses_nothing(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: frames pile up without bound at one who does not take them, or reading never goes on."""
    monkeypatch.setattr(wire_module, "MAX_UNREAD_FRAMES", 4)
    ours, theirs = await pair.connect()
    for number in range(1000):
        theirs.send(struct.pack("<I", number) + bytes(30_000))
        if number % 50 == 0:
            await asyncio.sleep(0)
    await asyncio.sleep(0.05)
    assert len(ours._unread) <= 4 + 64  # type: ignore[attr-defined]  # a read brings at most 64 KiB
    assert [struct.unpack_from("<I", frame)[0] for frame in await _frames(ours, 1000)] == list(range(1000))
    ours.close()


async def test_who_does_not_read_is_cut_off(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: the sender's memory grows, or the engine's thread waits."""
    monkeypatch.setattr(wire_module, "MAX_UNSENT_FRAMES", 3)
    ours, theirs = await pair.connect()
    for _ in range(20):
        theirs.send(bytes(1 << 20))
    with pytest.raises(ConnectionError, match="3 frames behind"):
        await _frames(theirs, 1)
    assert not theirs._unsent  # type: ignore[attr-defined]
    theirs.send(b"to nobody")
    ours.close()


async def test_what_came_before_the_end_is_read_before_it(pair: Pair) -> None:
    """Fault: the last words, such as a refusal, are lost with the connection."""
    ours, theirs = await pair.connect()
    theirs.send(b"last words")
    theirs.close()
    async with asyncio.timeout(5):
        assert await ours.receive() == b"last words"
        assert await ours.receive() is None
    ours.close()


async def test_an_end_within_a_frame_is_no_orderly_end(pair: Pair) -> None:
    """Fault: half a frame passes for the end of a stream, or for a frame."""
    _, writer = await asyncio.open_connection("127.0.0.1", pair.server.port)
    async with asyncio.timeout(5):
        theirs = await pair.accepted
    writer.write(struct.pack("<I", 10) + b"half")
    writer.close()
    with pytest.raises(ConnectionError, match="within a frame"):
        await _frames(theirs, 1)


async def test_stopped_server_closes_what_is_open(pair: Pair) -> None:
    ours, _ = await pair.connect()
    await pair.server.stop()
    async with asyncio.timeout(5):
        assert await ours.receive() is None
    ours.close()
    with pytest.raises(OSError), contextlib.closing(await dial_tcp(f"127.0.0.1:{pair.server.port}")):
        pass
