"""Every transport must keep the same promises; else a cluster works over one and hangs over another."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from kvferry.runtime.errors import ResourceMissing
from kvferry.runtime.ids import Epoch, GroupId, Peer
from kvferry.runtime.transfer.factory import make_transport
from kvferry.runtime.transfer.gloo import END, GlooReceiveEnd
from kvferry.runtime.transfer.lent import LINK_BYTES
from kvferry.runtime.transfer.ticket import RankAddress
from kvferry.runtime.transfer.transport import LinkClosed, LinkName, ReceiveEnd, SendEnd, Transport

sys.path.insert(0, str(Path(__file__).parent))  # for the child processes as well
import transport_peer

TRANSPORTS = ["local", "shm", "gloo"]
PREFILL, DECODE = Peer(GroupId("prefill-0"), Epoch(3)), Peer(GroupId("decode-0"), Epoch(4))
NAME = LinkName(PREFILL, 0, DECODE, 0)
BACK = LinkName(DECODE, 0, PREFILL, 0)


def shared_memory() -> set[str]:
    """This process's mappings; the machine may well run other transports."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {line for line in maps if "kvferry" in line.partition("/")[2] and "memfd" in line}


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Transport, Transport]]:
    """Two ranks. Guards against threads, descriptors and shared memory that outlive a transport."""
    before = shared_memory()
    source, destination = make_transport(request.param, "127.0.0.1"), make_transport(request.param, "127.0.0.1")
    yield source, destination
    source.close()
    destination.close()
    until = time.monotonic() + 3
    while (left := [t.name for t in threading.enumerate() if t.name.startswith("kvferry")]) and (
        time.monotonic() < until
    ):
        threading.Event().wait(0.02)
    assert not left
    gc.collect()  # of tests before, what errors hold may have gone since
    assert shared_memory() <= before


every_transport = pytest.mark.parametrize("pair", TRANSPORTS, indirect=True)


def link(source: Transport, destination: Transport, name: LinkName = NAME) -> tuple[SendEnd, ReceiveEnd]:
    with ThreadPoolExecutor(2) as pool:
        sender = pool.submit(source.connect, name, destination.address(), 10)
        receiver = pool.submit(destination.accept, name, source.address(), 10)
        return sender.result(), receiver.result()


def payload(size: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed + size))


def take(end: ReceiveEnd, timeout_s: float = 10) -> tuple[bytes, torch.Tensor]:
    header = end.receive_header(timeout_s)
    assert header is not None
    got = end.receive_payload(timeout_s)
    assert got.num_bytes == header[1]
    data = torch.cat([torch.empty(0, dtype=torch.uint8), *got.pieces])
    got.free()
    return header[0], data


def send(end: SendEnd, header: bytes, data: torch.Tensor, timeout_s: float) -> None:
    end.send(header, [data] if data.numel() else [], timeout_s)
    end.wait_sent(timeout_s)


def seconds(call: Callable[[], Any]) -> float:
    """How long it takes until the link is closed."""
    begin = time.monotonic()
    with pytest.raises(LinkClosed):
        call()
    return time.monotonic() - begin


@every_transport
def test_order_sizes_and_bytes(pair: tuple[Transport, Transport]) -> None:
    """Guards against lost, reordered or torn messages, at sizes around every internal border."""
    sender, receiver = link(*pair)
    sizes = [0, 1, 7, 65_535, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 0, 5 << 20, 16 << 20, 3]
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(
            lambda: [send(sender, b"%d" % i + b"x" * (i * 1500), payload(n, i), 10) for i, n in enumerate(sizes)]
        )
        for i, size in enumerate(sizes):
            header, got = take(receiver)
            assert header == b"%d" % i + b"x" * (i * 1500)
            assert torch.equal(got, payload(size, i))
        sending.result()
    sender.close()
    receiver.close()


@every_transport
def test_many_messages_and_reuse_of_the_payload(pair: tuple[Transport, Transport]) -> None:
    """Guards against a send that returns while the payload is still being read."""
    sender, receiver = link(*pair)
    data = torch.empty(3000, dtype=torch.uint8)

    def send_all() -> None:
        for i in range(200):
            data.fill_(i % 251)
            send(sender, i.to_bytes(2, "little"), data, 10)

    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(send_all)
        for i in range(200):
            header, got = take(receiver)
            assert int.from_bytes(header, "little") == i
            assert bool((got == i % 251).all())
        sending.result()


