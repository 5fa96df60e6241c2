"""What becomes of drafted tokens, and how often they came true."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.runtime.step import SampledToken

_MEMORY = 0.9
"""What an earlier trial weighs after each further one."""
_MIN_PAUSE, _MAX_PAUSE = 8, 128
"""Steps without drafts after which a sequence tries again: doubled by each trial that does not change that."""


def accept(draft: Sequence[int], drawn: Sequence[SampledToken]) -> list[SampledToken]:
    """The model's own draws, as far as it has seen the right tokens before them: up to the first that was not drafted.

    `drawn`: one draw behind the row's last known token and one behind each drafted token. Each is what the model draws
    at its position after just these tokens, so what is returned is what it would have drawn one step at a time.
    """
    for i, token in enumerate(draft):
        if drawn[i].token_id != token:
            return list(drawn[: i + 1])
    return list(drawn)


class Record:
    """How often one sequence's drafts came true. `rate`: chance of the next drafted token, if those before it did."""

    __slots__ = ("_hits", "_idle", "_pause", "_trials")

    def __init__(self) -> None:
        self._hits, self._trials = 1.0, 2.0  # before anything is known: one in two
        self._idle = 0
        self._pause = _MIN_PAUSE

    @property
    def rate(self) -> float:
        return self._hits / self._trials

    def judge(self, num_drafted: int, num_accepted: int) -> None:
        """Of drafted tokens that were checked. Those behind the first wrong one say nothing."""
        for hit in [1.0] * num_accepted + [0.0] * (num_accepted < num_drafted):
            self._hits = self._hits * _MEMORY + hit
            self._trials = self._trials * _MEMORY + 1.0

    def note(self, pays: bool) -> None:
        """Whether drafting is worth it in this step."""
        self._idle = 0 if pays else self._idle + 1
        self._pause = _MIN_PAUSE if pays else self._pause

    def may_try(self) -> bool:
        """It has not paid for so long that it is time to see whether that is still so; counts as the trial."""
        if self._idle < self._pause:
            return False
        self._idle, self._pause = 0, min(2 * self._pause, _MAX_PAUSE)
        return True
