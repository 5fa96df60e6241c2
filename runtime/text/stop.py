"""Finds stop strings in text that comes in pieces, and holds back what may still become one."""

from __future__ import annotations


class StopMatcher:
    """Behaves as if it read one character at a time: the stop string that is complete first ends the text.

    Of several that end at the same character, the one that begins first counts.
    """

    def __init__(self, stops: list[str]) -> None:
        self._stops = stops
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """(text that is safe to show, whether a stop string was found). Nothing may be pushed after a find."""
        if not self._stops:
            return text, False
        held = self._held + text
        matches = [(at + len(stop), at) for stop in self._stops if (at := held.find(stop)) >= 0]
        if matches:
            self._held = ""
            return held[: min(matches)[1]], True
        keep = max(_overlap(held, stop) for stop in self._stops)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep], False

    def flush(self) -> str:
        """What was held back; the text is over."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
