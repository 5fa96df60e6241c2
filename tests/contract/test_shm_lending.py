"""Blocks that a destination copies straight from the source's pool: they may change only when nobody reads them."""

from __future__ import annotations

import fcntl
import gc
import mmap
import multiprocessing
import os
import signal
import struct
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from kvferry.runtime.ids import Epoch, GroupId, Peer
from kvferry.runtime.kv import shared
from kvferry.runtime.kv.shared import map_to_read, region_of, shared_empty
from kvferry.runtime.transfer import shm
from kvferry.runtime.transfer.lent import LINK_BYTES
from kvferry.runtime.transfer.shm import KEEP_S, ShmTransport
from kvferry.runtime.transfer.transport import LinkClosed, LinkName, Payload, ReceiveEnd, SendEnd

sys.path.insert(0, str(Path(__file__).parent))  # for the child process as well
import transport_peer

NAME = LinkName(Peer(GroupId("prefill-0"), Epoch(3)), 0, Peer(GroupId("decode-0"), Epoch(4)), 0)
SIZE = 3 << 20


@pytest.fixture
def transports() -> Iterator[tuple[ShmTransport, ShmTransport]]:
    made = ShmTransport("127.0.0.1", b""), ShmTransport("127.0.0.1", b"")
    yield made
    for transport in made:
        transport.close()


@pytest.fixture
def ends(transports: tuple[ShmTransport, ShmTransport]) -> tuple[SendEnd, ReceiveEnd]:
    source, destination = transports
    with ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(source.connect, NAME, destination.address(), 10)
        receiver = destination.accept(NAME, source.address(), 10)
        return connecting.result(), receiver


@pytest.fixture
def pool() -> torch.Tensor:
    """Of a source, filled."""
    memory = shared_empty((SIZE,), torch.uint8)
    return memory.copy_(torch.randint(0, 256, (SIZE,), dtype=torch.uint8))


def receive(end: ReceiveEnd) -> Payload:
    assert end.receive_header(5) is not None
    return end.receive_payload(5)


