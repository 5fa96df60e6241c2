"""Whole groups in one process: an engine over real ranks (threads) with links to other groups, stepped by hand."""

from __future__ import annotations

import queue
import time
from concurrent.futures import ThreadPoolExecutor

from kvferry.runtime.config import CacheConfig, EngineConfig, SchedulerConfig, TransferConfig
from kvferry.runtime.engine import Engine
from kvferry.runtime.ids import Epoch, GroupId, Peer, RequestId, SequenceKey, TransferId
from kvferry.runtime.kv.hashing import hash_root
from kvferry.runtime.model.parallel import LocalGroup, LocalParallel
from kvferry.runtime.request import SamplingParams, SequenceRequest
from kvferry.runtime.step import SampleInput, StepPlan, StepResult
from kvferry.runtime.transfer.factory import make_transport
from kvferry.runtime.transfer.links import Links
from kvferry.runtime.transfer.ticket import (
    ExpectRequest,
    GroupAddress,
    LinkReport,
    Received,
    Ticket,
    TransferEvent,
    TransferState,
)
from tests.support.golden import BLOCK, Sequences

NUM_BLOCKS, DEADLINE_S = 200, 60.0


class GoldenGroup:
    """The ranks of one tensor-parallel group of a golden model. `close` ends its threads."""

    def __init__(self, name: str, model: str, tp_size: int) -> None:
        self._pool = ThreadPoolExecutor(tp_size)
        parallel = LocalGroup(tp_size, timeout_s=DEADLINE_S)
        self.ranks = [
            Sequences(model, LocalParallel(rank, parallel) if tp_size > 1 else None, NUM_BLOCKS)
            for rank in range(tp_size)
        ]
        self.kv = self.ranks[0].storage.kv
        self.layout = self.kv.main.layout
        transfer = TransferConfig(transport="local", blocks_per_message=2)
        self._reports: queue.Queue[LinkReport] = queue.Queue()
        self.num_received_bytes = [0] * tp_size
        peer = Peer(GroupId(name), Epoch(1))
        self._links = [
            Links(
                make_transport("local", "127.0.0.1"),
                self.kv,
                number,
                peer,
                [group.blocks for group in rank.storage.groups],
                transfer,
                self._reports.put,
            )
            for number, rank in enumerate(self.ranks)
        ]
        addresses = [links.address() for links in self._links]
        self.address = GroupAddress(peer, tp_size, self.kv.fingerprint, addresses)
        config = EngineConfig(
            cache=CacheConfig(block_size=BLOCK, num_blocks=NUM_BLOCKS),
            scheduler=SchedulerConfig(max_batch_tokens=16),
            transfer=transfer,
        )
        root = hash_root(self.kv.content_fields)
        self.engine = Engine(config, self.kv, root, self.address, 512, self._execute)
        self.tokens: dict[str, list[int]] = {}
        self.ended: dict[str, str] = {}
        self.transfers: list[TransferEvent] = []

    def submit(self, name: str, attempt: int, prompt: list[int], num_tokens: int, **leg: object) -> None:
        greedy = SamplingParams(temperature=0.0, max_tokens=num_tokens, seed=0, ignore_eos=True)
        request = SequenceRequest(
            key=SequenceKey(RequestId(name), 0, attempt),
            prompt_token_ids=prompt,
            sampling=greedy,
            eos_token_ids=[],
            priority=0,
            arrival_ns=0,
            **leg,  # type: ignore[arg-type]
        )
        self.engine.submit(request, time.time_ns())

    def expect(self, name: str, source: GroupAddress, prompt: list[int], sealed_only: bool = False) -> Ticket:
        request = ExpectRequest(
            transfer_id=TransferId(name),
            attempt=1,
            source=source,
            token_ids=prompt,
            cache_salt="",
            timeout_s=DEADLINE_S,
            sealed_only=sealed_only,
        )
        return self.engine.expect(request, time.time_ns())

    def evict(self, count: int) -> None:
        """The `count` blocks of the main group that nobody holds and that go first."""
        pool = self.engine.pool
        for block_id in pool.lease(len(pool.free_blocks()) + count):
            pool.release(block_id)

    def _execute(self, plan: StepPlan, samples: list[SampleInput]) -> StepResult:
        def one(rank: int) -> StepResult:
            self._links[rank].begin(plan)
            return self.ranks[rank].runner.execute(plan, samples if rank == 0 else [])

        first, *_ = self._pool.map(one, range(len(self.ranks)))
        return first

    def step(self) -> None:
        while not self._reports.empty():
            report = self._reports.get_nowait()
            if isinstance(report, Received):
                self.num_received_bytes[report.rank] += report.num_bytes
            self.engine.report(report)
        output = self.engine.step(time.time_ns())
        self.transfers += output.transfers
        for event in output.tokens:
            assert event.error_label is None, event.error_message
            name = event.key.request_id
            if event.token_id is not None:
                self.tokens.setdefault(name, []).append(event.token_id)
            if event.finish_reason is not None:
                self.ended[name] = event.finish_reason.value

    def close(self) -> None:
        for links in self._links:
            links.close()
        for rank in self.ranks:
            rank.runner._parallel.close()
        self._pool.shutdown()


def ferry(source: GoldenGroup, destination: GoldenGroup, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """What a coordinator does: prefill and the first token at the source, all others at the destination."""

    names = {f"r{i}": prompt for i, prompt in enumerate(prompts)}
    for name, prompt in names.items():
        source.submit(name, 1, prompt, num_tokens, handoff_after=1, sends_transfer_id=TransferId(name))
        source.engine.send(destination.expect(name, source.address, prompt), time.time_ns())
    handed: set[str] = set()
    until = time.monotonic() + DEADLINE_S
    while len(destination.ended) < len(names):
        assert time.monotonic() < until, f"only {destination.ended} ended"
        source.step()
        for name in source.ended.keys() - handed:
            handed.add(name)
            leg = {"output_token_ids": list(source.tokens[name]), "transfer_id": TransferId(name)}
            destination.submit(name, 2, names[name], num_tokens, **leg)
        destination.step()
    return [source.tokens[name] + destination.tokens[name] for name in names]


def fetch(
    source: GoldenGroup, destination: GoldenGroup, prompt: list[int], num_lost: int, num_tokens: int
) -> list[int]:
    """What a coordinator does: the destination gets what the source has left of a prompt, and computes the rest."""
    until = time.monotonic() + DEADLINE_S
    source.submit("before", 1, prompt, 1)
    while "before" not in source.ended:
        assert time.monotonic() < until
        source.step()
    source.evict(num_lost)
    usable = prompt[: (len(prompt) - 1) // BLOCK * BLOCK]
    ticket = destination.expect("r", source.address, usable, sealed_only=True)
    destination.submit("r", 1, prompt, num_tokens, transfer_id=TransferId("r"))
    source.engine.send(ticket, time.time_ns())
    while "r" not in destination.ended:
        assert time.monotonic() < until, "the rest is not computed"
        source.step()
        for event in source.transfers:
            if event.state is TransferState.ACTIVE:
                destination.engine.shorten_transfer(event.transfer_id, event.attempt, event.lacking)
            else:
                destination.engine.end_transfer(event.transfer_id, event.attempt, event.reason)
        source.transfers.clear()
        destination.step()
    return destination.tokens["r"]
