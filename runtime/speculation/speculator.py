"""Drafts for the decodes of a step: as many tokens as shorten the time that a token takes."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Protocol

from kvferry.runtime.config import SpeculationConfig
from kvferry.runtime.ids import SequenceKey
from kvferry.runtime.sequence import Sequence
from kvferry.runtime.speculation.acceptance import Record
from kvferry.runtime.speculation.cost import StepCost
from kvferry.runtime.speculation.ngram import NgramProposer

TRIAL_TOKENS = 4
"""Drafted by a sequence for which drafting did not pay, to see whether that has changed."""
TRIAL_STEPS = 8
"""From one such trial to the next, of whichever sequence."""


class Proposer(Protocol):
    """Guesses how sequences go on. Keeps what it needs per sequence, bounded."""

    def propose(self, sequences: SequenceOf[Sequence], counts: SequenceOf[int]) -> list[list[int]]:
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
        self._records: dict[SequenceKey, Record] = {}
        self._cost = StepCost()
        self._steps_since_trial = 0
        self.spent_s = 0.0
        """On the last step's drafts."""

    def drafts(self, sequences: SequenceOf[Sequence], budget: int) -> list[list[int]]:
        """What to check behind each sequence's last token, together at most `budget` tokens.

        No draft leads past a sequence's end: neither past its length, nor past a stop token, which is never drafted.
        """
        counts = self._counts(sequences)
        for i, count in enumerate(counts):
            counts[i] = min(count, budget)
            budget -= counts[i]
        begin = self._clock()
        drafts = self._proposer.propose(sequences, counts)
        self.spent_s = (self._clock() - begin) / 1e9
        self._cost.observe_proposals(sum(map(len, drafts)), self.spent_s)
        return [_before_stop(draft, s) for draft, s in zip(drafts, sequences, strict=True)]

    def _counts(self, sequences: SequenceOf[Sequence]) -> list[int]:
        records = [self._records.setdefault(s.key, Record()) for s in sequences]
        longest = [max(0, min(self._max_tokens, s.num_left(self._max_context) - 1)) for s in sequences]
        if self._cost.wants_plain_step:
            return [0] * len(sequences)
        counts = self._cost.lengths([record.rate for record in records], longest)
        self._steps_since_trial += 1
        for i, record in enumerate(records):
            record.note(pays=counts[i] > 0)
            if longest[i] and self._steps_since_trial >= TRIAL_STEPS and record.may_try():
                counts[i] = min(longest[i], TRIAL_TOKENS)
                self._steps_since_trial = 0
        return counts

    def judge(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        self._records[sequence.key].judge(num_drafted, num_accepted)

    def observe_step(self, num_decodes: int, num_drafted: int, seconds: float) -> None:
        """A step without prefill took so long."""
        self._cost.observe(num_decodes, num_drafted, seconds)

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
