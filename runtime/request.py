"""What a caller asks for and gets back. Plain values; validated once, here, and never re-checked later."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, get_type_hints

import msgspec

from kvferry.runtime.errors import InvalidArgument
from kvferry.runtime.ids import RequestId, SequenceKey, TransferId

MAX_SEQUENCES = 128
MAX_LOGPROBS = 64
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
SEED_BITS = 64


class FinishReason(StrEnum):
    STOP = "stop"
    """An end-of-sequence token, a stop token id or a stop string."""
    LENGTH = "length"
    """`max_tokens` or the model's context length was reached."""
    CANCELLED = "cancelled"
    HANDOFF = "handoff"
    """Inside the cluster only: the prefill leg is over, another group goes on."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to continue a prompt. Names and meanings as users of vLLM's and OpenAI's APIs know them.

    Raises `InvalidArgument` on construction for a value outside its range. `temperature=0` is greedy. `top_k=0` is
    off. Penalties: `repetition_penalty` counts prompt and output tokens, the other two output tokens only.
    A request without `seed` gets one where it enters the system.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    stop: list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    max_tokens: int = 16
    min_tokens: int = 0
    logprobs: int | None = None
    """`None`: none. `k`: the sampled token's log-probability and the `k` most likely alternatives."""
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        for field, kind in _SAMPLING_TYPES.items():  # msgspec itself checks what it decodes, not what a caller passes
            try:
                msgspec.convert(getattr(self, field), kind)
            except msgspec.ValidationError as error:
                raise InvalidArgument(field, getattr(self, field), str(error)) from None
        _number("n", self.n, 1, MAX_SEQUENCES)
        _number("temperature", self.temperature, 0.0, 100.0)
        if not 0.0 < self.top_p <= 1.0:
            raise InvalidArgument("top_p", self.top_p, "must be in (0, 1]", "use 1.0 to switch it off")
        _number("top_k", self.top_k, 0, 1 << 31)
        _number("min_p", self.min_p, 0.0, 1.0)
        if not 0.0 < self.repetition_penalty <= 100.0:
            raise InvalidArgument("repetition_penalty", self.repetition_penalty, "must be in (0, 100]", "1.0 is off")
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        for token, bias in self.logit_bias.items():
            _number(f"logit_bias[{token}]", bias, -100.0, 100.0)
        if self.seed is not None:
            _number("seed", self.seed, 0, (1 << SEED_BITS) - 1)
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidArgument("stop", self.stop, f"at most {MAX_STOP_STRINGS} stop strings")
        for i, text in enumerate(self.stop):
            if not 1 <= len(text) <= MAX_STOP_STRING_CHARS:
                raise InvalidArgument(f"stop[{i}]", text, f"must have 1 to {MAX_STOP_STRING_CHARS} characters")
        _number("max_tokens", self.max_tokens, 1, 1 << 31)
        _number("min_tokens", self.min_tokens, 0, self.max_tokens)
        if self.logprobs is not None:
            _number("logprobs", self.logprobs, 0, MAX_LOGPROBS)

    @property
    def penalises(self) -> bool:
        """Whether a token's chance depends on how often it was there before."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def plain(self) -> bool:
        """Whether the largest logit decides, and nobody asks how large it is."""
        return self.temperature == 0.0 and self.logprobs is None and not self.logit_bias and not self.penalises

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises `InvalidArgument` for a token id outside `[0, vocab_size)`."""
        check_token_ids("logit_bias", list(self.logit_bias), vocab_size)
        check_token_ids("stop_token_ids", self.stop_token_ids, vocab_size)

    def with_seed(self, seed: int) -> SamplingParams:
        return msgspec.structs.replace(self, seed=seed)


_SAMPLING_TYPES = get_type_hints(SamplingParams)


