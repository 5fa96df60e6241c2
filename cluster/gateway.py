"""The process that clients talk to: validates, tokenises, hands requests to the coordinator, turns tokens into text.

    api ──▶ Gateway.generate ──▶ Coordinator ──▶ RemoteGroup (peer stream) ──▶ groups
    groups' frames ──▶ on_frame ──▶ Registry · PrefixIndex · Coordinator (which tells the Router)

Implements `service.Service` for the doors and `supervisor.Observer` for the groups' lives. Imports no torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Protocol

import msgspec
import structlog

from kvferry.cluster import messages as m
from kvferry.cluster.answers import Answer
from kvferry.cluster.budgets import CoordinatorConfig
from kvferry.cluster.config import GroupSpec, Role, ServeConfig
from kvferry.cluster.coordinator import Coordinator
from kvferry.cluster.intake import Intake
from kvferry.cluster.peer_stream import RemoteGroup
from kvferry.cluster.prefix_index import PrefixIndex
from kvferry.cluster.registry import GroupState, Registry, RegistryConfig
from kvferry.cluster.router import Router, RouterConfig
from kvferry.cluster.service import (
    ChatMessage,
    ClusterView,
    Completed,
    GenerateCall,
    GroupView,
    ModelView,
    Operation,
    OperationView,
    Started,
    StreamEvent,
)
from kvferry.cluster.stream import RequestStream
from kvferry.cluster.telemetry import Metrics
from kvferry.runtime.errors import Cancelled, DeadlineExceeded, GroupUnavailable, InvalidArgument, KvferryError
from kvferry.runtime.ids import Epoch, GroupId, Peer
from kvferry.runtime.model.spec import ModelSpec
from kvferry.runtime.request import Request, check_length, check_token_ids
from kvferry.runtime.text.tokenizer import Tokenizer

AUDIT_TIMEOUT_S = 5.0
AUDIT_TRIES = 4
AUDIT_PAUSE_S = 0.3
_EMPTY = ("dead", "drained")
LONG_PROMPT_CHARS = 20_000
"""Longer prompts are tokenised in another thread, so that other requests' tokens go on meanwhile."""

_log = structlog.get_logger(__name__)


class WallClock:
    """Implements `ports.Clock`."""

    def now_ns(self) -> int:
        return time.time_ns()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class Operator(Protocol):
    """Changes the deployment: `operations.Operations`."""

    async def run(self, operation: Operation) -> OperationView: ...


class _Place:
    """An incarnation of a group, or the last one that was there, and how it fares."""

    def __init__(self, spec: GroupSpec, epoch: Epoch) -> None:
        self.spec = spec
        self.epoch = epoch
        self.state = "starting"
        self.share = 0.0


