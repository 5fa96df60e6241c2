"""What happened in a run: a digest of all of it, counts of the faults that were observed, and what went wrong."""

from __future__ import annotations

import asyncio
import zlib
from collections import Counter, deque
from collections.abc import Callable

KEPT_LINES = 4000


class Trace:
    """`keep`: also as lines of text."""

    def __init__(self, keep: bool = False) -> None:
        self._loop = asyncio.get_running_loop()
        self._digest = 0
        self._over = False
        self.num_events = 0
        self.observed: Counter[str] = Counter()
        """Faults that were seen to take effect, by kind."""
        self.failures: list[str] = []
        self._waiting: dict[int, list[Callable[[], None]]] = {}
        self.lines: deque[str] | None = deque(maxlen=KEPT_LINES) if keep else None

    def over(self) -> None:
        """The run has been judged; how it goes down (tasks are cancelled in no particular order) does not count."""
        self._over = True

    def at_event(self, number: int, what: Callable[[], None]) -> None:
        """Calls right after the event of that number, or never."""
        self._waiting.setdefault(number, []).append(what)

    def _count(self) -> None:
        self.num_events += 1
        for what in self._waiting.pop(self.num_events, ()):
            self._loop.call_soon(what)

    def frame(self, sender: str, receiver: str, data: bytes) -> None:
        """A frame has arrived."""
        if self._over:
            return
        self._count()
        self._digest = zlib.crc32(data, zlib.crc32(b"%.9f" % self._loop.time(), self._digest))
        if self.lines is not None:
            self.lines.append(f"{self._loop.time():9.4f} {sender} > {receiver}: {data!r:.300}")

    def note(self, kind: str, *values: object) -> None:
        """Anything else that happens. `values` must look the same in every process."""
        if self._over:
            return
        self._count()
        text = f"{self._loop.time():9.4f} {kind} {' '.join(map(str, values))}"
        self._digest = zlib.crc32(text.encode(), self._digest)
        if self.lines is not None:
            self.lines.append(text)

    def fault(self, kind: str, *values: object) -> None:
        """A fault took effect."""
        self.observed[kind] += 1
        self.note(kind, *values)

    def failed(self, what: str) -> None:
        """A promise was broken."""
        self.failures.append(what)
        self.note("FAILED", what)

    @property
    def digest(self) -> str:
        return f"{self._digest:08x}-{self.num_events}"
