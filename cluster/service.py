"""What the gateway offers to the doors that clients knock at (`api/`). No wire types, no gRPC."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

import msgspec

from kvferry.runtime.ids import RequestId
from kvferry.runtime.request import Logprob, SamplingParams, Usage
from kvferry.runtime.timeline import Timeline


class ChatMessage(msgspec.Struct, frozen=True):
    role: str
    content: str


class GenerateCall(msgspec.Struct, frozen=True, kw_only=True):
    """One request as it came in: exactly one of `prompt`, `messages`, `token_ids` is set."""

    request_id: RequestId
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    token_ids: list[int] | None = None
    sampling: SamplingParams
    priority: int = 0
    cache_salt: str = ""
    timeout_s: float | None = None
    """From now, 0 or less when it has passed on the way; `None`: no deadline but the server's own."""
    retry_budget: int | None = None
    """How often a sequence may begin anew elsewhere; `None`: as often as the server allows, which is the most."""


class Started(msgspec.Struct, frozen=True):
    """First event of a stream."""

    request_id: RequestId
    prompt_token_ids: list[int]


class Delta(msgspec.Struct, frozen=True):
    """News of one sequence. Text may lag behind tokens (half a character, half a stop string) and never leads."""

    index: int
    token_ids: list[int]
    text: str
    logprobs: list[Logprob] | None = None
    finish_reason: str | None = None
    """Set on the sequence's last delta."""


class Completed(msgspec.Struct, frozen=True):
    """Last event of a stream."""

    usage: Usage
    timeline: Timeline


StreamEvent = Started | Delta | Completed


class GroupView(msgspec.Struct, frozen=True, kw_only=True):
    """One group for a person to look at."""

    group: str
    role: str
    state: str
    """starting, live, draining, unreachable, dead, drained."""
    epoch: int
    tp_size: int
    num_blocks: int
    num_free_blocks: int
    num_leased_blocks: int
    num_waiting: int
    num_running: int
    hit_rate: float
    """Cached share of all prompt tokens so far."""
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    received_bytes: int
    num_preemptions: int
    pids: list[int]
    drafted_tokens: int = 0
    """Guessed by speculation; `accepted_tokens` of them came true."""
    accepted_tokens: int = 0


class ClusterView(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    groups: list[GroupView]
    num_requests: int
    """In flight at this gateway."""
    num_finished: int
    num_failed: int
    num_resumed: int
    """Requests that outlived a death of a group."""


class Drain(msgspec.Struct, frozen=True, kw_only=True):
    """Takes a group out of service and ends its processes; `Scale` or `Restart` brings it back."""

    group: str
    timeout_s: float
    """For its sequences to leave without a pause; after it they are cut off and computed again elsewhere."""


class Scale(msgspec.Struct, frozen=True, kw_only=True):
    """Adds groups, or drains and removes the newest, until there are so many of each role; `None`: as many as now."""

    prefill: int | None = None
    decode: int | None = None
    mixed: int | None = None
    timeout_s: float


class SetRole(msgspec.Struct, frozen=True, kw_only=True):
    """Changes what the router sends to a group. What runs there goes on."""

    group: str
    role: str


class Restart(msgspec.Struct, frozen=True, kw_only=True):
    """Replaces all groups, one after another; each successor starts first, where it has room beside the old one."""

    timeout_s: float


Operation = Drain | Scale | SetRole | Restart


class OperationView(msgspec.Struct, frozen=True, kw_only=True):
    """What an operation did. Sequences that ended by themselves meanwhile are not counted."""

    seconds: float
    started: list[str]
    """Groups, as `decode-1@7`: name and epoch."""
    ended: list[str]
    num_moved: int
    """Sequences that another group took over while they ran."""
    num_rerouted: int
    """Had not begun: they begin elsewhere."""
    num_resumed: int
    """Cut off when the time was up, and computed again elsewhere."""


class ModelView(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    dtype: str
    vocab_size: int
    max_context: int
    block_size: int
    eos_token_ids: list[int]
    has_chat_template: bool


class Service(Protocol):
    """Raises only errors of `runtime/errors.py`."""

    def generate(self, call: GenerateCall) -> AsyncIterator[StreamEvent]:
        """An async generator. Closing it cancels the request. Invalid input raises before the first event."""

    # Those three are called from other threads, too.
    def tokenize(self, text: str, add_special_tokens: bool) -> list[int]: ...

    def tokenize_chat(self, messages: list[ChatMessage]) -> list[int]: ...

    def detokenize(self, token_ids: list[int], skip_special_tokens: bool) -> str: ...

    def model(self) -> ModelView: ...

    async def cluster(self) -> ClusterView: ...

    async def operate(self, operation: Operation) -> OperationView:
        """One at a time; `QueueFull` while another one runs. It goes on when its caller leaves. Idempotent."""

    async def audit(self) -> list[str]:
        """Findings in words; empty when all ledgers and pools agree and nothing is held without a reason."""
