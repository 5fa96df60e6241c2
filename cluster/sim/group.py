"""A simulated group: the production's engine, driver and hub in one process; its ranks' work takes virtual time."""

from __future__ import annotations

import asyncio
import math
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from kvferry.cluster import messages as m
from kvferry.cluster.engine_driver import EngineDriver, GatewayClosed, Output
from kvferry.cluster.hub import Hub
from kvferry.cluster.sim.links import Find, LinkNoise, Links
from kvferry.cluster.sim.loop import SkewedClock
from kvferry.cluster.sim.model import NUM_HEADS, ROOT, Blocks, Guesses, layout
from kvferry.cluster.sim.network import Network, Process
from kvferry.cluster.sim.trace import Trace
from kvferry.runtime.config import CacheConfig, EngineConfig, SchedulerConfig, SpeculationConfig, TransferConfig
from kvferry.runtime.engine import Engine
from kvferry.runtime.ids import Peer, RequestId
from kvferry.runtime.kv.groups import KVGroups, one_group, two_groups
from kvferry.runtime.scheduler import Batch, Scheduler
from kvferry.runtime.sequence import Sequence
from kvferry.runtime.step import SampledToken, SampleInput, StepPlan, StepResult
from kvferry.runtime.transfer.ticket import GroupAddress, LinkReport, RankAddress, TransferState

MAX_IDLE_STEPS = 300
"""Steps in a row without a row, an import or a message in between: more is spinning."""
SECRET = "simulated"


class GroupShape(msgspec.Struct, frozen=True, kw_only=True):
    """What a group is made of; its successors are alike."""

    tp_size: int
    num_blocks: int
    max_batch_tokens: int
    max_sequences: int
    max_waiting: int
    step_s: float
    """A step without tokens."""
    token_s: float
    """What each token adds."""
    speculation: int = 0
    """Tokens drafted at most for a sequence in a step; 0: no speculation."""
    window: int | None = None
    """Of all layers, or with `num_window_blocks` of some."""
    num_window_blocks: int | None = None
    """Of the block group of layers with a window; `num_blocks` are those of the others then."""

    def kv(self) -> KVGroups:
        size = layout(self.tp_size)
        if self.window is None or self.num_window_blocks is None:
            return one_group(size, self.num_blocks, self.window)
        return two_groups(size, size, self.window, (False, True), (self.num_blocks, self.num_window_blocks))