@every_transport
def test_pieces_arrive_in_a_row(pair: tuple[Transport, Transport]) -> None:
    """Guards against pieces that change places, and a payload that is overwritten before it is given back."""
    sender, receiver = link(*pair)
    data = payload(5000)
    bounds = [0, 1, 700, 701, 4000, 5000]
    kept = []
    for _ in range(2):
        sender.send(b"h", [data[a:b] for a, b in pairwise(bounds)], 5)
    for _ in range(2):
        assert receiver.receive_header(5) == (b"h", 5000)
        kept.append(receiver.receive_payload(5))
        sender.wait_sent(5)
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(send, sender, b"other", payload(5000, 1), 5)
        take(receiver)
        sending.result()
    for got in kept:
        assert torch.equal(got.pieces[0], data)
        got.free()


@pytest.mark.parametrize("pair", ["gloo"], indirect=True)
@pytest.mark.parametrize("bounds", [[0, 5000], [0, 1000, 1200, 5000], [0, 600, 5000], [0, 100, 1000, 1100, 5000]])
def test_a_payload_is_written_where_it_is_wanted(pair: tuple[Transport, Transport], bounds: list[int]) -> None:
    """Guards against pieces in each other's place, and bytes beside them, however the two sides have cut them."""
    sender, receiver = link(*pair)
    assert receiver.in_place
    data = payload(5000)
    memory = torch.zeros(3, 9000, dtype=torch.uint8)
    places = [memory[2, 10:1010], memory[0, :200], memory[1, 50:3850]]
    for _ in range(2):
        memory.zero_()
        sender.send(b"h", [data[a:b] for a, b in pairwise(bounds)], 5)
        assert receiver.receive_header(5) == (b"h", 5000)
        got = receiver.receive_payload(5, places)
        sender.wait_sent(5)
        assert torch.equal(torch.cat(list(got.pieces)), data)
        got.free()
        assert torch.equal(torch.cat(places), data)
        assert int(memory.count_nonzero()) == int(data.count_nonzero())
    sender.send(b"h", [], 5)
    assert receiver.receive_header(5) == (b"h", 0)
    assert receiver.receive_payload(5).num_bytes == 0


@pytest.mark.parametrize("pair", ["gloo"], indirect=True)
@pytest.mark.parametrize("how", ["closed", "too late", "the sender closed"])
def test_nothing_is_written_once_a_receiver_has_failed(pair: tuple[Transport, Transport], how: str) -> None:
    """Guards against blocks that belong to somebody else by then, and still fill from a link that was cut."""
    sender, receiver = link(*pair)
    place = torch.zeros(256 << 20, dtype=torch.uint8)
    # Its end is never sent: the receiver cannot be done before it is closed.
    end = sender._pair  # type: ignore[attr-defined]
    real = end.isend
    end.isend = lambda tensor, tag: real(tensor, tag) if tag != END else None
    sender.send(b"h", [torch.ones_like(place)], 5)
    assert receiver.receive_header(5) is not None
    closing = threading.Timer(0.02, sender.close if how == "the sender closed" else receiver.close)
    if how != "too late":
        closing.start()
    seconds(lambda: receiver.receive_payload(0.02 if how == "too late" else 5, [place]))
    place.zero_()
    threading.Event().wait(0.2)
    assert not place.any()
    if how != "too late":
        closing.join()


