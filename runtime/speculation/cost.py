"""What a drafted token costs in seconds, and how long drafts are worth it."""

from __future__ import annotations

from collections.abc import Sequence

_WEIGHT = 0.05
"""Of the newest step in the fit."""
_MIN_SPREAD = 0.1
"""Variance of the number of drafted tokens below which the fit knows nothing new."""
_OUTLIER = 4.0
"""A step that takes so many times what was expected was disturbed by something else."""


class StepCost:
    """Seconds of a step without prefill as `fixed + per_token * drafted`, for the present number of sequences.

    Fitted to exponentially weighted moments. Steps are compared only with others of as many sequences: what a further
    sequence costs says little about what a further token of a row costs.
    """

    def __init__(self) -> None:
        self.per_token = 0.0
        """0 until measured: then drafting is tried."""
        self.propose_s = 0.0
        """What the proposer takes for a token that it drafts."""
        self._num_rows = self._num_steps = 0
        self._drafted = self._seconds = 0.0
        self._spread = self._together = 0.0

    @property
    def fixed(self) -> float:
        """Seconds of a step without drafts; 0: not measured."""
        return max(self._seconds - self.per_token * self._drafted, 0.0)

    @property
    def wants_plain_step(self) -> bool:
        """All steps of late had as many drafted tokens: what these cost cannot be seen."""
        return self._spread < _MIN_SPREAD and self._drafted > 0.5

    def observe(self, num_rows: int, num_drafted: int, seconds: float) -> None:
        if num_rows != self._num_rows:
            self._num_rows, self._drafted, self._seconds, self._num_steps = num_rows, num_drafted, seconds, 1
            return
        self._num_steps += 1
        weight = max(_WEIGHT, 1 / self._num_steps)
        more_tokens = num_drafted - self._drafted
        expected = self._seconds + max(self.per_token * more_tokens, 0.0)
        more_seconds = min(seconds, _OUTLIER * expected) - self._seconds
        self._drafted += weight * more_tokens
        self._seconds += weight * more_seconds
        self._spread += _WEIGHT * ((1 - weight) * more_tokens**2 - self._spread)
        self._together += _WEIGHT * ((1 - weight) * more_tokens * more_seconds - self._together)
        if self._spread >= _MIN_SPREAD:
            self.per_token = max(self._together / self._spread, 0.0)

    def observe_proposals(self, num_tokens: int, seconds: float) -> None:
        if num_tokens:
            self.propose_s += (seconds / num_tokens - self.propose_s) * (_WEIGHT if self.propose_s else 1.0)

    def lengths(self, rates: Sequence[float], longest: Sequence[int]) -> list[int]:
        """How many tokens to draft for each sequence of a step, at most `longest`.

        One more is drafted where the chance that it is accepted, times the seconds that a token takes so far, exceeds
        what it costs: so the batch as a whole gets its tokens soonest. None before a step was measured. Source:
        Leviathan et al. 2023, section 3.1 (`1 + r + … + r^k` tokens from k drafted ones).
        """
        lengths = [0] * len(rates)
        num_tokens, seconds, cost = float(len(rates)), self.fixed, self.per_token + self.propose_s
        chances = [1.0] * len(rates)
        for length in range(1, max(longest, default=0) + 1):
            for i, rate in enumerate(rates):
                chance = chances[i] * rate
                if lengths[i] == length - 1 < longest[i] and chance * seconds > cost * num_tokens:
                    lengths[i], chances[i] = length, chance
                    num_tokens += chance
                    seconds += cost
        return lengths
