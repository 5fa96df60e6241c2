"""An asyncio event loop whose time passes only when everybody waits. No threads, no sockets, no real time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, TypeVar, TypeVarTuple

START_NS = 1_000_000_000_000
"""The wall clock of a process without skew, when the loop's time is 0."""
T = TypeVar("T")
Ts = TypeVarTuple("Ts")


MAX_ROUNDS = 20_000
"""Of callbacks within one moment: more is somebody who never waits."""


ROUND_S = 1e-9
"""That a round takes, so that waits of no length at all come to their end."""


class Deadlock(RuntimeError):
    """Everybody waits for something that cannot happen any more, or somebody never waits."""


class _Waits:
    """In place of a selector: instead of waiting, lets the time pass."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._num_rounds = 0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise Deadlock("everybody waits for something that cannot happen any more")
        self._loop.now += timeout + ROUND_S
        if timeout > ROUND_S:
            self._num_rounds = 0
        self._num_rounds += 1
        if self._num_rounds > MAX_ROUNDS:
            raise Deadlock(f"time stands still for {self._num_rounds} rounds: {self._loop.shown_ready()}")
        return []

    def close(self) -> None:
        """Nothing is open."""


class VirtualLoop(asyncio.BaseEventLoop):
    """Runs callbacks of one moment in the order in which they were called for."""

    _ready: deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self._selector = _Waits(self)

    def time(self) -> float:
        return self.now

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def shown_ready(self) -> str:
        return ", ".join(repr(handle) for handle in [*self._ready, *self._scheduled][:4])

    def _process_events(self, event_list: list[Any]) -> None:
        """There are none."""

    def _write_to_self(self) -> None:
        """Nobody else could be woken."""


def run(main: Coroutine[Any, Any, T]) -> T:
    """Runs to the end. Tasks that are left are cancelled."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


class SkewedClock:
    """A process's wall clock; implements `ports.Clock`."""

    def __init__(self, skew_ns: int = 0) -> None:
        self.skew_ns = skew_ns
        self._time = asyncio.get_running_loop().time

    def now_ns(self) -> int:
        return START_NS + self.skew_ns + int(self._time() * 1e9)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
