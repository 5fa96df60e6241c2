"""A toy model whose next token is a hash of *what its blocks say*: reading a foreign or unfilled block shows.

With a window in all layers it depends on the last tokens only; with a window in some, every block group must say the
same of them.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Any

from kvferry.runtime.config import CacheConfig, EngineConfig, SchedulerConfig, SpeculationConfig, TransferConfig
from kvferry.runtime.engine import Engine
from kvferry.runtime.ids import NO_BLOCK, Epoch, GroupId, Peer, RequestId, SequenceKey
from kvferry.runtime.kv.groups import KVGroups, one_group, two_groups
from kvferry.runtime.kv.layout import KVLayout
from kvferry.runtime.reports import StepOutput
from kvferry.runtime.request import SamplingParams, SequenceRequest
from kvferry.runtime.sequence import Sequence
from kvferry.runtime.speculation.acceptance import Draft
from kvferry.runtime.speculation.speculator import Proposer
from kvferry.runtime.step import Row, SampledToken, SampleInput, Send, StepPlan, StepResult
from kvferry.runtime.transfer.ticket import GroupAddress, RankAddress

VOCAB = 50
POISON = -1
ROOT = b"toy-root-16bytes"


def toy_next(tokens: list[int], seed: int, index: int) -> int:
    """The undisturbed truth. Values repeat in processes and runs (unlike `hash`)."""
    value = 1469598103934665603 ^ (seed * 31 + index)
    for token in tokens:
        value = ((value ^ (token + 1)) * 1099511628211) & (2**64 - 1)
    return (value >> 20) % VOCAB


def toy_output(prompt: list[int], count: int, seed: int = 0, index: int = 0, window: int | None = None) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(toy_next(tokens[-(window or len(tokens)) :], seed, index))
    return tokens[len(prompt) :]


class ToyRunner:
    """One rank: blocks hold tokens; rows write them, then read their whole context back."""

    def __init__(self, kv: KVGroups) -> None:
        self.groups = kv.groups
        self.size = kv.block_size
        self.blocks = [[POISON] * self.size for _ in range(sum(group.num_blocks for group in kv.groups))]
        self.sends: list[tuple[Send, list[list[int]]]] = []
        self.staged: dict[tuple[str, int, int], list[list[int]]] = {}
        self.plans: list[StepPlan] = []

    def execute(self, plan: StepPlan, samples: list[SampleInput]) -> StepResult:
        self.plans.append(plan)
        for command in plan.imports:
            payload = self.staged.pop((command.transfer_id, command.attempt, command.seq))
            for block_id, content in zip(command.block_ids, payload, strict=True):
                self.blocks[block_id] = list(content)
        for row in plan.rows:
            assert row.token_ids, "a row without tokens"
            for table in (row.block_ids, row.window_block_ids)[: len(self.groups)]:
                for position, token in enumerate(row.token_ids, row.start):
                    self.blocks[table[position // self.size]][position % self.size] = token
        sampled = []
        inputs = iter(samples)
        for row in plan.rows:
            first, seen = self.seen(row)
            length = first + len(seen)
            for end in range(length - row.num_samples + 1, length + 1):
                context = seen[: end - first][-(self.groups[0].window or length) :]
                given = next(inputs)
                token = toy_next(context, given.params.seed or 0, given.key.index)
                while token in given.banned_token_ids:
                    token = (token + 1) % VOCAB
                sampled.append(SampledToken(token))
        for send in plan.sends:
            self.sends.append((send, [list(self.blocks[b]) for b in send.source_block_ids]))
        return StepResult(sampled)

    def seen(self, row: Row) -> tuple[int, list[int]]:
        """A position, and the tokens from there on that the main group's layers see from the row's first token on."""
        length, seen = row.start + len(row.token_ids), []
        for group, table in zip(self.groups, (row.block_ids, row.window_block_ids), strict=False):
            first = 0 if group.window is None else max(0, row.start + 1 - group.window)
            assert NO_BLOCK not in table[first // self.size :], "a row reads a block that was let go"
            seen.append([self.blocks[table[p // self.size]][p % self.size] for p in range(first, length)])
            assert POISON not in seen[-1], "a row read a slot that nobody filled"
        assert all(seen[0][-len(tokens) :] == tokens for tokens in seen), "block groups differ"
        return length - len(seen[0]), seen[0]

    def poison(self, block_ids: list[int]) -> None:
        for block_id in block_ids:
            self.blocks[block_id] = [POISON] * self.size


class ToyProposer:
    """Knows the truth and says something else behind every context whose last token divides by `wrong`."""

    def __init__(self, wrong: int, window: int | None = None) -> None:
        self.wrong, self.window = wrong, window
        self.known: set[SequenceKey] = set()

    def propose(self, sequences: SequenceOf[Sequence], counts: SequenceOf[int]) -> list[Draft]:
        self.known |= {s.key for s in sequences}
        return [Draft(self._guess(s, count)) for s, count in zip(sequences, counts, strict=True)]

    def _guess(self, sequence: Sequence, count: int) -> list[int]:
        tokens = list(sequence.tokens)
        for _ in range(count):
            token = toy_next(
                tokens[-(self.window or len(tokens)) :], sequence.request.sampling.seed or 0, sequence.key.index
            )
            tokens.append((token + (tokens[-1] % self.wrong == 0)) % VOCAB)
        return tokens[len(sequence.tokens) :]

    def forget(self, key: SequenceKey) -> None:
        self.known.discard(key)


class Ticks:
    """A clock that moves by `tick_ns` each time it is read."""

    def __init__(self, tick_ns: int = 1_000) -> None:
        self.now_ns, self.tick_ns = 1_000_000_000, tick_ns

    def __call__(self) -> int:
        self.now_ns += self.tick_ns
        return self.now_ns


def toy_address(name: str, epoch: int = 1, kv: KVGroups | None = None) -> GroupAddress:
    fingerprint = (kv or toy_layout()).fingerprint
    return GroupAddress(Peer(GroupId(name), Epoch(epoch)), 1, fingerprint, [RankAddress("127.0.0.1", 0, "here")])


def toy_layout(block_size: int = 4) -> KVLayout:
    return KVLayout(num_layers=1, num_kv_heads=1, head_dim=1, block_size=block_size, dtype="float32")


def toy_groups(
    num_blocks: int, block_size: int = 4, window: int | None = None, num_window_blocks: int | None = None
) -> KVGroups:
    """`window` in all layers, or with `num_window_blocks` in some."""
    layout = toy_layout(block_size)
    if window is None or num_window_blocks is None:
        return one_group(layout, num_blocks, window)
    return two_groups(layout, layout, window, (False, True), (num_blocks, num_window_blocks))


class ToyEngine:
    """An engine over a toy runner, stepped by hand."""

    def __init__(
        self,
        num_blocks: int = 32,
        block_size: int = 4,
        name: str = "toy",
        window: int | None = None,
        num_window_blocks: int | None = None,
        speculation: int = 0,
        proposer: Proposer | None = None,
        step_ns: Callable[[int], int] | None = None,
        **scheduler: Any,
    ) -> None:
        """`step_ns`: what a step of so many tokens takes; if not given, as long whatever is in it."""
        self.kv = toy_groups(num_blocks, block_size, window, num_window_blocks)
        self.address = toy_address(name, kv=self.kv)
        self.runner = ToyRunner(self.kv)
        self.clock = Ticks()
        self._step_ns = step_ns
        config = EngineConfig(
            cache=CacheConfig(block_size=block_size, num_blocks=num_blocks),
            scheduler=SchedulerConfig(**scheduler),
            transfer=TransferConfig(transport="local", blocks_per_message=2),
            speculation=SpeculationConfig(method="ngram" if speculation else "none", max_tokens=speculation or 1),
        )
        self.engine = Engine(
            config,
            self.kv,
            ROOT,
            self.address,
            1 << 20,
            self._execute if speculation or step_ns else self.runner.execute,
            self.clock,
            proposer,
        )
        self.tokens: dict[SequenceKey, list[int]] = {}
        self.ends: dict[SequenceKey, str] = {}

    def _execute(self, plan: StepPlan, samples: list[SampleInput]) -> StepResult:
        """Takes long beside what a proposer takes: so drafting pays, always, unless `step_ns` says otherwise."""
        self.clock.now_ns += self._step_ns(plan.num_tokens) if self._step_ns else 1_000_000
        return self.runner.execute(plan, samples)

    def drafted(self) -> tuple[int, int]:
        """Tokens drafted, and of these accepted."""
        load = self.engine.load()
        return load.drafted_tokens_total, load.accepted_tokens_total

    def submit(self, request: SequenceRequest) -> None:
        self.engine.submit(request, self.clock())

    def step(self) -> StepOutput:
        output = self.engine.step(self.clock())
        for event in output.tokens:
            if event.token_id is not None:
                self.tokens.setdefault(event.key, []).append(event.token_id)
            if event.finish_reason is not None:
                self.ends[event.key] = event.finish_reason.value
            if event.error_label is not None:
                self.ends[event.key] = event.error_label
        return output

    def run(self, max_steps: int = 2000) -> None:
        for _ in range(max_steps):
            if not self.engine.has_work():
                return
            self.step()
        raise AssertionError(f"not at rest after {max_steps} steps")


def toy_request(
    name: str,
    prompt: list[int],
    max_tokens: int = 8,
    *,
    index: int = 0,
    seed: int = 0,
    priority: int = 0,
    **rest: object,
) -> SequenceRequest:
    fields = {"attempt": 1, "arrival_ns": 0, **rest}
    attempt = fields.pop("attempt")
    assert isinstance(attempt, int)
    return SequenceRequest(
        key=SequenceKey(RequestId(name), index, attempt),
        prompt_token_ids=prompt,
        sampling=SamplingParams(max_tokens=max_tokens, seed=seed),
        eos_token_ids=[],
        priority=priority,
        **fields,  # type: ignore[arg-type]
    )
