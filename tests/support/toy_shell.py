"""A rank and an engine without a model: the next token is a function of those before it. For tests of the shell."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from kvferry.cluster.messages import GroupInfo, Load
from kvferry.runtime.errors import CorruptModel, NoFreeBlocks
from kvferry.runtime.ids import BlockHash, Epoch, GroupId, Peer, RequestId, SequenceKey
from kvferry.runtime.kv.groups import KVGroups, one_group
from kvferry.runtime.kv.hashing import hash_chain, hash_root
from kvferry.runtime.kv.layout import KVLayout
from kvferry.runtime.reports import StepOutput
from kvferry.runtime.request import FinishReason, SamplingParams, SequenceRequest, TokenEvent
from kvferry.runtime.step import Row, SampledToken, StepPlan, StepResult
from kvferry.runtime.transfer.ticket import (
    ExpectRequest,
    GroupAddress,
    RankAddress,
    Ticket,
    TicketBlock,
    TransferEvent,
    TransferState,
)

BLOCK_SIZE = 4
STEP_S = 0.002
"""A step that takes no time at all would drown its readers in frames."""
LAYOUT = KVLayout(num_layers=1, num_kv_heads=2, head_dim=2, block_size=BLOCK_SIZE, dtype="float32")
ROOT = hash_root({"model": "toy"})


def next_token(token_ids: list[int], seed: int = 0) -> int:
    return (sum(token_ids) * 31 + len(token_ids) * 7 + seed) % 97


class ToyRank:
    """Executes a plan by looking at it."""

    def __init__(self, model: str, config: Any, *, rank: int, host: str, on_progress: Any = None, **_: Any) -> None:
        self.rank = rank
        self.kv, self.dtype = one_group(LAYOUT, 64), LAYOUT.dtype
        self.hash_root = ROOT
        self.proposer = None
        self.max_context = 256
        self.address = RankAddress(host=host, store_port=0, machine="toy")
        if on_progress:
            on_progress(1, 2)

    def attach(self, own: GroupAddress, report: Any) -> None:
        self.own, self.report = own, report

    def execute(self, plan: StepPlan, samples: list[Any]) -> StepResult:
        if any(99_999 in row.token_ids for row in plan.rows) and self.rank == 0:
            os._exit(3)
        return StepResult([SampledToken(next_token(row.token_ids)) for row in plan.rows if row.num_samples])

    def rest(self) -> None: ...

    def close(self) -> None: ...


class CorruptRank(ToyRank):
    """Cannot be loaded."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise CorruptModel("toy weights are cut off at byte 7")


class DyingRank(ToyRank):
    """Dies while it loads, as one does that runs out of memory."""

    def __init__(self, *_: Any, **__: Any) -> None:
        os._exit(9)


