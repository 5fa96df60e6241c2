"""The engine alone, as a library: prompts in, outputs back."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Sequence as SequenceOf
from typing import Any

import msgspec

from kvferry.runtime.config import CacheConfig, EngineConfig, SchedulerConfig
from kvferry.runtime.engine import Engine
from kvferry.runtime.errors import InvalidArgument, KvferryError, error_of
from kvferry.runtime.ids import Epoch, GroupId, Peer, RequestId, SequenceKey
from kvferry.runtime.model.files import resolve_model
from kvferry.runtime.model.loader import progress_bar
from kvferry.runtime.rank import Rank
from kvferry.runtime.reports import EngineLoad
from kvferry.runtime.request import (
    CompletionOutput,
    FinishReason,
    RequestOutput,
    SamplingParams,
    SequenceRequest,
    TokenEvent,
    check_length,
    check_token_ids,
)
from kvferry.runtime.text.detokenizer import TextStream
from kvferry.runtime.text.tokenizer import Tokenizer, load_tokenizer
from kvferry.runtime.transfer.ticket import GroupAddress

Prompt = str | list[int]
Messages = list[dict[str, str]]


def engine_config(**options: Any) -> EngineConfig:
    """An `EngineConfig` from flat options (`block_size=32, max_sequences=8, …`). Raises `InvalidArgument`."""
    parts: dict[str, dict[str, Any]] = {"": {}, "cache": {}, "scheduler": {}, "speculation": {}}
    homes = {
        **{name: ("cache", name) for name in CacheConfig.__struct_fields__},
        **{name: ("scheduler", name) for name in SchedulerConfig.__struct_fields__},
        "speculation": ("speculation", "method"),
        "speculation_tokens": ("speculation", "max_tokens"),
        "draft_model": ("speculation", "draft_model"),
        "dtype": ("", "dtype"),
        "quantization": ("", "quantization"),
        "threads": ("", "threads"),
    }
    for name, value in options.items():
        if name not in homes:
            raise InvalidArgument(name, value, f"unknown engine option; there are {', '.join(sorted(homes))}")
        part, field = homes[name]
        parts[part][field] = value
    try:
        return msgspec.convert({**parts.pop(""), **parts}, type=EngineConfig)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, KvferryError):
            raise error.__cause__ from None
        raise InvalidArgument("engine options", options, str(error)) from error


class _Continuation:
    """One sequence on its way: engine events in, a `CompletionOutput` out."""

    def __init__(self, request: SequenceRequest, tokenizer: Tokenizer) -> None:
        self.key = request.key
        self._text = TextStream(tokenizer, request.sampling, request.prompt_token_ids)
        wanted = request.sampling.logprobs is not None
        self.output = CompletionOutput(request.key.index, "", [], [] if wanted else None, None)
        self.num_cached = 0

    def push(self, event: TokenEvent) -> bool:
        """Returns whether the engine may stop: a stop string is complete."""
        if self.output.finish_reason is not None:
            return False
        if event.error_label is not None:
            raise error_of(event.error_label, event.error_message or event.error_label)
        if event.position == 0:
            self.num_cached = event.num_cached_tokens
        tokens = [] if event.token_id is None else [event.token_id]
        piece = self._text.push(tokens, event.finish_reason is not None)
        self.output.text += piece.text
        self.output.token_ids += tokens
        if self.output.logprobs is not None and event.logprob is not None:
            self.output.logprobs.append(event.logprob)
        if piece.stopped:
            self.output.finish_reason = FinishReason.STOP.value
            return event.finish_reason is None
        if event.finish_reason is not None:
            self.output.finish_reason = event.finish_reason.value
        return False


class LLM:
    """A model in this process. One thread at a time.

    `model`: a Hugging Face folder, a `.gguf` file, a hub id, or `package:NAME`. Options: the fields of `CacheConfig`
    and `SchedulerConfig`, `speculation`, `speculation_tokens`, `draft_model`, `dtype`, `quantization` and `threads`.
    Raises `UnsupportedModel`, `CorruptModel`, `NotFound`, `InvalidArgument` before weights are read.
    """

    def __init__(self, model: str, **engine_options: Any) -> None:
        config = engine_config(**engine_options)
        self.tokenizer = load_tokenizer(resolve_model(model))
        with progress_bar(f"Loading {model}") as on_progress:
            self._rank = Rank(model, config, on_progress=on_progress)
        rank = self._rank
        address = GroupAddress(Peer(GroupId("local"), Epoch(0)), 1, rank.kv.fingerprint, [])
        self._engine = Engine(
            config,
            rank.kv,
            rank.hash_root,
            address,
            rank.max_context,
            rank.execute,
            time.time_ns,
            rank.proposer,
        )
        self._config = config
        self._ids = itertools.count()

    @property
    def max_context(self) -> int:
        return self._engine.max_context

    @property
    def load(self) -> EngineLoad:
        """What runs, and counters since the beginning."""
        return self._engine.load()

    def generate(
        self,
        prompts: Prompt | SequenceOf[Prompt],
        sampling_params: SamplingParams | SequenceOf[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Continues each prompt (text or token ids); outputs come in the prompts' order.

        `sampling_params`: one for all, or one per prompt. Raises `InvalidArgument` before anything is computed.
        """
        return self._run([self._encode(prompt) for prompt in _as_prompts(prompts)], sampling_params)

    def chat(
        self,
        messages: Messages | SequenceOf[Messages],
        sampling_params: SamplingParams | SequenceOf[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation, or each of several, through the model's chat template."""
        single = bool(messages) and isinstance(messages[0], dict)
        conversations = [messages] if single else messages
        return self._run([self.tokenizer.render_chat(list(c)) for c in conversations], sampling_params)  # type: ignore[arg-type]

    def _encode(self, prompt: Prompt) -> list[int]:
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)

    def _run(
        self, prompts: list[list[int]], sampling_params: SamplingParams | SequenceOf[SamplingParams] | None
    ) -> list[RequestOutput]:
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params = [sampling_params or SamplingParams()] * len(prompts)
        else:
            params = list(sampling_params)
        if len(params) != len(prompts):
            raise InvalidArgument(
                "sampling_params", f"<{len(params)}>", f"one for all or one for each of {len(prompts)}"
            )
        for prompt, one in zip(prompts, params, strict=True):
            check_length(len(prompt), self.max_context)
            check_token_ids("prompt", prompt, self._rank.spec.vocab_size)
            one.check_vocabulary(self._rank.spec.vocab_size)
        outputs = []
        running: dict[SequenceKey, _Continuation] = {}
        waiting = [r for p, s in zip(prompts, params, strict=True) for r in self._sequences(p, s)]
        for request in waiting:
            running[request.key] = _Continuation(request, self.tokenizer)
        by_request: dict[RequestId, list[_Continuation]] = {}
        for continuation in running.values():
            by_request.setdefault(continuation.key.request_id, []).append(continuation)
        self._drive(waiting, running)
        for prompt, (request_id, sequences) in zip(prompts, by_request.items(), strict=True):
            outputs.append(RequestOutput(request_id, prompt, sequences[0].num_cached, [s.output for s in sequences]))
        return outputs

    def _sequences(self, prompt: list[int], params: SamplingParams) -> list[SequenceRequest]:
        request_id = RequestId(f"llm-{next(self._ids)}")
        seeded = params if params.seed is not None else params.with_seed(secrets.randbits(63))
        salt = "" if self._config.cache.prefix_caching else request_id
        return [
            SequenceRequest(
                key=SequenceKey(request_id, index, 1),
                prompt_token_ids=prompt,
                sampling=seeded,
                eos_token_ids=self.tokenizer.eos_token_ids,
                cache_salt=salt,
                arrival_ns=time.time_ns(),
            )
            for index in range(params.n)
        ]

    def _drive(self, waiting: list[SequenceRequest], running: dict[SequenceKey, _Continuation]) -> None:
        """Feeds the engine within its queue's bound and steps it to the end; leaves nothing behind on an error."""
        engine, limit = self._engine, self._config.scheduler.max_waiting
        queue = waiting[::-1]
        try:
            while running:
                while queue and engine.load().num_waiting < limit:
                    engine.submit(queue.pop(), time.time_ns())
                for event in engine.step(time.time_ns()).tokens:
                    continuation = running.get(event.key)
                    if continuation is None:
                        continue
                    if continuation.push(event):
                        engine.cancel(event.key)
                    if continuation.output.finish_reason is not None:
                        del running[event.key]
        finally:
            for key in running:
                engine.cancel(key)
            self._rank.rest()


def _as_prompts(prompts: Prompt | SequenceOf[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if prompts and all(isinstance(p, int) for p in prompts):
        return [list(prompts)]  # type: ignore[arg-type]
    return list(prompts)  # type: ignore[arg-type]
