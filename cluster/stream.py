"""The consumer's end of a request: events out, stop and close in. Knows nothing of groups."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from kvferry.runtime.errors import KvferryError
from kvferry.runtime.request import TokenEvent, Usage
from kvferry.runtime.timeline import Timeline


class RequestStream:
    """An async iterator of all sequences' events, each (index, position) once, in order of position per index.

    Raises the request's error after the events that came before it. The buffer is bounded by `n * (max_tokens + 1)`
    events, so a slow consumer holds up nobody. Use `contextlib.aclosing`: leaving early cancels the request.
    """

    def __init__(
        self,
        timeline: Timeline,
        usage: Callable[[], Usage],
        on_stop: Callable[[int, int], None],
        on_close: Callable[[], None],
    ) -> None:
        self.timeline = timeline
        self._usage = usage
        self._on_stop = on_stop
        self._on_close = on_close
        self._events: deque[TokenEvent] = deque()
        self._ready = asyncio.Event()
        self._ended = False
        self._error: KvferryError | None = None

    @property
    def usage(self) -> Usage:
        """So far; final once the stream has ended."""
        return self._usage()

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> TokenEvent:
        while not self._events:
            if self._error is not None:
                raise self._error
            if self._ended:
                raise StopAsyncIteration
            self._ready.clear()
            await self._ready.wait()
        return self._events.popleft()

    def arrived(self) -> list[TokenEvent]:
        """What has come and was not read yet, without waiting: for a consumer that has fallen behind."""
        events = list(self._events)
        self._events.clear()
        return events

    def stop(self, index: int) -> None:
        """Enough of this sequence: it is cancelled, counts as ended, and what was not read of it is dropped.

        Idempotent.
        """
        unread = [event for event in self._events if event.key.index == index]
        self._events = deque(event for event in self._events if event.key.index != index)
        self._on_stop(index, sum(event.token_id is not None for event in unread))

    async def aclose(self) -> None:
        """As `close`, for `contextlib.aclosing`."""
        self.close()

    def close(self) -> None:
        """Cancels what still runs and drops what was not read. Idempotent."""
        self._on_close()
        self._events.clear()
        self._error = None

    # ------------------------------------------------------------ the coordinator's side
    def push(self, event: TokenEvent) -> None:
        self._events.append(event)
        self._ready.set()

    def end(self, error: KvferryError | None) -> None:
        """Nothing more will come."""
        self._ended = True
        self._error = error
        self._ready.set()