class ToyEngine:
    """All sequences advance by one token a step; blocks of finished prompts stay 'cached'."""

    def __init__(
        self,
        config: Any,
        kv: KVGroups,
        root: bytes,
        address: GroupAddress,
        max_context: int,
        execute: Callable[[StepPlan, list[Any]], StepResult],
        proposer: Any = None,
    ) -> None:
        self.address, self.num_blocks, self.execute = address, kv.num_blocks, execute
        self.running: dict[SequenceKey, tuple[SequenceRequest, list[int]]] = {}
        self.cached: dict[BlockHash, None] = {}
        self.events = StepOutput([], [], [], [])
        self.inbound: dict[Any, int] = {}
        self.calls: list[tuple[Any, ...]] = []
        self.num_steps = 0
        self.deadline_ns: int | None = None

    def submit(self, request: SequenceRequest, now_ns: int) -> bool:
        if request.transfer_id is not None:
            self.inbound.pop(request.transfer_id, None)
        if request.key in self.running:
            return False
        self.running[request.key] = (request, list(request.output_token_ids))
        return True

    def cancel(self, key: SequenceKey) -> None:
        self.calls.append(("cancel", key))
        if self.running.pop(key, None) is not None:
            self.events.tokens.append(TokenEvent(key=key, position=0, token_id=None, finish_reason="cancelled"))

    def expect(self, request: ExpectRequest, now_ns: int) -> Ticket:
        hashes = hash_chain(ROOT, request.token_ids, BLOCK_SIZE)
        if len(hashes) > self.num_blocks:
            raise NoFreeBlocks(f"{len(hashes)} blocks wanted, {self.num_blocks} in all")
        missing = [TicketBlock(i, h, i) for i, h in enumerate(hashes) if h not in self.cached]
        self.inbound[request.transfer_id] = len(missing)
        return Ticket(
            transfer_id=request.transfer_id,
            attempt=request.attempt,
            destination=self.address,
            missing=missing,
            timeout_s=request.timeout_s,
        )

    def send(self, ticket: Ticket, now_ns: int) -> None:
        self.calls.append(("send", ticket.transfer_id))

    def end_transfer(self, transfer_id: Any, attempt: int, reason: str) -> None:
        self.calls.append(("end_transfer", transfer_id, attempt, reason))
        if self.inbound.pop(transfer_id, None) is not None:
            event = TransferEvent(transfer_id=transfer_id, attempt=attempt, state=TransferState.FAILED, reason=reason)
            self.events.transfers.append(event)

    def shorten_transfer(self, transfer_id: Any, attempt: int, lacking: list[Any]) -> None:
        self.calls.append(("shorten_transfer", transfer_id, attempt, lacking))

    def renew(self, ids: list[Any], timeout_s: float, now_ns: int) -> None:
        self.calls.append(("renew", tuple(ids), timeout_s))

    def peer_gone(self, peer: Peer) -> None:
        self.calls.append(("peer_gone", peer))

    def report(self, report: Any) -> None:
        self.calls.append(("report", report))

    def has_work(self) -> bool:
        return bool(self.running or self.events.tokens or self.events.transfers)

    def next_deadline_ns(self) -> int | None:
        return self.deadline_ns

    def step(self, now_ns: int, on_evicted: Any = None) -> StepOutput:
        self.num_steps += 1
        self.deadline_ns = None
        out, self.events = self.events, StepOutput([], [], [], [])
        keys = list(self.running)
        if keys:
            time.sleep(STEP_S)
        rows = [
            Row([*self.running[key][0].prompt_token_ids, *self.running[key][1]], 0, [], num_samples=1) for key in keys
        ]
        result = self.execute(StepPlan(step=self.num_steps, rows=rows), [])
        for key, sampled in zip(keys, result.sampled, strict=True):
            self._take(key, sampled.token_id, out)
        return out

    def _take(self, key: SequenceKey, token: int, out: StepOutput) -> None:
        request, tokens = self.running[key]
        tokens.append(token)
        limit = request.handoff_after or request.sampling.max_tokens
        over = len(tokens) >= min(limit, request.sampling.max_tokens)
        reason = None
        if over:
            del self.running[key]
            handed = len(tokens) < request.sampling.max_tokens
            reason = FinishReason.HANDOFF if handed else FinishReason.LENGTH
            for h in hash_chain(ROOT, request.prompt_token_ids, BLOCK_SIZE):
                if h not in self.cached:
                    self.cached[h] = None
                    out.stored.append(h)
        out.tokens.append(TokenEvent(key=key, position=len(tokens) - 1, token_id=token, finish_reason=reason))

    def load(self) -> Load:
        return Load(num_running=len(self.running), num_free_blocks=self.num_blocks)

    def audit(self) -> Any:
        return SimpleNamespace(
            broken=[],
            sequences=list(self.running),
            inbound=list(self.inbound),
            outbound=[],
            num_leased_blocks=0,
        )

    def cached_hashes(self) -> list[BlockHash]:
        return list(self.cached)


def key(request: str, index: int = 0, attempt: int = 1) -> SequenceKey:
    return SequenceKey(RequestId(request), index, attempt)


def sequence(request: str, prompt: list[int], max_tokens: int = 4, **fields: Any) -> SequenceRequest:
    sampling = SamplingParams(max_tokens=max_tokens, seed=0)
    return SequenceRequest(key=key(request), prompt_token_ids=prompt, sampling=sampling, eos_token_ids=[], **fields)


def peer(name: str = "toy-0", epoch: int = 1) -> Peer:
    return Peer(GroupId(name), Epoch(epoch))


def address(name: str = "toy-0", epoch: int = 1) -> GroupAddress:
    return GroupAddress(peer(name, epoch), 1, LAYOUT.fingerprint, [RankAddress("127.0.0.1", 0, "toy")])


def engine(num_blocks: int = 64) -> ToyEngine:
    return ToyEngine(
        None, one_group(LAYOUT, num_blocks), ROOT, address(), 256, ToyRank("toy", None, rank=0, host="").execute
    )


def info(name: str = "toy-0", epoch: int = 1, role: str = "mixed") -> GroupInfo:
    return GroupInfo(
        address=address(name, epoch),
        role=role,
        hash_root=ROOT,
        block_size=BLOCK_SIZE,
        block_bytes=LAYOUT.block_bytes,
        num_blocks=64,
        max_context=256,
        max_sequences=64,
        max_batch_tokens=512,
        model="toy",
        dtype="float32",
        pids=[os.getpid()],
    )