class Gateway:
    """Use as an async context manager; all calls on its event loop."""

    def __init__(self, config: ServeConfig, name: str, spec: ModelSpec) -> None:
        self._config = config
        self._name = name
        self._spec = spec
        self._tokenizer: Tokenizer | None = None
        self._num_reading = 0
        self._clock = WallClock()
        self._index = PrefixIndex()
        self.registry = Registry(RegistryConfig())
        self.coordinator = Coordinator(
            self.registry,
            Router(RouterConfig(disaggregate=config.disaggregate, fetch_prefix=config.fetch_prefix)),
            self._index,
            self._clock,
            CoordinatorConfig(
                gateway=secrets.token_hex(4),
                transfer_timeout_s=config.engine.transfer.timeout_s,
                max_in_flight=config.limits.max_requests,
                max_queue_s=config.limits.max_queue_s,
                priority_step_s=config.engine.scheduler.priority_step_s,
                max_bypass=config.engine.scheduler.max_bypass,
                max_unread_bytes=config.limits.max_unread_bytes,
                retry_budget=config.limits.retry_budget,
            ),
        )
        self.metrics = Metrics(self._loads, lambda: self.coordinator.num_waiting)
        self._places: dict[Peer, _Place] = {}
        self.operator: Operator | None = None
        self._tasks = asyncio.TaskGroup()
        self._intake = Intake(self.registry, self._index, self.coordinator, self._clock, self._tasks)
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Gateway:
        await self._stack.enter_async_context(self._tasks)
        await self._stack.enter_async_context(self.coordinator)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.__aexit__(kind, error, trace)

    def set_tokenizer(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    # ------------------------------------------------------------ Service
    async def generate(self, call: GenerateCall) -> AsyncIterator[StreamEvent]:
        outcome = "cancelled"
        with structlog.contextvars.bound_contextvars(request_id=call.request_id):
            try:
                request, stream = await self._start(call)
            except KvferryError as error:
                self.metrics.refused(error)
                raise
            self.metrics.begun()
            try:
                async with contextlib.aclosing(stream):
                    yield Started(request.request_id, request.prompt_token_ids)
                    answer = Answer(request, self._ready_tokenizer(), stream.stop)
                    async for event in stream:
                        for delta in answer.take([event, *stream.arrived()]):
                            yield delta
                    outcome = answer.finish_reason
                    usage = msgspec.structs.replace(stream.usage, num_output_tokens=answer.num_output_tokens)
                self.metrics.used(usage)
                yield Completed(usage, stream.timeline)
            except Cancelled:
                raise
            except KvferryError as error:
                outcome = error.label
                raise
            finally:
                self.metrics.ended(outcome, stream.timeline)

    async def _start(self, call: GenerateCall) -> tuple[Request, RequestStream]:
        """Prompts that are being tokenised count as in flight: they take memory and time as well."""
        self.coordinator.check_door(self._num_reading)
        self._num_reading += 1
        try:
            request = await self._request(call)
        finally:
            self._num_reading -= 1
        return request, self.coordinator.start(request)

    async def _request(self, call: GenerateCall) -> Request:
        """Raises `InvalidArgument` naming the field, `DeadlineExceeded`."""
        arrival_ns = self._clock.now_ns()
        sampling = call.sampling
        sampling.check_vocabulary(self._spec.vocab_size)
        token_ids = await self._prompt(call)
        max_context = self._max_context()
        check_length(len(token_ids), max_context)
        if call.timeout_s is not None and call.timeout_s <= 0:
            raise DeadlineExceeded(
                f"request {call.request_id}: its deadline had passed when it was read; allow more time"
            )
        if sampling.seed is None:
            sampling = sampling.with_seed(secrets.randbits(63))
        # Groups with larger pools would go on until none of the others could take the sequence over.
        max_tokens = min(sampling.max_tokens, max_context - len(token_ids))
        min_tokens = min(sampling.min_tokens, max_tokens)
        sampling = msgspec.structs.replace(sampling, max_tokens=max_tokens, min_tokens=min_tokens)
        return Request(
            request_id=call.request_id,
            prompt_token_ids=token_ids,
            sampling=sampling,
            eos_token_ids=self._eos_token_ids(),
            cache_salt=call.cache_salt if self._config.engine.cache.prefix_caching else f"\0{call.request_id}",
            priority=call.priority,
            arrival_ns=arrival_ns,
            deadline_ns=None if call.timeout_s is None else arrival_ns + int(call.timeout_s * 1e9),
            retry_budget=call.retry_budget,
        )

    async def _prompt(self, call: GenerateCall) -> list[int]:
        given = {"prompt": call.prompt, "messages": call.messages, "token_ids": call.token_ids}
        fields = [field for field, value in given.items() if value is not None]
        if len(fields) != 1:
            raise InvalidArgument(
                "prompt", fields, "exactly one of prompt, messages and token_ids must be set", "leave the others out"
            )
        if call.token_ids is not None:
            check_token_ids("token_ids", call.token_ids, self._spec.vocab_size)
            return call.token_ids
        if call.messages is not None:
            num_chars = sum(len(message.content) for message in call.messages)
            if num_chars > LONG_PROMPT_CHARS:
                return await asyncio.to_thread(self.tokenize_chat, call.messages)
            return self.tokenize_chat(call.messages)
        text = call.prompt or ""
        if len(text) > LONG_PROMPT_CHARS:
            return await asyncio.to_thread(self.tokenize, text, True)
        return self.tokenize(text, True)

    def tokenize(self, text: str, add_special_tokens: bool) -> list[int]:
        return self._ready_tokenizer().encode(text, add_special_tokens)

    def tokenize_chat(self, messages: list[ChatMessage]) -> list[int]:
        plain = [{"role": message.role, "content": message.content} for message in messages]
        return self._ready_tokenizer().render_chat(plain)

    def detokenize(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        check_token_ids("token_ids", token_ids, self._spec.vocab_size)
        return self._ready_tokenizer().decode(token_ids, skip_special_tokens)

    def model(self) -> ModelView:
        live = self.registry.members()
        wanted = self._config.engine.dtype
        return ModelView(
            model=self._name,
            dtype=live[0].info.dtype if live else self._spec.dtype if wanted == "auto" else wanted,
            vocab_size=self._spec.vocab_size,
            max_context=self._max_context(),
            block_size=self._config.engine.cache.block_size,
            eos_token_ids=self._eos_token_ids(),
            has_chat_template=self._ready_tokenizer().chat_template is not None,
        )

    async def cluster(self) -> ClusterView:
        return ClusterView(
            model=self._name,
            groups=[self._view(place) for place in self._places.values()],
            num_requests=self.coordinator.in_flight,
            num_finished=self.coordinator.num_finished,
            num_failed=self.coordinator.num_failed,
            num_resumed=self.coordinator.num_resumed,
        )

    def _view(self, place: _Place) -> GroupView:
        member = self.registry.get(Peer(place.spec.group, place.epoch))
        load = member.load if member else m.Load()
        state = place.state
        if member is not None:
            state = "draining" if member.draining else "live"
            state = state if member.state is GroupState.LIVE else "unreachable"
        return GroupView(
            group=place.spec.group,
            role=place.spec.role,
            state=state,
            epoch=place.epoch,
            tp_size=place.spec.tp_size,
            num_blocks=member.info.num_blocks if member else 0,
            num_free_blocks=load.num_free_blocks,
            num_leased_blocks=load.num_leased_blocks,
            num_waiting=load.num_waiting,
            num_running=load.num_running,
            hit_rate=load.cached_tokens_total / load.prompt_tokens_total if load.prompt_tokens_total else 0.0,
            prompt_tokens=load.prompt_tokens_total,
            cached_tokens=load.cached_tokens_total,
            output_tokens=load.output_tokens_total,
            received_bytes=load.received_bytes_total,
            drafted_tokens=load.drafted_tokens_total,
            accepted_tokens=load.accepted_tokens_total,
            num_preemptions=load.num_preemptions,
            pids=member.info.pids if member else [],
        )

    async def operate(self, operation: Operation) -> OperationView:
        if self.operator is None:
            raise GroupUnavailable("the deployment is still starting; try again in a moment")
        return await self.operator.run(operation)

    async def audit(self) -> list[str]:
        """What is found in every one of a few looks: messages on their way make single looks differ."""
        lasting = await self._audit_once()
        for _ in range(AUDIT_TRIES - 1):
            if not lasting:
                break
            await self._clock.sleep(AUDIT_PAUSE_S)
            now = set(await self._audit_once())
            lasting = [finding for finding in lasting if finding in now]
        return lasting

    async def _audit_once(self) -> list[str]:
        ports = [member.port for member in self.registry.members()]
        answers = await asyncio.gather(*(port.audit(AUDIT_TIMEOUT_S) for port in ports), return_exceptions=True)
        findings, held = [], {}
        for port, answer in zip(ports, answers, strict=True):
            if isinstance(answer, m.Audit):
                held[port.peer] = answer
            elif isinstance(answer, KvferryError):
                findings.append(f"{port.peer}: {answer}")
            else:
                raise answer
        try:
            self.coordinator.check_invariants()
        except AssertionError as error:
            findings.append(f"gateway: {error}")
        return findings + self.coordinator.audit(held)

    # ------------------------------------------------------------ Observer
    def group_starting(self, spec: GroupSpec, epoch: Epoch) -> None:
        for peer in [p for p, place in self._places.items() if p.group == spec.group and place.state in _EMPTY]:
            del self._places[peer]
        self._places[Peer(spec.group, epoch)] = _Place(spec, epoch)

    def group_progress(self, group: GroupId, share: float) -> None:
        """Of its newest incarnation."""
        self._places[max((peer for peer in self._places if peer.group == group), key=lambda p: p.epoch)].share = share

    def group_up(self, port: RemoteGroup) -> None:
        """Raises `IncompatiblePeer` when its blocks mean something else than the others'."""
        self.registry.up(port, self._clock.now_ns())
        self._places[port.peer].state = "live"

    def group_down(self, peer: Peer, reason: str) -> None:
        self._leave(peer, "dead")
        self.metrics.died(peer.group)
        self.coordinator.on_group_down(peer, reason)

    def group_ended(self, peer: Peer, out_of_service: bool) -> None:
        self._leave(peer, "drained" if out_of_service else None)
        self.coordinator.on_group_down(peer, "it was taken out of service")

    def set_role(self, peer: Peer, role: Role) -> None:
        place = self._places[peer]
        place.spec = msgspec.structs.replace(place.spec, role=role)
        self.registry.set_role(peer, role)

    def _leave(self, peer: Peer, state: str | None) -> None:
        """`None`, or with a successor: nothing is shown of it any more."""
        place = self._places.get(peer)
        if place is not None and state is not None and sum(p.group == peer.group for p in self._places) == 1:
            place.state = state
        else:
            self._places.pop(peer, None)

    def on_frame(self, port: RemoteGroup, frame: m.StepFrame) -> None:
        self._intake.on_frame(port, frame)

    # ------------------------------------------------------------ inside
    def loading(self) -> list[tuple[GroupId, float]]:
        """Groups that start, and how much of their weights is loaded."""
        return [(peer.group, place.share) for peer, place in self._places.items() if place.state == "starting"]

    def _loads(self) -> list[tuple[str, str, m.Load]]:
        members = self.registry.members()
        return [(member.peer.group, member.role, member.load) for member in members]

    def _max_context(self) -> int:
        """Of the model and the options; and a sequence must fit the smallest pool, or it could not move there."""
        wanted = self._config.engine.scheduler.max_context
        limits = [self._spec.max_context] + ([] if wanted is None else [wanted])
        limits += [member.info.max_context for member in self.registry.members()]
        return min(limits)

    def _eos_token_ids(self) -> list[int]:
        return self._spec.eos_token_ids or self._ready_tokenizer().eos_token_ids

    def _ready_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise GroupUnavailable("the tokenizer is still loading; try again in a moment")
        return self._tokenizer