def _number(field: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # also refuses NaN
        raise InvalidArgument(field, value, f"must be in [{low}, {high}]")


def check_token_ids(field: str, token_ids: list[int], vocab_size: int) -> None:
    """Raises `InvalidArgument` naming the first id outside `[0, vocab_size)`."""
    for i, token in enumerate(token_ids):
        if not 0 <= token < vocab_size:
            raise InvalidArgument(f"{field}[{i}]", token, f"the vocabulary is [0, {vocab_size})")


def check_length(num_prompt_tokens: int, max_context: int) -> None:
    """Raises `InvalidArgument` for an empty prompt, or one that leaves no room for a token."""
    if num_prompt_tokens == 0:
        raise InvalidArgument("prompt", "", "must have at least one token")
    if num_prompt_tokens >= max_context:
        raise InvalidArgument(
            "prompt",
            f"<{num_prompt_tokens} tokens>",
            f"prompt and one output token must fit the context of {max_context} tokens",
            f"shorten the prompt to at most {max_context - 1} tokens",
        )


def rank_ns(priority: int, arrival_ns: int, priority_step_ns: int) -> int:
    """Where a request stands in every queue; smaller goes first.

    A step of priority is a head start of so much time. All that wait age alike, so their order never changes, and who
    waits long enough stands before everyone who comes later, whatever their priority.
    """
    return arrival_ns + priority * priority_step_ns


class SequenceRequest(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What an engine runs: one sampled continuation, from wherever it stands.

    A resumed or handed-over sequence is the same struct with `output_token_ids` not empty; they were already
    delivered, are computed like prompt tokens and are never reported again.
    """

    key: SequenceKey
    prompt_token_ids: list[int]
    sampling: SamplingParams
    """`seed` is set. Stop strings are not the engine's business; text is judged where it is made."""
    eos_token_ids: list[int]
    output_token_ids: list[int] = []
    cache_salt: str = ""
    priority: int = 0
    """Smaller is sooner."""
    arrival_ns: int = 0
    deadline_ns: int | None = None
    """Wall clock. The engine ends the sequence at the first step border after it."""
    handoff_after: int | None = None
    """Stop with `HANDOFF` once so many output tokens exist (counting `output_token_ids`)."""
    transfer_id: TransferId | None = None
    """Blocks being received for this sequence: it waits for them (bounded) and takes over their lease."""
    sends_transfer_id: TransferId | None = None
    """On a prefill leg: the transfer that carries its blocks away. When the leg ends, what is not sealed by then will
    never be, and the transfer need not wait for it."""
    sent_ns: int | None = None
    """When it was sent, by the sender's clock. The receiver translates the instants above to its own clock."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A validated request: `n` sequences of one prompt. Immutable; whoever holds one need not check it again."""

    request_id: RequestId
    prompt_token_ids: list[int]
    sampling: SamplingParams
    """`seed` is set."""
    eos_token_ids: list[int]
    cache_salt: str = ""
    priority: int = 0
    arrival_ns: int = 0
    deadline_ns: int | None = None
    retry_budget: int | None = None
    """How often a sequence may begin anew elsewhere; `None`: as often as the coordinator allows, which is the most."""


class Logprob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One position's log-probabilities (natural log of the softmax before temperature, penalties and bias)."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]] = []
    """Most likely first."""


class TokenEvent(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """One token of one sequence, or its end without a token (`token_id=None`)."""

    key: SequenceKey
    position: int
    """Index among the sequence's output tokens; the coordinator drops what it has seen."""
    token_id: int | None
    finish_reason: FinishReason | None = None
    logprob: Logprob | None = None
    num_cached_tokens: int = 0
    """Leading tokens (of the prompt, then of those delivered before) that this leg has not computed so far. Valid with
    a token."""
    begin_ns: int | None = None
    """When the leg's first row ran; on the leg's first event."""
    end_ns: int | None = None
    error_label: str | None = None
    error_message: str | None = None
    """Set when the sequence ended for another reason than its own tokens."""
    stalled_ns: int = 0
    """How long, since its previous token, the sequence waited without blocks after it had begun."""


class Usage(msgspec.Struct, frozen=True):
    num_prompt_tokens: int
    num_cached_tokens: int
    """Prompt tokens whose KV was not computed for this request, by none of its sequences on no group that told of it:
    found in a cache or fetched from another group's. What prefill computed and was ferried to decode is not cached."""
    num_output_tokens: int
    num_ferried_blocks: int = 0
    ferried_bytes: int = 0


class CompletionOutput(msgspec.Struct):
    index: int
    text: str
    token_ids: list[int]
    logprobs: list[Logprob] | None
    finish_reason: str | None


class RequestOutput(msgspec.Struct):
    request_id: RequestId
    prompt_token_ids: list[int]
    num_cached_tokens: int
    outputs: list[CompletionOutput]
    usage: Usage | None = None
    timeline: Any = None
