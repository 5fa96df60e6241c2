"""A made-up fleet for `router.py`: groups whose caches hold a forest of prefixes, as conversations leave it.

Some hundreds of system prompts, chosen by Zipf's law; on each grow conversations. A conversation's blocks lie on one
prefill group, and half of them on a decode group as well; a system prompt's lie wherever one of its conversations is.
"""

from __future__ import annotations

import ctypes
import gc
import os
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt

from kvferry.cluster.admission import Admission
from kvferry.cluster.kv_events import digest_bytes, xor
from kvferry.cluster.messages import GroupInfo, KvEvents, Load, StepFrame, decode_from_group, encode
from kvferry.cluster.placing import Placer
from kvferry.cluster.ports import GroupPort
from kvferry.cluster.prefix_index import PrefixIndex
from kvferry.cluster.registry import Registry, RegistryConfig
from kvferry.cluster.router import Router, RouterConfig
from kvferry.cluster.router_load import ENOUGH_STEPS
from kvferry.cluster.transfers import Transfers
from kvferry.runtime.ids import BlockHash, Epoch, GroupId, Peer
from kvferry.runtime.kv.hashing import hash_block
from kvferry.runtime.transfer.ticket import GroupAddress

BLOCK_SIZE = 16
ROOT = b"a-fleet's-root16"
VOCAB = 50_000
SYSTEM_BLOCKS = (2, 12)
TAIL_BLOCKS = (6, 20)
FRAME_BLOCKS = 64
CHUNK = 1000
"""Conversations whose tokens are drawn at once."""
NUM_KEPT = 5000
"""Conversations that are asked again."""
TOKENS = list(range(VOCAB))
"""One object for each token, as a tokenizer's caches have it."""


@dataclass(frozen=True)
class Shape:
    num_groups: int
    num_blocks: int
    seed: int = 0


class _Port:
    """A group as far as routing knows it."""

    def __init__(self, info: GroupInfo) -> None:
        self.info = info
        self.peer = info.address.peer


class _Clock:
    """Stands still between requests."""

    def __init__(self) -> None:
        self.ns = 10**18

    def now_ns(self) -> int:
        return self.ns

    async def sleep(self, seconds: float) -> None:
        raise AssertionError(f"nobody sleeps here, not for {seconds} s")


