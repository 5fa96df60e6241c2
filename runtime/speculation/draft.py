"""A small model with the same vocabulary guesses what the large one will say.

It runs whole on the group's rank 0, however many ranks the target is cut over: sums between ranks would cost more than
a small model's arithmetic. Its KV lies in blocks of its own, which no transfer carries: what it lacks of a sequence, it
computes by and by, at most `MAX_CATCH_UP` tokens a step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as SequenceOf

import torch

from kvferry.runtime.ids import BlockId, SequenceKey
from kvferry.runtime.kv.groups import one_group
from kvferry.runtime.kv.storage import RankStorage
from kvferry.runtime.model.decoder import build_model
from kvferry.runtime.model.files import load_spec, resolve_model
from kvferry.runtime.model.loader import open_weights
from kvferry.runtime.model.parallel import SingleRank
from kvferry.runtime.model.runner import Runner
from kvferry.runtime.model.spec import ModelSpec
from kvferry.runtime.sequence import Sequence
from kvferry.runtime.speculation.acceptance import Draft
from kvferry.runtime.step import Row, StepPlan, make_table

MAX_CATCH_UP = 256
"""Tokens of known context that one step computes here, of all sequences together."""


class _Held:
    """What this model's blocks hold of one sequence: its first `num_known` tokens, and behind them `draft`."""

    __slots__ = ("block_ids", "draft", "num_known")

    def __init__(self) -> None:
        self.block_ids = make_table()
        self.num_known = 0
        self.draft: list[int] = []

    def settle(self, tokens: list[int]) -> None:
        """Keeps of the draft what the sequence has become; the rest is overwritten.

        The last token is computed again if need be: what comes behind it is the question.
        """
        for token in self.draft:
            if self.num_known == len(tokens) or tokens[self.num_known] != token:
                break
            self.num_known += 1
        self.num_known = min(self.num_known, len(tokens) - 1)
        self.draft = []


class DraftModel:
    """Implements `speculator.Proposer`. Draws as the request asks, with its own noise: see `propose`."""

    def __init__(self, runner: Runner, spec: ModelSpec, num_blocks: int, block_size: int) -> None:
        self._runner = runner
        self._max_context = spec.max_context
        self._block_size = block_size
        self._free = [BlockId(i) for i in range(num_blocks)]
        self._held: OrderedDict[SequenceKey, _Held] = OrderedDict()
        """Least recently drafted first."""
        self._num_steps = 0

    def propose(self, sequences: SequenceOf[Sequence], counts: SequenceOf[int]) -> list[Draft]:
        """Draws with the sequence's parameters, seed and position: target and draft race with the same noise, so that
        they agree more often than two draws would. Source: Daliri et al. 2024, drafter-invariant speculation.
        """
        drafts: list[list[int]] = [[] for _ in sequences]
        places = self._catch_up(sequences, counts, drafts)
        while places := [i for i in places if len(drafts[i]) < counts[i] and drafts[i][-1] not in sequences[i].stops]:
            rows = []
            for i in places:
                held, length = self._held[sequences[i].key], len(sequences[i].tokens)
                held.draft.append(drafts[i][-1])
                rows.append(Row([drafts[i][-1]], length + len(held.draft) - 1, held.block_ids, 1))
            self._draw(rows, places, sequences, drafts)
        return [Draft(tokens) for tokens in drafts]

    def _catch_up(self, sequences: SequenceOf[Sequence], counts: SequenceOf[int], drafts: list[list[int]]) -> list[int]:
        """Computes known tokens, and draws a first one behind those of which then none is lacking: their places."""
        rows, places, budget = [], [], MAX_CATCH_UP
        busy: set[SequenceKey] = set()
        for i, (sequence, count) in enumerate(zip(sequences, counts, strict=True)):
            tokens = sequence.tokens
            if not count or not budget or len(tokens) + count > self._max_context:
                continue
            held = self._held.setdefault(sequence.key, _Held())
            self._held.move_to_end(sequence.key)
            busy.add(sequence.key)
            held.settle(tokens)
            start, end = held.num_known, min(len(tokens), held.num_known + budget)
            whole = end == len(tokens)
            if not self._lease(held, end + count * whole, busy):
                continue
            rows.append(Row(tokens[start:end], start, held.block_ids, int(whole)))
            budget -= end - start
            held.num_known = end
            if whole:
                places.append(i)
        self._draw(rows, places, sequences, drafts)
        return places

    def _draw(
        self, rows: list[Row], places: list[int], sequences: SequenceOf[Sequence], drafts: list[list[int]]
    ) -> None:
        """Runs `rows`, whose samples belong to `places`, and appends what they draw."""
        samples = [sequences[i].sample_input(drafts[i]) for i in places]
        self._num_steps += 1
        result = self._runner.execute(StepPlan(self._num_steps, rows), samples)
        for i, token in zip(places, result.sampled, strict=True):
            drafts[i].append(token.token_id)

    def _lease(self, held: _Held, num_tokens: int, busy: set[SequenceKey]) -> bool:
        """Makes the table cover so many tokens; takes blocks from the least recently drafted. False: no room."""
        lacking = -(-num_tokens // self._block_size) - len(held.block_ids)
        while len(self._free) < lacking:
            oldest = next(key for key in self._held)
            if oldest in busy:
                return False
            self.forget(oldest)
        for _ in range(lacking):
            held.block_ids.append(self._free.pop())
        return True

    def forget(self, key: SequenceKey) -> None:
        held = self._held.pop(key, None)
        if held is not None:
            self._free.extend(held.block_ids)


def load_draft(model: str, dtype: str, block_size: int, num_blocks: int, device: torch.device) -> DraftModel:
    """As many blocks as the target's pool has: whatever runs there fits here."""
    files = resolve_model(model)
    spec = load_spec(files)
    weights = open_weights(files, spec, None)
    try:
        decoder = build_model(spec, weights, getattr(torch, dtype), 0, SingleRank(), device)
    finally:
        weights.close()
    storage = RankStorage(one_group(spec.kv_layout(block_size, dtype, 1), num_blocks), device)
    return DraftModel(Runner(decoder, storage, SingleRank()), spec, num_blocks, block_size)
