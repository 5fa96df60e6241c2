"""Drafts for the decodes of a step: as many tokens as shorten the time that a token takes."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Protocol

from kvferry.runtime.config import SpeculationConfig
from kvferry.runtime.ids import SequenceKey
from kvferry.runtime.sequence import Sequence
from kvferry.runtime.speculation.acceptance import Draft, Record
from kvferry.runtime.speculation.cost import StepCost
from kvferry.runtime.speculation.ngram import NgramProposer

TRIAL_TOKENS = 4
"""Drafted by a sequence for which drafting did not pay, to see whether that has changed."""


class Proposer(Protocol):
    """Guesses how sequences go on. Keeps what it needs per sequence, bounded."""

    def propose(self, sequences: SequenceOf[Sequence], counts: SequenceOf[int]) -> list[Draft]:
        """For each sequence at most `counts` tokens that may follow its `tokens`."""
        ...

    def forget(self, key: SequenceKey) -> None:
        """The sequence is over."""
        ...


class Speculator:
    """`max_tokens`: drafted for one sequence in one step. `max_context`: of a sequence. `clock`: nanoseconds."""

    def __init__(self, proposer: Proposer, max_tokens: int, max_context: int, clock: Callable[[], int]) -> None:
        self._proposer = proposer
        self._max_tokens = max_tokens
        self._max_context = max_context
        self._clock = clock
        self._all = Record()
        self._records: dict[SequenceKey, Record] = {}
        self._cost = StepCost()
        self._turn = 0
        self.spent_s = 0.0
        """On the last step's drafts."""

    def drafts(self, sequences: SequenceOf[Sequence], budget: int) -> list[list[int]]:
        """What to check behind each sequence's last token, together at most `budget` tokens.

        As many are asked for as would be worth it if the proposer were sure, and cut when it has said how sure it is.
        No draft leads past a sequence's end: neither past its length, nor past a stop token, which is never drafted.
        """
        begin = self._clock()
        records = [self._records.get(s.key) or Record(self._all) for s in sequences]
        for sequence, record in zip(sequences, records, strict=True):
            self._records[sequence.key] = record
            record.kind = 0
        longest = [max(0, min(self._max_tokens, s.num_left(self._max_context) - 1)) for s in sequences]
        drafts = self._proposer.propose(sequences, self._lengths(records, longest, budget, self._cost.propose_s))
        for record, draft in zip(records, drafts, strict=True):
            record.kind = draft.kind
        proposed = [_before_stop(draft.token_ids, s) for draft, s in zip(drafts, sequences, strict=True)]
        lengths = self._lengths(records, [len(tokens) for tokens in proposed], budget, 0.0)
        self.spent_s = (self._clock() - begin) / 1e9
        self._cost.observe_proposals(len(sequences), sum(len(draft.token_ids) for draft in drafts), self.spent_s)
        return [tokens[:length] for tokens, length in zip(proposed, lengths, strict=True)]

    def _lengths(self, records: list[Record], longest: list[int], budget: int, propose_s: float) -> list[int]:
        """Of drafts that are worth it; or of one that is not, to see whether that is still so."""
        lengths = [0] * len(records)
        able = [i for i, length in enumerate(longest) if length]
        if not able or not self._cost.may_draft(len(records)):
            return lengths
        chances = [record.chances(length) for record, length in zip(records, longest, strict=True)]
        lengths = self._cost.lengths(chances, propose_s)
        if not any(lengths):
            self._turn += 1
            one = able[self._turn % len(able)]
            count = min(longest[one], TRIAL_TOKENS)
            lengths[one] = count if self._cost.may_lose(len(records), count, propose_s) else 0
        for i, length in enumerate(lengths):
            lengths[i] = min(length, budget)
            budget -= lengths[i]
        return lengths

    def judge(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        self._records[sequence.key].judge(num_drafted, num_accepted)

    def observe_step(self, num_decodes: int, num_drafted: int, num_accepted: int, seconds: float) -> None:
        """A step without prefill took so long."""
        self._cost.observe(num_decodes, num_drafted, num_accepted, seconds)

    def forget(self, key: SequenceKey) -> None:
        self._records.pop(key, None)
        self._proposer.forget(key)


def _before_stop(draft: list[int], sequence: Sequence) -> list[int]:
    return next((draft[:i] for i, token in enumerate(draft) if token in sequence.stops), draft)


def make_speculator(
    config: SpeculationConfig, max_context: int, clock: Callable[[], int], proposer: Proposer | None = None
) -> Speculator | None:
    """`None`: the engine does not speculate. `proposer`: instead of n-grams."""
    if config.method == "none":
        return None
    return Speculator(proposer or NgramProposer(), config.max_tokens, max_context, clock)