def whole(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat(list(pieces))


def test_a_lent_message_is_finished_once_it_is_freed(ends: tuple[SendEnd, ReceiveEnd], pool: torch.Tensor) -> None:
    """Guards against blocks that are evicted while the destination copies them, and against a copy at the source."""
    sender, receiver = ends
    bounds = [0, 1000, 5000, SIZE]
    pieces = [pool[a:b] for a, b in pairwise(bounds)]
    sender.send(b"h", pieces[::-1], 5)
    got = receive(receiver)
    assert torch.equal(got.read(whole), torch.cat(pieces[::-1]))
    with ThreadPoolExecutor(1) as threads:
        finishing = threads.submit(sender.wait_sent, 5)
        threading.Event().wait(0.1)
        assert not finishing.done()
        got.free()
        assert finishing.result(KEEP_S / 2)


def test_a_message_that_waits_does_not_keep_the_next_one(ends: tuple[SendEnd, ReceiveEnd], pool: torch.Tensor) -> None:
    """Guards against a hand-over that takes a step of the destination longer: its blocks wait behind earlier ones."""
    sender, receiver = ends
    sender.send(b"h", [pool], 5)
    with ThreadPoolExecutor(1) as threads:
        finishing = threads.submit(sender.wait_sent, 5)
        threading.Event().wait(0.05)
        sender.wake()
        assert finishing.result(KEEP_S / 2) is False
    receive(receiver).free()
    assert sender.wait_sent(5)


@pytest.mark.parametrize("how", ["waits too long", "closed", "closed there"])
def test_blocks_move_before_they_are_let_go(ends: tuple[SendEnd, ReceiveEnd], pool: torch.Tensor, how: str) -> None:
    """Guards against an import of what the source's pool holds by then, before or in the middle of a copy."""
    sender, receiver = ends
    wanted = [pool.clone(), pool.flip(0).clone()]
    sender.send(b"h", [pool], 5)
    got = receive(receiver)
    times = 0

    def use(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        nonlocal times
        times += 1
        begun = pieces[0][: SIZE // 2].clone()
        if times == 1:
            if how == "waits too long":
                assert sender.wait_sent(5)
            elif how == "closed there":
                receiver.close()
                with pytest.raises(LinkClosed):
                    sender.wait_sent(5)
            sender.close()
            pool.zero_()
        return torch.cat([begun, pieces[0][SIZE // 2 :]])

    assert torch.equal(got.read(use), wanted[0])
    assert times == 2
    assert torch.equal(got.read(whole), wanted[0])
    got.free()


def test_a_buffer_forgets_that_something_moved_there(ends: tuple[SendEnd, ReceiveEnd], pool: torch.Tensor) -> None:
    """Guards against old bytes of a buffer that are taken for a later message."""
    sender, receiver = ends
    for seed in range(3):
        pool.fill_(seed)
        sender.send(b"h", [pool], 5)
        got = receive(receiver)
        if seed == 1:
            assert sender.wait_sent(5)
            pool.fill_(99)
        assert bool((got.read(whole) == seed).all())
        got.free()
        if seed != 1:
            assert sender.wait_sent(5)


@pytest.mark.parametrize("places", [[(SIZE, 10)], [(1 << 63, 10)], [(SIZE - 5, 10)], [(0, 4), (8, 5)], [(0, 0)]])
def test_places_outside_of_a_pool(
    ends: tuple[SendEnd, ReceiveEnd], pool: torch.Tensor, monkeypatch: pytest.MonkeyPatch, places: list[tuple[int, int]]
) -> None:
    """Guards against a peer that makes this process read what is not there."""
    sender, receiver = ends
    real = struct.pack

    def pack(form: str, *values: int) -> bytes:
        flat = [n for place in places for n in place]
        return real(f"<0I{len(flat)}Q", *flat) if form == "<0I2Q" else real(form, *values)

    monkeypatch.setattr(shm.struct, "pack", pack)
    monkeypatch.setattr(shm, "_HEADER", Stubborn(shm._HEADER, num_pieces=len(places)))  # announces as many as there are
    sender.send(b"h", [pool[:10]], 5)
    with pytest.raises(LinkClosed, match="10 bytes in pieces"):
        receiver.receive_header(5)


class Stubborn:
    """A header that says another number of pieces."""

    def __init__(self, real: struct.Struct, num_pieces: int) -> None:
        self._real, self.size, self.unpack_from = real, real.size, real.unpack_from
        self._num_pieces = num_pieces

    def pack(self, *values: object) -> bytes:
        return self._real.pack(*values[:-1], self._num_pieces)


def test_only_the_owner_writes(pool: torch.Tensor) -> None:
    """Guards against a peer that can change, or cut off, what this group computes with."""
    region = region_of([pool])
    assert region is not None
    with pytest.raises(PermissionError):
        mmap.mmap(region.descriptor, SIZE)
    with pytest.raises(PermissionError):
        os.ftruncate(region.descriptor, 1)
    with pytest.raises(PermissionError):
        os.pwrite(region.descriptor, b"x", 0)
    with pytest.raises(PermissionError):
        fcntl.fcntl(region.descriptor, fcntl.F_ADD_SEALS, 0)
    theirs = map_to_read(region.descriptor)
    pool[5] = 17
    assert theirs[5] == 17
    theirs[5] = 18
    assert pool[5] == 17


def test_regions_are_found_and_forgotten() -> None:
    """Guards against descriptors that outlive a pool, and places that are taken for those of another one."""
    gc.collect()
    before = len(shared._regions), len(os.listdir("/proc/self/fd"))
    one, two = shared_empty((2, 100), torch.float32), shared_empty((50,), torch.bfloat16)
    views = [one[0].view(torch.uint8), one[1].view(torch.uint8)]
    assert region_of(views) is not None
    assert region_of([*views, two.view(torch.uint8)]) is None
    assert region_of([torch.zeros(5, dtype=torch.uint8)]) is None
    assert region_of([]) is None
    del one, two, views
    gc.collect()
    assert (len(shared._regions), len(os.listdir("/proc/self/fd"))) == before


def test_memory_of_a_system_without_sealing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a group that cannot start where pools cannot be shared."""

    def refuse(*_: object) -> None:
        raise OSError("not here")

    for module, name in ((fcntl, "fcntl"), (os, "memfd_create")):
        monkeypatch.setattr(module, name, refuse)
        memory = shared_empty((4, 5), torch.bfloat16)
        assert memory.shape == (4, 5)
        assert region_of([memory.view(-1)]) is None


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_blocks_outlive_their_source(transports: tuple[ShmTransport, ShmTransport], how: int) -> None:
    """Guards against a destination that crashes, or imports something else, when the source dies in between."""
    _, own = transports
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["transport_peer", "torch"])
    pipe, theirs = context.Pipe()
    child = context.Process(target=transport_peer.run, args=(theirs, "shm", NAME, True, "lend"), daemon=True)
    child.start()
    try:
        pipe.send(own.address())
        receiver = own.accept(NAME, pipe.recv(), 20)
        got = receive(receiver)
        assert child.pid is not None
        os.kill(child.pid, how)
        if how == signal.SIGKILL:
            with pytest.raises(LinkClosed):
                receiver.receive_header(5)
            child.join()
        assert bool((got.read(whole) == 7).all())
        got.free()
    finally:
        child.kill()
        child.join()


def test_a_destination_that_does_not_import(ends: tuple[SendEnd, ReceiveEnd], pool: torch.Tensor) -> None:
    """Guards against blocks that stay pinned, and memory that grows, as long as nobody imports."""
    sender, receiver = ends
    wanted = pool.clone()
    held, begin = [], time.monotonic()
    for _ in range(LINK_BYTES // SIZE):
        sender.send(b"h", [pool], 0.2)
        held.append(receive(receiver))
    with pytest.raises(LinkClosed, match="no answer"):
        sender.send(b"h", [pool], 0.2)
    assert time.monotonic() - begin < KEEP_S
    sender.close()
    pool.zero_()
    assert all(torch.equal(got.read(whole), wanted) for got in held)
