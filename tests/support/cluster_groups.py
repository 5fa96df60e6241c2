"""Groups for the toy cluster: one that the test plays, and one whose next token is a hash of the tokens so far."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from kvferry.cluster.kv_events import KvEventLog
from kvferry.cluster.messages import Audit, GroupInfo, KvSnapshot, Load, StepFrame
from kvferry.cluster.ports import Clock
from kvferry.runtime.errors import GroupUnavailable, KvferryError
from kvferry.runtime.ids import BlockHash, BlockId, Epoch, GroupId, Peer, RequestId, SequenceKey, TransferId
from kvferry.runtime.kv.hashing import hash_chain, salted_root
from kvferry.runtime.request import FinishReason, Request, SamplingParams, SequenceRequest, TokenEvent
from kvferry.runtime.transfer.ticket import (
    ExpectRequest,
    GroupAddress,
    Ticket,
    TicketBlock,
    TransferEvent,
    TransferState,
)

BLOCK_SIZE = 4
ROOT = b"r" * 16
EOS = 0


class Surroundings(Protocol):
    """What a toy group needs of the world."""

    clock: Clock

    def carry(self, ticket: Ticket) -> None: ...

    def deliver(self, group: ToyGroup, frame: StepFrame) -> None: ...


# ---------------------------------------------------------------- the toy model
def next_token(seed: int, index: int, tokens: list[int]) -> int:
    """0 is the end of sequence, drawn about once in 20 tokens."""
    return zlib.crc32(repr((seed, index, tokens)).encode()) % 20


def expected(request: Request) -> list[list[int]]:
    """The undisturbed output of every sequence."""
    outputs = []
    for index in range(request.sampling.n):
        out: list[int] = []
        while len(out) < request.sampling.max_tokens and out[-1:] != [EOS]:
            out.append(next_token(request.sampling.seed or 0, index, request.prompt_token_ids + out))
        outputs.append(out)
    return outputs


def request(name: str = "r", prompt: int = 10, max_tokens: int = 6, n: int = 1, seed: int = 1, **more: Any) -> Request:
    """A request whose prompt is `prompt` tokens long, or is `prompt`."""
    return Request(
        request_id=RequestId(name),
        prompt_token_ids=list(range(100, 100 + prompt)),
        sampling=SamplingParams(n=n, max_tokens=max_tokens, seed=seed),
        eos_token_ids=[EOS],
        **more,
    )


def seed_where(good: Callable[[list[list[int]]], bool], **kind: Any) -> int:
    """A seed whose undisturbed outputs are `good`."""
    return next(seed for seed in range(10_000) if good(expected(request(seed=seed, **kind))))


# ---------------------------------------------------------------- groups
def info(group: str, epoch: int, role: str, **changed: Any) -> GroupInfo:
    fields: dict[str, Any] = {
        "address": GroupAddress(Peer(GroupId(group), Epoch(epoch)), 1, b"f" * 16, []),
        "role": role,
        "hash_root": ROOT,
        "block_size": BLOCK_SIZE,
        "block_bytes": 1000,
        "num_blocks": 1000,
        "max_context": min(1000, changed.get("num_blocks", 1000) * BLOCK_SIZE),
        "max_sequences": 64,
        "max_batch_tokens": 64,
        "model": "toy",
        "dtype": "float32",
        "pids": [],
    }
    return GroupInfo(**(fields | changed))


class ManualPort:
    """Records what it is told; the test says what comes back."""

    def __init__(self, group: str, epoch: int, role: str, **changed: Any) -> None:
        self.info = info(group, epoch, role, **changed)
        self.submitted: list[SequenceRequest] = []
        self.cancelled: list[SequenceKey] = []
        self.tickets: list[Ticket] = []
        self.ended: list[TransferId] = []
        self.shortened: list[tuple[TransferId, list[BlockHash]]] = []
        self.renewed: list[TransferId] = []
        self.gone: list[Peer] = []
        self.expects: list[tuple[ExpectRequest, asyncio.Future[Ticket]]] = []

    @property
    def peer(self) -> Peer:
        return self.info.address.peer

    def submit(self, sequences: list[SequenceRequest]) -> None:
        self.submitted += sequences

    def cancel(self, keys: list[SequenceKey]) -> None:
        self.cancelled += keys

    async def expect(self, request: ExpectRequest, timeout_s: float) -> Ticket:
        future = asyncio.get_running_loop().create_future()
        self.expects.append((request, future))
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            raise GroupUnavailable(f"{self.peer} is silent") from None

    def send_ticket(self, ticket: Ticket) -> None:
        self.tickets.append(ticket)

    def end_transfer(self, transfer_id: TransferId, attempt: int, reason: str) -> None:
        self.ended.append(transfer_id)

    def shorten_transfer(self, transfer_id: TransferId, attempt: int, lacking: list[BlockHash]) -> None:
        self.shortened.append((transfer_id, lacking))

    def renew(self, transfer_ids: list[TransferId], timeout_s: float) -> None:
        self.renewed += transfer_ids

    def peer_gone(self, peer: Peer) -> None:
        self.gone.append(peer)

    async def audit(self, timeout_s: float) -> Audit:
        raise NotImplementedError

    async def snapshot(self, timeout_s: float) -> KvSnapshot:
        raise NotImplementedError

    # ------------------------------------------------------------ the test's side
    def answer(self, num_missing: int = 2) -> Ticket:
        """Answers the newest `expect`."""
        wanted, future = self.expects[-1]
        hashes = hash_chain(salted_root(ROOT, wanted.cache_salt), wanted.token_ids, BLOCK_SIZE)
        missing = [TicketBlock(i, h, BlockId(i)) for i, h in enumerate(hashes)][-num_missing:] if num_missing else []
        ticket = Ticket(
            transfer_id=wanted.transfer_id,
            attempt=wanted.attempt,
            destination=self.info.address,
            missing=missing,
            timeout_s=wanted.timeout_s,
        )
        if not future.done():
            future.set_result(ticket)
        return ticket

    def refuse(self, error: KvferryError) -> None:
        self.expects[-1][1].set_exception(error)


class _Running:
    def __init__(self, sequence: SequenceRequest, steps_left: int, begin_ns: int, num_cached: int) -> None:
        self.sequence = sequence
        self.tokens = list(sequence.output_token_ids)
        self.steps_left = steps_left
        self.begin_ns: int | None = begin_ns
        self.num_cached = num_cached


class _Inbound:
    def __init__(self, ticket: Ticket, source: Peer, deadline_ns: int) -> None:
        self.ticket = ticket
        self.source = source
        self.deadline_ns = deadline_ns
        self.state = TransferState.ACTIVE if ticket.missing else TransferState.COMPLETE


class ToyGroup:
    """An engine that prefills 8 tokens and decodes one per step, and keeps the rules of transfers."""

    prefill_chunk = 8

    def __init__(self, world: Surroundings, group: str, epoch: int, role: str, step_s: float, latency_s: float) -> None:
        self.world = world
        self.info = info(group, epoch, role)
        self.step_s = step_s
        self.latency_s = latency_s
        self.alive = True
        self.silent = False
        self.waiting: list[SequenceRequest] = []
        self.running: list[_Running] = []
        self.inbound: dict[TransferId, _Inbound] = {}
        self.outbound: dict[TransferId, Ticket] = {}
        self.cache: set[BlockHash] = set()
        self.log = KvEventLog()
        self.seq = -1
        self.sent: list[StepFrame] = []
        self.num_expired = 0
        self.refuse_expect: KvferryError | None = None
        self.refuse_submits: list[str] = []
        self._events: list[TransferEvent] = []
        self._tokens: list[TokenEvent] = []
        self._last_arrival = 0.0
        self._calls: set[asyncio.Future[Ticket]] = set()

    @property
    def peer(self) -> Peer:
        return self.info.address.peer

    # ------------------------------------------------------------ port
    def _later(self, call: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        self._last_arrival = max(loop.time() + self.latency_s, self._last_arrival + 1e-6)
        loop.call_at(self._last_arrival, lambda: call() if self.alive else None)

    def submit(self, sequences: list[SequenceRequest]) -> None:
        self._later(lambda: self._take(sequences))

    def cancel(self, keys: list[SequenceKey]) -> None:
        self._later(lambda: self._cancel(set(keys)))

    def expect(self, request: ExpectRequest, timeout_s: float) -> Awaitable[Ticket]:
        future: asyncio.Future[Ticket] = asyncio.get_running_loop().create_future()
        self._calls.add(future)
        self._later(lambda: self._expect(request, future))
        return self._ticket(future, timeout_s)

    async def _ticket(self, future: asyncio.Future[Ticket], timeout_s: float) -> Ticket:
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            raise GroupUnavailable(f"{self.peer} is silent") from None
        finally:
            self._calls.discard(future)

    def send_ticket(self, ticket: Ticket) -> None:
        self._later(lambda: self.outbound.__setitem__(ticket.transfer_id, ticket))

    def end_transfer(self, transfer_id: TransferId, attempt: int, reason: str) -> None:
        self._later(lambda: self._forget_transfer(transfer_id))

    def shorten_transfer(self, transfer_id: TransferId, attempt: int, lacking: list[BlockHash]) -> None:
        """Its peers here lose nothing."""

    def renew(self, transfer_ids: list[TransferId], timeout_s: float) -> None:
        def renewed() -> None:
            for transfer_id in transfer_ids:
                if transfer_id in self.inbound:
                    self.inbound[transfer_id].deadline_ns = self.world.clock.now_ns() + int(timeout_s * 1e9)

        self._later(renewed)

    def peer_gone(self, peer: Peer) -> None:
        def gone() -> None:
            for inbound in self.inbound.values():
                if inbound.source == peer and inbound.state is TransferState.ACTIVE:
                    inbound.state = TransferState.FAILED
            self.outbound = {i: t for i, t in self.outbound.items() if t.destination.peer != peer}

        self._later(gone)

    async def audit(self, timeout_s: float) -> Audit:
        keys = [s.key for s in self.waiting] + [r.sequence.key for r in self.running]
        return Audit(0, [], keys, list(self.inbound), list(self.outbound), 0)

    async def snapshot(self, timeout_s: float) -> KvSnapshot:
        return KvSnapshot(0, self.seq, list(self.cache))

    # ------------------------------------------------------------ inside
    def _take(self, sequences: list[SequenceRequest]) -> None:
        for sequence in sequences:
            if self.refuse_submits:
                label = self.refuse_submits.pop(0)
                position = len(sequence.output_token_ids)
                self._tokens.append(
                    TokenEvent(
                        key=sequence.key, position=position, token_id=None, error_label=label, error_message="refused"
                    )
                )
            else:
                self.waiting.append(sequence)

    def _cancel(self, keys: set[SequenceKey]) -> None:
        named = {s.transfer_id for s in [*self.waiting, *(r.sequence for r in self.running)] if s.key in keys}
        self.waiting = [s for s in self.waiting if s.key not in keys]
        self.running = [r for r in self.running if r.sequence.key not in keys]
        for transfer_id in named:
            if transfer_id is not None and all(s.transfer_id != transfer_id for s in self.waiting):
                self._forget_transfer(transfer_id)

    def _forget_transfer(self, transfer_id: TransferId) -> None:
        self.inbound.pop(transfer_id, None)
        self.outbound.pop(transfer_id, None)

    def _expect(self, wanted: ExpectRequest, future: asyncio.Future[Ticket]) -> None:
        if self.refuse_expect is not None:
            if not future.done():
                future.set_exception(self.refuse_expect)
            return
        hashes = self._chain(wanted.token_ids, wanted.cache_salt)
        missing = [TicketBlock(i, h, BlockId(i)) for i, h in enumerate(hashes) if h not in self.cache]
        ticket = Ticket(
            transfer_id=wanted.transfer_id,
            attempt=wanted.attempt,
            destination=self.info.address,
            missing=missing,
            timeout_s=wanted.timeout_s,
        )
        deadline_ns = self.world.clock.now_ns() + int(wanted.timeout_s * 1e9)
        self.inbound[wanted.transfer_id] = _Inbound(ticket, wanted.source.peer, deadline_ns)
        if not future.done():
            future.set_result(ticket)

    def _chain(self, tokens: list[int], salt: str) -> list[BlockHash]:
        return hash_chain(salted_root(ROOT, salt), tokens, BLOCK_SIZE)

    def _seal(self, hashes: list[BlockHash]) -> None:
        for block_hash in hashes:
            if block_hash not in self.cache:
                self.cache.add(block_hash)
                self.log.stored(block_hash)

    async def live(self) -> None:
        while self.alive:
            await self.world.clock.sleep(self.step_s)
            if self.alive and not self.silent:
                self.step()

    def step(self) -> None:
        now_ns = self.world.clock.now_ns()
        self._step_transfers(now_ns)
        for sequence in list(self.waiting):
            inbound = self.inbound.get(sequence.transfer_id) if sequence.transfer_id is not None else None
            if inbound is not None and inbound.state is TransferState.ACTIVE:
                continue
            if sequence.transfer_id is not None:
                self.inbound.pop(sequence.transfer_id, None)
            self.waiting.remove(sequence)
            tokens = sequence.prompt_token_ids + sequence.output_token_ids
            hits = 0
            for block_hash in self._chain(tokens, sequence.cache_salt):
                if block_hash not in self.cache:
                    break
                hits += BLOCK_SIZE
            steps = max(1, -(-(len(tokens) - hits) // self.prefill_chunk))
            self.running.append(_Running(sequence, steps, now_ns, min(hits, len(tokens) - 1)))
        for running in list(self.running):
            running.steps_left = max(0, running.steps_left - 1)
            if running.steps_left == 0:
                self._draw(running, now_ns)
        self._send()

    def _step_transfers(self, now_ns: int) -> None:
        for transfer_id, ticket in list(self.outbound.items()):
            if all(block.hash in self.cache for block in ticket.missing):
                del self.outbound[transfer_id]
                self.world.carry(ticket)
        for transfer_id, inbound in list(self.inbound.items()):
            if inbound.deadline_ns < now_ns:
                self.num_expired += 1
                del self.inbound[transfer_id]

    def receive(self, ticket: Ticket) -> None:
        inbound = self.inbound.get(ticket.transfer_id)
        if not self.alive or inbound is None or inbound.state is not TransferState.ACTIVE:
            return
        inbound.state = TransferState.COMPLETE
        self._seal([block.hash for block in ticket.missing])
        self._events.append(
            TransferEvent(
                transfer_id=ticket.transfer_id,
                attempt=ticket.attempt,
                state=TransferState.COMPLETE,
                num_blocks=len(ticket.missing),
                num_bytes=len(ticket.missing) * self.info.block_bytes,
                begin_ns=self.world.clock.now_ns() - 1000,
                end_ns=self.world.clock.now_ns(),
            )
        )

    def _draw(self, running: _Running, now_ns: int) -> None:
        sequence, params = running.sequence, running.sequence.sampling
        prompt = sequence.prompt_token_ids
        self._seal(self._chain(prompt + running.tokens, sequence.cache_salt))
        token = next_token(params.seed or 0, sequence.key.index, prompt + running.tokens)
        running.tokens.append(token)
        reason = None
        if token == EOS:
            reason = FinishReason.STOP
        elif len(running.tokens) == params.max_tokens:
            reason = FinishReason.LENGTH
        elif len(running.tokens) == sequence.handoff_after:
            reason = FinishReason.HANDOFF
        self._tokens.append(
            TokenEvent(
                key=sequence.key,
                position=len(running.tokens) - 1,
                token_id=token,
                finish_reason=reason,
                num_cached_tokens=running.num_cached,
                begin_ns=running.begin_ns,
                end_ns=now_ns if running.begin_ns is not None else None,
            )
        )
        running.begin_ns = None
        if reason is not None:
            self.running.remove(running)

    def _send(self) -> None:
        self.seq += 1
        load = Load(num_waiting=len(self.waiting), num_running=len(self.running), decode_step_s=self.step_s)
        frame = StepFrame(self.peer.epoch, self.seq, self._tokens, self._events, self.log.take(), load)
        self._tokens, self._events = [], []
        self.sent.append(frame)
        self.world.deliver(self, frame)

    def die(self) -> None:
        self.alive = False
