"""Prompt lookup: a sequence goes on as it did the last time that its latest tokens stood there.

Source: Saxena 2023, "Prompt lookup decoding". No second model: good where outputs repeat parts of prompts.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as SequenceOf

from kvferry.runtime.ids import SequenceKey
from kvferry.runtime.sequence import Sequence
from kvferry.runtime.speculation.acceptance import Draft

_SIZES = (4, 3, 2)
"""Lengths of what is looked up; the longer says more and goes first."""
_SLOTS = 1 << 15
"""Places of one length's table; tokens of later positions take them from earlier ones."""
MAX_INDEXED_PER_STEP = 4096
"""Tokens of a long context that one step takes in; until all are, its sequence drafts nothing."""


class NgramIndex:
    """Where each n-gram of a growing sequence was last followed by another token. Bounded: tables of 128 KiB."""

    def __init__(self) -> None:
        self._tables = {size: array("i", [0]) * _SLOTS for size in _SIZES}
        """Position of the token behind the n-gram that falls into a place; 0: none."""
        self.num_indexed = 0

    def extend(self, tokens: list[int]) -> bool:
        """Takes in what `tokens` has more than the last time, within bounds. False: there is more to take in."""
        end = min(len(tokens), self.num_indexed + MAX_INDEXED_PER_STEP)
        for size, table in self._tables.items():
            for position in range(max(self.num_indexed, size), end):
                table[hash(tuple(tokens[position - size : position])) % _SLOTS] = position
        self.num_indexed = end
        return end == len(tokens)

    def draft(self, tokens: list[int], count: int) -> Draft:
        """Up to `count` tokens that may follow; none if nothing like the end of `tokens` stood there before."""
        for kind, (size, table) in enumerate(self._tables.items()):
            tail = tokens[-size:]
            position = table[hash(tuple(tail)) % _SLOTS]
            if position and tokens[position - size : position] == tail:
                draft = tokens[position : position + count]
                while len(draft) < count:  # it overlaps what is to come: a repetition goes on repeating
                    draft += draft[: count - len(draft)]
                return Draft(draft, kind)
        return Draft([])


class NgramProposer:
    """Implements `speculator.Proposer`."""

    def __init__(self) -> None:
        self._indices: dict[SequenceKey, NgramIndex] = {}

    def propose(self, sequences: SequenceOf[Sequence], counts: SequenceOf[int]) -> list[Draft]:
        drafts = []
        for sequence, count in zip(sequences, counts, strict=True):
            if (index := self._indices.get(sequence.key)) is None:
                index = self._indices[sequence.key] = NgramIndex()
            drafts.append(index.draft(sequence.tokens, count) if index.extend(sequence.tokens) and count else Draft([]))
        return drafts

    def forget(self, key: SequenceKey) -> None:
        self._indices.pop(key, None)