class Fleet:
    """`fill` first."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.clock = _Clock()
        self.random = np.random.default_rng(shape.seed)
        self.registry = Registry(RegistryConfig())
        self.router = Router(RouterConfig())
        self.index = PrefixIndex()
        half = shape.num_groups // 2
        self.peers = [self._up(i, "prefill" if i < half else "decode") for i in range(shape.num_groups)]
        self._prefill, self._decode = self.peers[:half], self.peers[half:]
        self._proof = {peer: [0, 0, 0] for peer in self.peers}
        self._new: dict[Peer, list[BlockHash]] = {peer: [] for peer in self.peers}
        admission = Admission(self.router, 1e6, 8)
        transfers = Transfers(self.registry, 10.0, 10.0)
        self.placer = Placer(
            self.registry,
            self.router,
            self.index,
            transfers,
            self.clock,
            admission,
            unavailable_timeout_s=1.0,
            priority_step_s=1.0,
        )
        self.num_distinct = self.num_holdings = 0
        self.fill_s = 0.0
        num_systems = max(4, shape.num_blocks // 8000)
        self._systems = [
            self.random.integers(0, VOCAB, n * BLOCK_SIZE) for n in self._lengths(SYSTEM_BLOCKS, num_systems)
        ]
        weights = 1 / np.arange(1, num_systems + 1)
        self._weights = weights / weights.sum()
        width = (SYSTEM_BLOCKS[1] + TAIL_BLOCKS[1]) * BLOCK_SIZE
        self._kept = np.ones((NUM_KEPT, width), np.uint32)
        self._kept_lengths = np.ones(NUM_KEPT, np.int64)
        self._num_kept = 0

    def _up(self, number: int, role: str) -> Peer:
        peer = Peer(GroupId(f"{role}-{number}"), Epoch(number + 1))
        info = GroupInfo(
            address=GroupAddress(peer, 1, b"f" * 16, []),
            role=role,
            hash_root=ROOT,
            block_size=BLOCK_SIZE,
            block_bytes=2_000_000,
            num_blocks=100_000,
            max_context=100_000,
            max_sequences=256,
            max_batch_tokens=8192,
            model="made-up",
            dtype="bfloat16",
            pids=[],
        )
        port: GroupPort = _Port(info)  # type: ignore[assignment]
        self.registry.up(port, self.clock.ns)
        return peer

    def _lengths(self, limits: tuple[int, int], count: int) -> list[int]:
        return [int(n) for n in self.random.integers(limits[0], limits[1] + 1, count)]

    # ------------------------------------------------------------ filling
    def fill(self) -> int:
        """Has the groups report blocks until there are enough. Returns by how many bytes the process grew."""
        systems = [self._chain(None, tokens.tolist()) for tokens in self._systems]
        on = [set[Peer]() for _ in systems]
        before, begin_s = resident_bytes(), time.thread_time()
        conversations = self._conversations()
        every = max(1, self.shape.num_blocks // (sum(TAIL_BLOCKS) // 2) // NUM_KEPT)
        number = 0
        while self.num_distinct < self.shape.num_blocks:
            system, tail = next(conversations)
            self._keep(system, tail, number % every == 0)
            number += 1
            peers = [self._prefill[self.random.integers(len(self._prefill))]]
            if self.random.random() < 0.5:
                peers.append(self._decode[self.random.integers(len(self._decode))])
            chain = self._chain(systems[system][-1], tail.tolist())
            self.num_distinct += len(chain) + (len(systems[system]) if not on[system] else 0)
            for peer in peers:
                self._store(peer, chain if peer in on[system] else systems[system] + chain)
                on[system].add(peer)
        for peer in self.peers:
            self._report(peer)
        self.fill_s = time.thread_time() - begin_s
        for _ in range(ENOUGH_STEPS):
            for _ in self.peers:
                self.report_load()
        return resident_bytes() - before

    def _conversations(self) -> Iterator[tuple[int, np.ndarray]]:
        while True:
            systems = self.random.choice(len(self._systems), CHUNK, p=self._weights)
            tokens = self.random.integers(0, VOCAB, (CHUNK, TAIL_BLOCKS[1] * BLOCK_SIZE))
            for i, length in enumerate(self._lengths(TAIL_BLOCKS, CHUNK)):
                yield int(systems[i]), tokens[i, : length * BLOCK_SIZE]

    def _keep(self, system: int, tail: np.ndarray, wanted: bool) -> None:
        if wanted and self._num_kept < NUM_KEPT:
            tokens = np.concatenate([self._systems[system], tail])
            self._kept[self._num_kept, : len(tokens)] = tokens
            self._kept_lengths[self._num_kept] = len(tokens)
            self._num_kept += 1

    def _chain(self, parent: BlockHash | None, tokens: list[int]) -> list[BlockHash]:
        hashes = []
        for start in range(0, len(tokens), BLOCK_SIZE):
            parent = hash_block(ROOT, parent, tokens[start : start + BLOCK_SIZE])
            hashes.append(parent)
        return hashes

    def _store(self, peer: Peer, hashes: list[BlockHash]) -> None:
        self.num_holdings += len(hashes)
        self._new[peer] += hashes
        if len(self._new[peer]) >= FRAME_BLOCKS:
            self._report(peer)

    def _report(self, peer: Peer) -> None:
        frame = decode_from_group(encode(self.frame(peer, self._new[peer], [])))
        assert isinstance(frame, StepFrame)
        if self.index.apply(peer, frame.seq, frame.kv):
            raise RuntimeError(f"{peer}: its events do not prove themselves")
        self._new[peer] = []

    def frame(self, peer: Peer, stored: list[BlockHash], removed: list[BlockHash]) -> StepFrame:
        proof = self._proof[peer]
        for block_hash in (*stored, *removed):
            proof[2] = xor(proof[2], block_hash)
        proof[1] += len(stored) - len(removed)
        events = KvEvents(stored, removed, proof[1], digest_bytes(proof[2]))
        proof[0] += 1
        return StepFrame(peer.epoch, proof[0] - 1, [], [], events, Load())

    def report_load(self) -> None:
        """One group's heartbeat, without news of blocks."""
        peer = self.peers[self.random.integers(len(self.peers))]
        member = self.registry.get(peer)
        assert member is not None
        running = int(self.random.integers(0, 32))
        load = Load(
            num_running=running,
            waiting_tokens=int(self.random.integers(0, 4000)),
            prefill_tokens_per_s=20_000.0 + float(self.random.integers(0, 2000)),
            decode_step_s=0.02 + 0.0002 * running,
            link_bytes_per_s=10e9,
        )
        self.registry.on_frame(peer, StepFrame(peer.epoch, 0, [], [], None, load), self.clock.ns)
        self.router.observe(peer, load)

    # ------------------------------------------------------------ asking
    def prompt(self, num_blocks: int) -> list[int]:
        """A later turn of a conversation (six in ten), a new one on a known system prompt (three), or a new one."""
        kind = self.random.random()
        tokens: npt.NDArray[np.integer] = np.empty(0, np.int64)
        if kind < 0.6:
            i = int(self.random.integers(self._num_kept))
            tokens = self._kept[i, : self._kept_lengths[i]]
        elif kind < 0.9:
            tokens = self._systems[int(self.random.choice(len(self._systems), p=self._weights))]
        length = num_blocks * BLOCK_SIZE + 5
        fresh = self.random.integers(0, VOCAB, max(0, length - len(tokens)))
        return [TOKENS[t] for t in np.concatenate([tokens[:length], fresh]).tolist()]

    def names(self, peer: Peer) -> deque[BlockHash]:
        """Some of the blocks that a group holds."""
        return deque(islice(self.index.hashes(peer), 20_000))


def resident_bytes() -> int:
    """After everything that can be given back was."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
