"""The consumer's end of a request: events out, stop and close in. Knows nothing of groups."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from kvferry.runtime.errors import Cancelled, ClientTooSlow, KvferryError
from kvferry.runtime.request import TokenEvent, Usage
from kvferry.runtime.timeline import Phase, Span, Timeline

EVENT_BYTES = 400
"""About what an event takes in memory, without alternatives to its token."""
ALTERNATIVE_BYTES = 120


class RequestStream:
    """An async iterator of all sequences' events, each (index, position) once, in order of position per index.

    Raises the request's error after the events that came before it. A slow consumer holds up nobody: what it has not
    read waits here, up to `max_bytes` (estimated); beyond that the request ends with `ClientTooSlow` and what waited
    is dropped. Use `contextlib.aclosing`: leaving early cancels the request.
    """

    def __init__(
        self,
        timeline: Timeline,
        usage: Callable[[], Usage],
        on_stop: Callable[[int, int], None],
        on_end: Callable[[KvferryError], None],
        now_ns: Callable[[], int],
        max_bytes: int,
    ) -> None:
        self.timeline = timeline
        self._usage = usage
        self._on_stop = on_stop
        self._on_end = on_end
        self._now_ns = now_ns
        self._max_bytes = max_bytes
        self._num_bytes = 0
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
                self._note_delivery()
                raise StopAsyncIteration
            self._ready.clear()
            await self._ready.wait()
        event = self._events.popleft()
        self._num_bytes -= _size(event)
        return event

    def _note_delivery(self) -> None:
        """Between its last token and now the request waited for its reader."""
        times, now_ns = self.timeline, self._now_ns()
        if times.spans and times.spans[-1].end_ns < now_ns:
            times.spans.append(Span(Phase.DELIVERY, times.spans[-1].end_ns, now_ns))

    def arrived(self) -> list[TokenEvent]:
        """What has come and was not read yet, without waiting: for a consumer that has fallen behind."""
        events = list(self._events)
        self._drop()
        return events

    def _drop(self) -> None:
        self._events.clear()
        self._num_bytes = 0

    def stop(self, index: int) -> None:
        """Enough of this sequence: it is cancelled, counts as ended, and what was not read of it is dropped.

        Idempotent.
        """
        unread = [event for event in self._events if event.key.index == index]
        self._events = deque(event for event in self._events if event.key.index != index)
        self._num_bytes = sum(map(_size, self._events))
        self._on_stop(index, sum(event.token_id is not None for event in unread))

    async def aclose(self) -> None:
        """As `close`, for `contextlib.aclosing`."""
        self.close()

    def close(self) -> None:
        """Cancels what still runs and drops what was not read. Idempotent."""
        self._on_end(Cancelled("closed by its consumer"))
        self._drop()
        self._error = None

    # ------------------------------------------------------------ the coordinator's side
    def push(self, event: TokenEvent) -> None:
        self._events.append(event)
        self._num_bytes += _size(event)
        self._ready.set()
        if self._num_bytes > self._max_bytes:
            unread = f"{len(self._events)} tokens and their log-probabilities were not read"
            self._on_end(ClientTooSlow(f"{unread}: more than {self._max_bytes} bytes (--max-unread); read faster"))
            self._drop()

    def end(self, error: KvferryError | None) -> None:
        """Nothing more will come."""
        self._ended = True
        self._error = error
        self._ready.set()


def _size(event: TokenEvent) -> int:
    return EVENT_BYTES + (0 if event.logprob is None else ALTERNATIVE_BYTES * len(event.logprob.top))
