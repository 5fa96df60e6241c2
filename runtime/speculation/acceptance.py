"""What becomes of drafted tokens, and how often they came true."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvferry.runtime.step import SampledToken

_MEMORY = 0.9
"""What an earlier guess of a sequence weighs after each further one."""
_SHARED_MEMORY = 0.98
"""The same, of all sequences."""
_OTHERS = 2.0
"""Guesses of its own that a sequence needs to count as much as what is known of others."""


class Draft(msgspec.Struct):
    """A guess of how a sequence goes on. `kind`: 0 is the surest; those of one kind come true about as often."""

    token_ids: list[int]
    kind: int = 0


def accept(draft: Sequence[int], drawn: Sequence[SampledToken]) -> list[SampledToken]:
    """The model's own draws, as far as it has seen the right tokens before them: up to the first that was not drafted.

    `drawn`: one draw behind the row's last known token and one behind each drafted token. Each is what the model draws
    at its position after just these tokens, so what is returned is what it would have drawn one step at a time.
    """
    for i, token in enumerate(draft):
        if drawn[i].token_id != token:
            return list(drawn[: i + 1])
    return list(drawn)


class _Rate:
    """How often something came true of late; what is not known of it is taken from others."""

    __slots__ = ("_hits", "_memory", "_others", "_trials")

    def __init__(self, others: _Rate | None) -> None:
        self._others = others
        self._memory = _SHARED_MEMORY if others is None else _MEMORY
        self._hits = self._trials = 0.0

    @property
    def value(self) -> float:
        others = 0.5 if self._others is None else self._others.value
        return (self._hits + _OTHERS * others) / (self._trials + _OTHERS)

    def judge(self, hit: bool) -> None:
        self._hits = self._hits * self._memory + hit
        self._trials = self._trials * self._memory + 1.0
        if self._others is not None:
            self._others.judge(hit)


class Record:
    """How often drafts came true: one sequence's, or with `others` `None` those of all.

    First tokens of drafts of different kinds differ much, and so do first tokens and those behind a right one.
    """

    __slots__ = ("_first", "_next", "_others", "kind")

    def __init__(self, others: Record | None = None) -> None:
        self._others = others
        self._first: dict[int, _Rate] = {}
        self._next: _Rate = _Rate(None if others is None else others._next)
        self.kind = 0
        """Of the draft at hand."""

    def _first_of(self, kind: int) -> _Rate:
        if kind not in self._first:
            self._first[kind] = _Rate(None if self._others is None else self._others._first_of(kind))
        return self._first[kind]

    def chances(self, count: int) -> list[float]:
        """Of each of `count` drafted tokens: that it is accepted, and so all before it."""
        first, following = self._first_of(self.kind).value, self._next.value
        return [first * following**i for i in range(count)]

    def judge(self, num_drafted: int, num_accepted: int) -> None:
        """Of drafted tokens that were checked. Those behind the first wrong one say nothing."""
        self._first_of(self.kind).judge(num_accepted > 0)
        for i in range(1, min(num_accepted + 1, num_drafted)):
            self._next.judge(i < num_accepted)
