"""What steps with drafted tokens cost, how many are worth it, and how much may be lost by trying."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

_WEIGHT = 0.05
"""Of the newest value in an average of many."""
_OUTLIER = 2.0
"""A step that takes so many times what was expected was disturbed by something else."""
_MIN_PLAIN, _MAX_AGE = 3, 64
"""Steps without drafts to be seen before there are any, and steps after which one is due: what drafts are compared
with must be known well."""
_FIRST_TOKENS = 4
"""Drafted at most in the first step with drafts, and twice as many as ever before in later ones."""
_MARGIN = 0.05
"""What drafts must gain at least: times are not known more exactly."""
_SHARE, _CREDIT = 0.01, 4.0
"""Of the time, that drafts may lose in the long run; steps that they may lose at once."""
_SIZES: tuple[int, ...] = (*range(8), *((5 + i << n) - 1 for n in range(1, 12) for i in range(4)))
"""Largest numbers of drafted tokens that count as the same: from 8 on, four to an octave."""


class _Mean:
    __slots__ = ("count", "value")

    def __init__(self, value: float = 0.0, count: int = 0) -> None:
        self.value, self.count = value, count

    def add(self, value: float) -> None:
        self.count += 1
        self.value += max(_WEIGHT, 1 / self.count) * (value - self.value)


class StepCost:
    """Seconds of steps without prefill, for each number of sequences and of drafted tokens, as measured.

    No line is fitted: on a CPU two or three rows can take longer than four. For each number of sequences some ten.
    """

    def __init__(self) -> None:
        self._means: dict[tuple[int, int], _Mean] = {}
        self._slope = _Mean()
        """Of one drafted token, in any batch: for what was not measured yet."""
        self._proposal = _Mean()
        self._age = 0
        """Steps since one without drafts."""
        self._widest = 0
        """Most tokens ever drafted in a step."""
        self._balance = _CREDIT
        """Steps that drafts may still lose."""

    def expected(self, num_rows: int, num_drafted: int) -> float | None:
        """Seconds; `None`: so many sequences were never seen without drafts."""
        plain = self._means.get((num_rows, 0))
        if plain is None:
            return None
        mean = self._means.get((num_rows, _size(num_drafted)))
        return plain.value + self._slope.value * num_drafted if mean is None else mean.value

    @property
    def propose_s(self) -> float:
        """What the proposer takes for a token that it drafts."""
        return self._proposal.value

    def observe(self, num_rows: int, num_drafted: int, num_accepted: int, seconds: float) -> None:
        key, expected = (num_rows, _size(num_drafted)), self.expected(num_rows, num_drafted)
        if key not in self._means:
            known = expected is not None and self._slope.count > 0
            self._means[key] = _Mean(expected or 0.0, 1) if known else _Mean()
        mean = self._means[key]
        mean.add(min(seconds, _OUTLIER * expected) if expected else seconds)
        self._age = self._age + 1 if num_drafted else 0
        self._widest = max(self._widest, num_drafted)
        plain = self._means.get((num_rows, 0))
        if plain is None or not plain.value:
            return
        if num_drafted:
            self._slope.add(max(0.0, (mean.value - plain.value) / num_drafted))
        duration = mean.value / plain.value
        gained = 1 - duration + num_accepted / num_rows
        self._balance = min(self._balance + gained + _SHARE * duration, _CREDIT)

    def observe_proposals(self, num_rows: int, num_tokens: int, seconds: float) -> None:
        if num_tokens:
            self._proposal.add(seconds / num_tokens)
            self._balance -= self._in_steps(num_rows, self.propose_s * num_tokens)

    def _in_steps(self, num_rows: int, seconds: float) -> float:
        plain = self.expected(num_rows, 0)
        return seconds / plain if plain else 0.0

    def may_draft(self, num_rows: int) -> bool:
        plain = self._means.get((num_rows, 0))
        if plain is None or plain.count < _MIN_PLAIN:
            return False
        return self._balance > 0 and self._age < min(4 * plain.count, _MAX_AGE)

    def may_lose(self, num_rows: int, num_drafted: int, propose_s: float) -> bool:
        """Whether so many tokens may be drafted even if all turn out wrong. Only what `may_draft`."""
        seconds = (self.expected(num_rows, num_drafted) or 0.0) + propose_s * num_drafted
        return self._in_steps(num_rows, seconds) - 1 < self._balance

    def lengths(self, chances: Sequence[Sequence[float]], propose_s: float) -> list[int]:
        """How many tokens to draft for each sequence of a step, at most as many as it has chances of acceptance.

        So many that a token takes the least time. Source: Leviathan et al. 2023, section 3.1 (`1 + r + … + r^k` tokens
        from k drafted ones). `propose_s`: still to be spent on a drafted token. Only what `may_draft`.
        """
        num_rows, lengths = len(chances), [0] * len(chances)
        likeliest = sorted(((chance, -i) for i, one in enumerate(chances) for chance in one), reverse=True)
        likeliest = likeliest[: max(_FIRST_TOKENS, 2 * self._widest)]
        num_tokens = list(accumulate((chance for chance, _ in likeliest), initial=float(num_rows)))
        best, least = 0, (1 - _MARGIN) * (self.expected(num_rows, 0) or 0.0) / num_rows
        for count in (*_SIZES[1 : bisect_left(_SIZES, len(likeliest))], len(likeliest)):
            each = ((self.expected(num_rows, count) or 0.0) + propose_s * count) / num_tokens[count]
            if each < least:
                best, least = count, each
        for _, place in likeliest[:best]:
            lengths[-place] += 1
        return lengths


def _size(num_drafted: int) -> int:
    return _SIZES[bisect_left(_SIZES, num_drafted)]