@pytest.mark.parametrize("pair", ["shm"], indirect=True)
def test_shm_memory_of_a_link_is_bounded_and_used_again(pair: tuple[Transport, Transport]) -> None:
    """Guards against buffers that are made anew for each message, or pile up while nobody imports."""
    sender, receiver = link(*pair)
    size = 9 << 20
    for _ in range(20):  # sizes that do not fit into what is there
        for n in (size, 100, size // 2, size + 4096):
            sender.send(b"h", [payload(n)], 5)
            take(receiver)
    mapped = len(shared_memory())
    assert mapped <= 2 * (LINK_BYTES // (size // 2)) + 2
    held = []
    for _ in range(LINK_BYTES // size):
        sender.send(b"h", [payload(size)], 5)
        assert receiver.receive_header(5) is not None
        held.append(receiver.receive_payload(5))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(sender.send, b"h", [payload(size)], 5)
        threading.Event().wait(0.1)
        assert not waiting.done()
        held.pop().free()
        waiting.result()
    assert all(torch.equal(got.pieces[0], payload(size)) for got in held)


@every_transport
def test_both_directions_at_once(pair: tuple[Transport, Transport]) -> None:
    """Guards against a deadlock of two ranks that send to each other at the same time."""
    there, back = link(*pair), link(pair[1], pair[0], BACK)
    data = payload(6 << 20)
    with ThreadPoolExecutor(4) as pool:
        sends = [pool.submit(send, ends[0], b"h", data, 10) for ends in (there, back) for _ in range(1)]
        takes = [pool.submit(take, ends[1]) for ends in (there, back)]
        for sending in sends:
            sending.result()
        for taken in takes:
            assert torch.equal(taken.result()[1], data)


@every_transport
@pytest.mark.parametrize("first", ["sender", "receiver"])
def test_either_side_may_come_first(pair: tuple[Transport, Transport], first: str) -> None:
    """Guards against a handshake that works in one order only, and a header lost while nobody listens."""
    source, destination = pair
    with ThreadPoolExecutor(2) as pool:
        calls: list[Callable[[], Any]] = [
            lambda: source.connect(NAME, destination.address(), 5),
            lambda: destination.accept(NAME, source.address(), 5),
        ]
        early = pool.submit(calls[first == "receiver"])
        threading.Event().wait(0.2)
        late = pool.submit(calls[first == "sender"])
        ends = (early.result(), late.result())
        sender, receiver = ends if first == "sender" else (ends[1], ends[0])
        sending = pool.submit(send, sender, b"early", payload(100), 5)
        threading.Event().wait(0.2)
        assert take(receiver)[0] == b"early"
        sending.result()
    if not isinstance(receiver, GlooReceiveEnd):  # which waits on
        assert receiver.receive_header(0.05) is None
        assert receiver.receive_header(0.05) is None, "an idle link must survive its receiver's timeouts"


@every_transport
def test_nobody_there(pair: tuple[Transport, Transport]) -> None:
    """Guards against connects and accepts without a deadline."""
    source, destination = pair
    assert 0.1 < seconds(lambda: source.connect(NAME, destination.address(), 0.2)) < 2
    assert 0.1 < seconds(lambda: destination.accept(NAME, source.address(), 0.2)) < 2


@every_transport
def test_link_made_again(pair: tuple[Transport, Transport]) -> None:
    """Guards against a link that broke once and stays broken for the life of both groups."""
    for i in range(3):
        sender, receiver = link(*pair)
        with ThreadPoolExecutor(1) as pool:
            sending = pool.submit(send, sender, b"%d" % i, payload(10), 5)
            assert take(receiver)[0] == b"%d" % i
            sending.result()
        if i % 2:
            sender.close()
            assert seconds(partial(receiver.receive_header, 5)) < 1.5
        else:
            receiver.close()
            assert seconds(partial(send, sender, b"h", payload(0), 5)) < 1.5
        sender.close()
        receiver.close()


@every_transport
def test_receiver_that_does_not_read(pair: tuple[Transport, Transport]) -> None:
    """Guards against a sender that waits for ever, and a late reader that takes half a message for a whole one."""
    sender, receiver = link(*pair)

    def flood() -> None:
        for _ in range(50):
            send(sender, b"h", payload(8 << 20), 0.5)

    assert seconds(flood) < 3

    def drain() -> None:
        while True:
            take(receiver, 1)

    assert seconds(drain) < 3


@every_transport
def test_sender_that_stops_in_mid_message(pair: tuple[Transport, Transport]) -> None:
    """Guards against a receiver without a deadline: here nobody ever sends."""
    _, receiver = link(*pair)
    closing = threading.Timer(0.2, receiver.close)
    closing.start()
    assert seconds(lambda: receiver.receive_header(30)) < 1.5
    closing.join()


@every_transport
@pytest.mark.parametrize("closes", ["sender", "receiver"])
def test_close_wakes_the_other_end(pair: tuple[Transport, Transport], closes: str) -> None:
    """Guards against threads that wait on a link that the other side has left in good order."""
    sender, receiver = link(*pair)

    def flood() -> None:
        while True:
            send(sender, b"h", payload(8 << 20), 30)

    waits: Callable[[], Any] = flood if closes == "receiver" else (lambda: receiver.receive_header(30))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(seconds, waits)
        threading.Event().wait(0.3)
        (sender if closes == "sender" else receiver).close()
        assert waiting.result() < 1.8


@every_transport
def test_transport_close_wakes_everyone(pair: tuple[Transport, Transport]) -> None:
    """Guards against a shutdown that waits for peers that never come."""
    source, destination = pair
    _, receiver = link(*pair)
    with ThreadPoolExecutor(3) as pool:
        waits = [
            pool.submit(seconds, lambda: receiver.receive_header(30)),
            pool.submit(seconds, lambda: destination.accept(BACK, source.address(), 30)),
            pool.submit(seconds, lambda: source.connect(NAME, destination.address(), 30)),
        ]
        threading.Event().wait(0.3)
        source.close()
        destination.close()
        assert max(wait.result() for wait in waits) < 2


@pytest.fixture
def spawn() -> Iterator[Callable[..., tuple[Any, Any]]]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["transport_peer", "torch"])
    children = []

    def start(transport: str, own: RankAddress, sends: bool, action: str) -> tuple[Any, Any]:
        pipe, theirs = context.Pipe()
        child = context.Process(target=transport_peer.run, args=(theirs, transport, NAME, sends, action), daemon=True)
        child.start()
        children.append(child)
        pipe.send(own)
        return child, pipe

    yield start
    for child in children:
        child.kill()
        child.join()
        child.close()


cases = pytest.mark.parametrize("action", ["idle", "middle"])
over_processes = pytest.mark.parametrize("pair", ["shm", "gloo"], indirect=True)


@over_processes
@cases
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_sending_process_dies_or_stops(
    pair: tuple[Transport, Transport], spawn: Any, action: str, how: int, request: pytest.FixtureRequest
) -> None:
    """Guards against a receiver that waits longer than the deadline, or at all once the peer is dead."""
    _, own = pair
    child, pipe = spawn(request.node.callspec.params["pair"], own.address(), True, action)
    receiver = own.accept(NAME, pipe.recv(), 20)
    assert pipe.recv() == "open"
    middle = action == "middle" and request.node.callspec.params["pair"] == "gloo"
    if middle:
        assert receiver.receive_header(10) is not None
    elif how == signal.SIGSTOP:
        pytest.skip("a peer that is stopped and has announced nothing is no fault of the link's")
    timer = threading.Timer(0.02 if action == "middle" else 0.2, os.kill, (child.pid, how))
    timer.start()
    took = seconds(lambda: receiver.receive_payload(1.0) if middle else receiver.receive_header(10))
    assert took < 2
    timer.join()
    others_still_work(pair)


@over_processes
@pytest.mark.parametrize("action", ["idle", "middle", "flows"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_receiving_process_dies_or_stops(
    pair: tuple[Transport, Transport], spawn: Any, action: str, how: int, request: pytest.FixtureRequest
) -> None:
    """Guards against a sender that waits longer than the deadline, or at all once the peer is dead."""
    own, _ = pair
    child, pipe = spawn(request.node.callspec.params["pair"], own.address(), False, action)
    sender = own.connect(NAME, pipe.recv(), 20)
    assert pipe.recv() == "open"
    data = payload(64 << 20)
    timer = threading.Timer(0.0 if action == "idle" else 0.2, os.kill, (child.pid, how))
    timer.start()
    if action == "idle":
        timer.join()

    def flood() -> None:
        while True:
            send(sender, b"h", data, 1.0)

    took = seconds(flood)
    assert took < 2
    timer.join()
    others_still_work(pair)


def others_still_work(pair: tuple[Transport, Transport]) -> None:
    """The death of one peer costs one link."""
    sender, receiver = link(*pair, LinkName(PREFILL, 1, DECODE, 1))
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(send, sender, b"h", payload(1000), 5)
        assert torch.equal(take(receiver)[1], payload(1000))
        sending.result()


@pytest.mark.parametrize("kind", ["shm", "gloo"])
def test_strangers_do_not_meet(kind: Any) -> None:
    """Fault 40: a rank of another cluster, or whoever finds the port, takes a link's place."""
    destination = make_transport(kind, "127.0.0.1", b"ours")
    stranger, friend = make_transport(kind, "127.0.0.1", b"theirs"), make_transport(kind, "127.0.0.1", b"ours")
    try:
        with ThreadPoolExecutor(2) as pool:
            accept = pool.submit(destination.accept, NAME, stranger.address(), 1.5)
            with pytest.raises(LinkClosed):
                stranger.connect(NAME, destination.address(), 1.0)
            with pytest.raises(LinkClosed):
                accept.result(10)
        sender, receiver = link(friend, destination)
        with ThreadPoolExecutor(1) as pool:
            sent = pool.submit(send, sender, b"header", payload(100), 10)
            assert take(receiver)[0] == b"header"
            sent.result(10)
    finally:
        for transport in (stranger, friend, destination):
            transport.close()


def test_shm_refuses_another_machine() -> None:
    """Guards against a deployment over two machines that fails with an obscure socket error."""
    transport = make_transport("shm", "127.0.0.1")
    elsewhere = RankAddress("10.0.0.2", 17, "another machine")
    for call in (transport.connect, transport.accept):
        with pytest.raises(LinkClosed, match=r"within one machine.*another machine.*use transport 'gloo'"):
            call(NAME, elsewhere, 1)
    transport.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a device")
def test_nccl_needs_a_device() -> None:
    """Guards against a crash deep inside NCCL where a plain answer is possible."""
    with pytest.raises(ResourceMissing, match="needs a CUDA device"):
        make_transport("nccl", "127.0.0.1")