class SimGroup:
    """One incarnation. Implements `hub.Inbox` and `links.Host`; `slow`: by how much its steps take longer."""

    def __init__(
        self,
        peer: Peer,
        role: str,
        shape: GroupShape,
        *,
        network: Network,
        find: Find,
        noise: LinkNoise,
        transfer_timeout_s: float,
        skew_ns: int,
        trace: Trace,
        seed: str,
    ) -> None:
        self.process = Process(str(peer), skew_ns)
        self.role = role
        self.shape = shape
        self.slow = 1.0
        self._in_slow_step = False
        self.num_lapsed = 0
        """Leases."""
        self.computed_from: dict[RequestId, int] = {}
        """The first position that any row of a request has computed here."""
        self._loop = asyncio.get_running_loop()
        self._trace = trace
        self._clock = SkewedClock(skew_ns)
        self._spent_ns = 0
        """Of the step that is being executed."""
        self._inbox: deque[tuple[str, Any]] = deque()
        self._timer: asyncio.TimerHandle | asyncio.Handle | None = None
        self._busy = False
        self._num_idle_steps = 0
        self.kv = shape.kv()
        self.layout = self.kv.main.layout
        self.blocks = Blocks(self.kv)
        ranks = [RankAddress("simulated", rank, "simulated") for rank in range(shape.tp_size)]
        address = GroupAddress(peer, shape.tp_size, self.kv.fingerprint, ranks)
        self._peer = peer
        scheduler = SchedulerConfig(
            max_batch_tokens=shape.max_batch_tokens, max_sequences=shape.max_sequences, max_waiting=shape.max_waiting
        )
        config = EngineConfig(
            cache=CacheConfig(block_size=self.layout.block_size, num_blocks=shape.num_blocks),
            scheduler=scheduler,
            transfer=TransferConfig(transport="local", blocks_per_message=2, timeout_s=transfer_timeout_s),
            speculation=SpeculationConfig(
                method="ngram" if shape.speculation else "none", max_tokens=max(1, shape.speculation)
            ),
        )
        guesses = Guesses(self.kv)
        self.engine = Engine(config, self.kv, ROOT, address, 1 << 20, self._execute, self.clock_ns, guesses)
        self.engine.scheduler.commit = self._commit  # type: ignore[method-assign]  # who computes what
        self.links = Links(self, find, noise, transfer_timeout_s, trace, random.Random(f"{seed}/links {peer}"))
        self.hub = Hub(self._info(address, scheduler), SECRET)
        self.hub.bind(self)
        self._driver = EngineDriver(self.engine, self._reply, self.hub.output, self.clock_ns)
        self._heartbeat = self._loop.create_task(self.hub.heartbeat(), name=f"heartbeat {peer}")
        self.process.on_end(self._end)
        network.listen(self.target, self.process, self.hub)

    def _info(self, address: GroupAddress, scheduler: SchedulerConfig) -> m.GroupInfo:
        return m.GroupInfo(
            address=address,
            role=self.role,
            hash_root=ROOT,
            block_size=self.layout.block_size,
            block_bytes=self.layout.block_bytes * NUM_HEADS,
            num_blocks=self.shape.num_blocks,
            max_context=self.engine.max_context,
            window=self.kv.main.window,
            beside=m.blocks_beside(self.kv),
            max_sequences=scheduler.max_sequences,
            max_batch_tokens=scheduler.max_batch_tokens,
            model="toy",
            dtype="float32",
            pids=[],
        )

    @property
    def peer(self) -> Peer:
        return self._peer

    @property
    def target(self) -> str:
        return str(self._peer)

    def owners(self) -> list[str]:
        """The gateway of each sequence that one waits for."""
        return self._driver.owners()

    @property
    def num_connections(self) -> int:
        """Gateways' streams."""
        return self.hub.num_connections

    def clock_ns(self) -> int:
        return self._clock.now_ns() + self._spent_ns

    # ------------------------------------------------------------ hub.Inbox, links.Host
    def post(self, gateway: str, message: m.ToGroup | GatewayClosed, timeout_s: float = 0.0) -> bool:
        del timeout_s  # there is room
        self.process.do(lambda: self._put(gateway, message))
        return True

    def report(self, report: LinkReport) -> None:
        self.process.do(lambda: self._put("", report))

    def silent_s(self) -> float:
        return math.inf if self.process.stopped else 0.0

    def _put(self, gateway: str, message: Any) -> None:
        self._inbox.append((gateway, message))
        if not self._busy:
            self._wake_at(self._loop.time())

    def _reply(self, gateway: str, reply: m.Reply | m.Audit | m.KvSnapshot) -> None:
        if isinstance(reply, m.Reply) and reply.error_label == "no_free_blocks":
            self._trace.fault("no room for a transfer", self._peer)
        self.hub.reply(gateway, reply)

    # ------------------------------------------------------------ turns
    def _wake_at(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(when, self.process.do, self._turn)

    def _turn(self) -> None:
        """What `EngineLoop` does in its thread; an exception ends the process, and here the run has failed as well."""
        try:
            self._take_turn()
        except Exception as error:  # noqa: BLE001  whatever it is, the process ends
            self._trace.failed(f"{self._peer}: its engine failed: {type(error).__name__}: {error}")
            self.process.end()

    def _take_turn(self) -> None:
        self._timer = None
        if self._busy:
            return
        if self._inbox:
            self._num_idle_steps = 0
        while self._inbox:
            self._driver.handle(*self._inbox.popleft())
        now_ns = self.clock_ns()
        if self._driver.due(now_ns):
            self._busy = True
            output = self._driver.step(now_ns)
            took_s, self._spent_ns = self._spent_ns / 1e9, 0
            self._loop.call_later(took_s, self.process.do, self._stepped(output))
        elif (wait_s := self._driver.wait_s(now_ns, math.inf)) < math.inf:
            self._wake_at(self._loop.time() + wait_s + 1e-6)
        self._poison_free()

    def _stepped(self, output: Output) -> Callable[[], None]:
        def done() -> None:
            self._trace.note("step", self._peer, self.slow)
            self._busy = self._in_slow_step = False
            for transfer in output.transfers:
                if transfer.state is TransferState.EXPIRED:
                    self.num_lapsed += 1
                    self._trace.fault("lease lapsed", self._peer, transfer.transfer_id)
                elif transfer.state is TransferState.FAILED:
                    self._trace.fault("transfer failed", self._peer, transfer.transfer_id, transfer.reason)
                elif transfer.state is TransferState.ACTIVE:
                    self._trace.fault("transfer shortened", self._peer, transfer.transfer_id, len(transfer.lacking))
            self.hub.output(output)
            self._turn()

        return done

    def _execute(self, plan: StepPlan, samples: list[SampleInput]) -> StepResult:
        if plan.rows or plan.imports or plan.sends or plan.opens or plan.closes:
            self._num_idle_steps = 0
        self._num_idle_steps += 1
        if self._num_idle_steps > MAX_IDLE_STEPS:
            raise AssertionError(f"{self._num_idle_steps} steps in a row did nothing")
        self.links.begin(plan)
        sampled = self.blocks.compute(plan.rows, samples)
        self._spent_ns = int((self.shape.step_s + plan.num_tokens * self.shape.token_s) * self.slow * 1e9)
        self._in_slow_step = self.slow > 1
        if self.slow > 1 and plan.rows:
            self._trace.fault("slow step", self._peer)
        return StepResult(sampled)

    def _commit(self, batch: Batch, sampled: list[SampledToken]) -> list[tuple[Sequence, list[SampledToken]]]:
        for sequence, row in zip(batch.sequences, batch.rows, strict=True):
            name = sequence.key.request_id
            self.computed_from[name] = min(row.start, self.computed_from.get(name, row.start))
        return Scheduler.commit(self.engine.scheduler, batch, sampled)

    def _poison_free(self) -> None:
        self.blocks.poison(self.engine.pools.free_blocks())

    @property
    def attentive(self) -> bool:
        """Whether it takes messages soon: a step that was slow from its beginning goes on when the fault is over."""
        return not self.process.stopped and self.slow == 1 and not self._in_slow_step

    # ------------------------------------------------------------ its life
    def go_on(self) -> None:
        self.process.go_on()
        if not self._busy:
            self._wake_at(self._loop.time())

    def _end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._heartbeat.cancel()
        if self.engine.scheduler.num_preemptions:
            self._trace.observed["preemption"] += self.engine.scheduler.num_preemptions
        if drafted := self.engine.meters.drafted_tokens:
            self._trace.observed["draft accepted"] += self.engine.meters.accepted_tokens
            self._trace.observed["draft rejected"] += drafted - self.engine.meters.accepted_tokens
