"""Whole lives of small clusters of real engines over a toy runner: groups die, stop and wake, messages to blocks are
lost, clients leave, request ids come again. Virtual time; each case is its seed.

Guards against: tokens that differ from the undisturbed run; a request that hangs; blocks, leases or sequences left
behind anywhere; an engine that spins.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.cluster.budgets import CoordinatorConfig
from kvferry.cluster.kv_events import KvEventLog
from kvferry.cluster.messages import Audit, StepFrame, decode_from_group, encode
from kvferry.cluster.registry import RegistryConfig
from kvferry.cluster.router import RouterConfig
from kvferry.runtime.config import CacheConfig, EngineConfig, SchedulerConfig, TransferConfig
from kvferry.runtime.engine import Engine
from kvferry.runtime.errors import GroupDied, GroupUnavailable, InvalidArgument, KvferryError
from kvferry.runtime.ids import BlockHash, Epoch, GroupId, Peer, RequestId, SequenceKey, TransferId
from kvferry.runtime.request import Request, SamplingParams, SequenceRequest, TokenEvent
from kvferry.runtime.step import Send
from kvferry.runtime.transfer.ticket import (
    ExpectRequest,
    GroupAddress,
    LinkDown,
    RankAddress,
    Received,
    Sent,
    Ticket,
    TransferEvent,
)
from tests.support.toy_engine import ROOT, VOCAB, ToyRunner, toy_groups, toy_output

pytestmark = pytest.mark.core
LAYOUTS = {
    "prefill and decode": [("p0", "prefill"), ("d0", "decode")],
    "two decodes": [("p0", "prefill"), ("d0", "decode"), ("d1", "decode")],
    "mixed": [("m0", "mixed"), ("m1", "mixed")],
    "all": [("p0", "prefill"), ("d0", "decode"), ("m0", "mixed")],
}
MAX_IDLE_STEPS = 3000


class RealGroup:
    """A `GroupPort` before an engine. What it is told arrives later, in order; a silent one reads nothing."""

    def __init__(self, case: Case, name: str, role: str, num_blocks: int, scheduler: SchedulerConfig) -> None:
        self.case, self.role, self.num_blocks, self.scheduler = case, role, num_blocks, scheduler
        kv = toy_groups(num_blocks)
        address = GroupAddress(
            Peer(GroupId(name), Epoch(case.next_epoch())), 1, kv.fingerprint, [RankAddress("h", 0, "here")]
        )
        self.info = case.toy.info(
            name, address.peer.epoch, role, address=address, hash_root=ROOT, num_blocks=num_blocks
        )
        self.runner = ToyRunner(kv)
        config = EngineConfig(
            cache=CacheConfig(block_size=kv.block_size, num_blocks=num_blocks),
            scheduler=scheduler,
            transfer=TransferConfig(transport="local", blocks_per_message=2),
        )
        self.engine = Engine(config, kv, ROOT, address, 1 << 20, self.runner.execute, case.world.clock.now_ns)
        self.alive, self.silent = True, False
        self.unread: list[Callable[[], Any]] = []
        self.calls: set[asyncio.Future[Ticket]] = set()
        self.wake = asyncio.Event()
        self.log, self.seq, self.num_idle_steps = KvEventLog(), -1, 0
        self.last_in = self.last_out = 0.0

    @property
    def peer(self) -> Peer:
        return self.info.address.peer

    @property
    def now_ns(self) -> int:
        return self.case.world.clock.now_ns()

    # ------------------------------------------------------------ port
    def tell(self, what: Callable[[], Any]) -> None:
        """Now, or when it wakes."""
        if self.alive and self.silent:
            self.unread.append(what)
        elif self.alive:
            what()
            self.wake.set()

    def later(self, what: Callable[[], Any]) -> None:
        loop = asyncio.get_running_loop()
        self.last_in = max(loop.time() + self.case.rng.choice([0.0005, 0.002, 0.01]), self.last_in + 1e-6)
        loop.call_at(self.last_in, self.tell, what)

    def submit(self, sequences: list[SequenceRequest]) -> None:
        self.later(lambda: [self.engine.submit(s, self.now_ns) for s in sequences])

    def cancel(self, keys: list[SequenceKey]) -> None:
        self.later(lambda: [self.engine.cancel(key) for key in keys])

    def expect(self, request: ExpectRequest, timeout_s: float) -> Awaitable[Ticket]:
        future: asyncio.Future[Ticket] = asyncio.get_running_loop().create_future()
        self.calls.add(future)
        self.later(lambda: self._expect(request, future))
        return self._ticket(future, timeout_s)

    async def _ticket(self, future: asyncio.Future[Ticket], timeout_s: float) -> Ticket:
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            raise GroupUnavailable(f"{self.peer} is silent") from None
        finally:
            self.calls.discard(future)

    def _expect(self, request: ExpectRequest, future: asyncio.Future[Ticket]) -> None:
        loop = asyncio.get_running_loop()
        try:
            ticket = self.engine.expect(request, self.now_ns)
        except KvferryError as error:
            refusal = error
            loop.call_later(0.001, lambda: future.done() or future.set_exception(refusal))
        else:
            loop.call_later(0.001, lambda: future.done() or future.set_result(ticket))

    def send_ticket(self, ticket: Ticket) -> None:
        self.later(lambda: self.engine.send(ticket, self.now_ns))

    def end_transfer(self, transfer_id: TransferId, attempt: int, reason: str) -> None:
        self.later(lambda: self.engine.end_transfer(transfer_id, attempt, reason))

    def shorten_transfer(self, transfer_id: TransferId, attempt: int, lacking: list[BlockHash]) -> None:
        self.later(lambda: self.engine.shorten_transfer(transfer_id, attempt, lacking))

    def renew(self, transfer_ids: list[TransferId], timeout_s: float) -> None:
        self.later(lambda: self.engine.renew(transfer_ids, timeout_s, self.now_ns))

    def peer_gone(self, peer: Peer) -> None:
        self.later(lambda: self.engine.peer_gone(peer))

    async def audit(self, timeout_s: float) -> Audit:
        held = self.engine.audit()
        return Audit(0, held.broken, held.sequences, held.inbound, held.outbound, held.num_leased_blocks)

    # ------------------------------------------------------------ life
    async def live(self) -> None:
        while self.alive:
            engine = self.engine
            deadline_ns = engine.next_deadline_ns()
            due = deadline_ns is not None and deadline_ns <= self.now_ns
            if not self.silent and (engine.has_work() or due):
                self.step()
                await asyncio.sleep(self.case.rng.choice([0.001, 0.005, 0.02]))
                continue
            self.wake.clear()
            wait_s = 0.5 if deadline_ns is None else min(0.5, max(0.0005, (deadline_ns - self.now_ns) / 1e9))
            try:
                async with asyncio.timeout(wait_s):
                    await self.wake.wait()
            except TimeoutError:
                if self.alive and not self.silent:
                    self.frame([], [], None)

    def step(self) -> None:
        idle = not self.engine.scheduler.running
        output = self.engine.step(self.now_ns)
        self.num_idle_steps = self.num_idle_steps + 1 if idle and not self.engine.scheduler.running else 0
        assert self.num_idle_steps < MAX_IDLE_STEPS, f"{self.peer} spins"
        assert self.engine.audit().broken == []
        self.runner.poison(list(self.engine.pool._free))
        for block_hash in output.stored:
            self.log.stored(block_hash)
        for block_hash in output.removed:
            self.log.removed(block_hash)
        self.frame(output.tokens, output.transfers, self.log.take())
        sends, self.runner.sends = self.runner.sends, []
        for send, payload in sends:
            self.case.carry(self, send, payload)

    def frame(self, tokens: list[TokenEvent], transfers: list[TransferEvent], kv: Any) -> None:
        self.seq += 1
        frame = decode_from_group(
            encode(StepFrame(self.peer.epoch, self.seq, tokens, transfers, kv, self.engine.load()))
        )
        loop = asyncio.get_running_loop()
        self.last_out = max(loop.time() + self.case.rng.choice([0.0005, 0.003]), self.last_out + 1e-6)
        loop.call_at(self.last_out, self.case.world.arrive, self.peer, frame)

    def die(self) -> None:
        self.alive = False
        self.wake.set()

    def stop_for(self, seconds: float) -> None:
        self.silent = True
        asyncio.get_running_loop().call_later(seconds, self._go_on)

    def _go_on(self) -> None:
        self.silent = False
        unread, self.unread = self.unread, []
        for what in unread:
            self.tell(what)
        self.wake.set()


class Case:
    """One cluster's life, drawn from a seed."""

    def __init__(self, toy: SimpleNamespace, seed: int) -> None:
        self.toy, self.rng = toy, random.Random(seed)
        rng = self.rng
        self.faulty = rng.random() < 0.6
        self.loss = rng.choice([0.0, 0.1, 0.5]) if self.faulty else 0.0
        self.world = toy.World(
            CoordinatorConfig(
                transfer_timeout_s=rng.choice([0.2, 1.0, 20.0]),
                expect_timeout_s=rng.choice([0.02, 1.0]),
                retry_budget=50,
                retry_pause_s=0.01,
            ),
            RegistryConfig(unreachable_after_s=0.8, abandon_after_s=2.0),
            RouterConfig(disaggregate=rng.choice(["always", "auto"])),
        )
        self.groups: list[RealGroup] = []
        self.links: dict[tuple[Peer, Peer], float] = {}
        self.over = False
        self.failures: list[Any] = []
        """Of callbacks: the loop would only log them."""
        self.shared = [rng.randrange(VOCAB) for _ in range(24)]

    def next_epoch(self) -> int:
        return len(self.groups) + 1

    async def run(self) -> None:
        rng = self.rng
        asyncio.get_running_loop().set_exception_handler(lambda _, context: self.failures.append(context))
        async with self.world as world, asyncio.TaskGroup() as self.lives:
            for name, role in LAYOUTS[rng.choice(list(LAYOUTS))]:
                scheduler = SchedulerConfig(
                    max_batch_tokens=rng.choice([3, 8, 64]), max_sequences=rng.choice([2, 8, 64])
                )
                self.add(RealGroup(self, name, role, rng.choice([14, 16, 30, 100]), scheduler))
            async with asyncio.TaskGroup() as clients:
                for number in range(rng.randrange(1, 14)):
                    clients.create_task(self.client(number))
                if self.faulty:
                    clients.create_task(self.disturb())
            self.over = True
            await world.clock.sleep(30)
            await self.check_rest()
            for group in self.groups:
                group.die()

    def add(self, group: RealGroup) -> None:
        if not self.over:
            self.groups.append(group)
            self.world.registry.up(group, group.now_ns)
            self.lives.create_task(group.live())

    # ------------------------------------------------------------ clients
    async def client(self, number: int) -> None:
        rng = self.rng
        await asyncio.sleep(rng.random() * rng.choice([0.05, 0.5, 3]))
        request = self.request(number)
        try:
            stream = self.world.coordinator.start(request)
        except InvalidArgument:  # the same id is in flight
            return
        truth = [self.truth(request, index) for index in range(request.sampling.n)]
        if rng.random() < 0.2:
            leave = asyncio.get_running_loop().call_later(
                rng.random() * rng.choice([0.02, 0.3]), lambda: self.lives.create_task(stream.aclose())
            )
            async for event in stream:
                assert event.token_id in (None, truth[event.key.index][event.position])
            leave.cancel()
            return
        async with asyncio.timeout(900):
            assert await self.toy.collect(stream, request.sampling.n) == truth

    def request(self, number: int) -> Request:
        rng = self.rng
        own = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 8))]
        prompt = self.shared[: rng.choice([0, 8, 16, 24])] + own
        room = 4 * min(group.num_blocks for group in self.groups) - len(prompt)
        return Request(
            request_id=RequestId(f"again{rng.randrange(4)}" if rng.random() < 0.2 else f"r{number}"),
            prompt_token_ids=prompt,
            sampling=SamplingParams(
                n=rng.choice([1, 1, 2, 3]), max_tokens=min(rng.randrange(1, 20), room), seed=rng.randrange(5)
            ),
            eos_token_ids=rng.choice([[], [0, 1]]),
            priority=rng.randrange(2),
            arrival_ns=self.world.clock.now_ns(),
        )

    def truth(self, request: Request, index: int) -> list[int]:
        sampling = request.sampling
        out = toy_output(request.prompt_token_ids, sampling.max_tokens, sampling.seed or 0, index)
        ends = [i for i, token in enumerate(out) if token in request.eos_token_ids]
        return out[: ends[0] + 1] if ends else out

    # ------------------------------------------------------------ faults
    async def disturb(self) -> None:
        rng = self.rng
        for _ in range(rng.randrange(1, 6)):
            await asyncio.sleep(rng.random() * rng.choice([0.1, 1]))
            if live := [group for group in self.groups if group.alive]:
                group = rng.choice(live)
                if rng.random() < 0.5:
                    self.kill(group)
                else:
                    group.stop_for(rng.choice([0.3, 1.5, 5]))

    def kill(self, group: RealGroup) -> None:
        """Its open calls fail; soon after, in this order or at once, the coordinator hears of it. Then a successor."""
        group.die()
        loop = asyncio.get_running_loop()
        heard_s = self.rng.choice([0.001, 0.015, 0.2])

        def noticed() -> None:
            for call in group.calls:
                if not call.done():
                    call.set_exception(GroupDied(f"{group.peer} died"))
            loop.call_later(
                self.rng.choice([0.0, 0.001]), self.world.coordinator.on_group_down, group.peer, "killed by the test"
            )

        def successor() -> None:
            self.add(RealGroup(self, group.peer.group, group.role, group.num_blocks, group.scheduler))

        loop.call_later(heard_s, noticed)
        loop.call_later(heard_s + self.rng.choice([0.01, 0.5]), successor)

    def carry(self, source: RealGroup, send: Send, payload: list[list[int]]) -> None:
        """One message on its link, in order."""
        loop, key = asyncio.get_running_loop(), (source.peer, send.destination)
        at = max(loop.time() + self.rng.choice([0.001, 0.01, 0.05]), self.links.get(key, 0.0) + 1e-6)
        self.links[key] = at
        name, lost = (send.transfer_id, send.attempt, send.seq), self.rng.random() < self.loss
        target = next((g for g in self.groups if g.peer == send.destination and g.alive), None)

        def stage() -> None:
            assert target is not None
            target.runner.staged[name] = payload
            target.engine.report(
                Received(*name, source.peer, 0, 0, send.hashes, send.destination_block_ids, len(payload))
            )

        def arrive() -> None:
            failed = lost or target is None or not target.alive
            source.tell(lambda: source.engine.report(Sent(*name, 0, "cut" if failed else None)))
            if target is not None:
                target.tell(stage if not lost else lambda: target.engine.report(LinkDown(source.peer, 0, "cut")))

        loop.call_at(at, arrive)

    # ------------------------------------------------------------ the end
    async def check_rest(self) -> None:
        assert self.failures == []
        coordinator = self.world.coordinator
        coordinator.check_invariants()
        assert coordinator.in_flight == 0
        held = {group.peer: await group.audit(1.0) for group in self.groups if group.alive}
        assert coordinator.audit(held) == []
        for group in self.groups:
            if group.alive:
                engine = group.engine
                assert engine.pool.num_leased == 0
                assert not engine.has_work()
                assert engine._adopters == {}
                assert engine._senders == {}


@pytest.mark.parametrize("tens", range(8))
def test_lives_of_clusters(toy: SimpleNamespace, tens: int) -> None:
    for seed in range(10 * tens, 10 * tens + 10):
        toy.run(Case(toy, seed).run())
