"""Clients in a closed loop: each has a connection of its own and asks its next question when the last is answered."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing

from kvferry.cluster.chaos.plan import Case, ChaosConfig, FaultKind, choose
from kvferry.cluster.chaos.proxy import CuttableProxy
from kvferry.cluster.chaos.streams import Fate, Outcome, Reference, Stream, outcome
from kvferry.cluster.client import AsyncClient
from kvferry.runtime.errors import KvferryError

FAILURE_PAUSE_S = 0.5
"""A server that refuses everything is not asked in a tight loop."""
LEAVE_TIMEOUT_S, BEGIN_TIMEOUT_S = 10.0, 1.0
MakeClient = Callable[[str], AsyncClient]


class Load:
    """`run` it in a task; meanwhile `cut` and `cancel` what is `running`."""

    def __init__(
        self,
        name: str,
        target: str,
        make_client: MakeClient,
        cases: Sequence[Case],
        references: Mapping[int, Reference],
        config: ChaosConfig,
        num_streams: int | None = None,
    ) -> None:
        """`num_streams`: how many to start in all, of each case in turn; `None`: of any case, until `finish`."""
        self._name = name
        self._target = target
        self._make_client = make_client
        self._cases = cases
        self._references = references
        self._config = config
        self._num_left = num_streams
        self._finishing = False
        self._running: dict[int, tuple[Stream, asyncio.Task[None]]] = {}
        self._began = asyncio.Event()
        self._proxies: dict[int, CuttableProxy] = {}
        self.outcomes: list[Outcome] = []

    @property
    def running(self) -> list[Stream]:
        """That nothing has been done to yet."""
        return [stream for stream, _ in self._running.values() if stream.fate is Fate.RUNNING and not stream.wanted]

    async def early(self, pick: float) -> Stream | None:
        """A stream that is less than half done; waits, bounded, for one to begin. `None`: there is none."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(BEGIN_TIMEOUT_S):
                while not (streams := [stream for stream in self.running if stream.early]):
                    self._began.clear()
                    await self._began.wait()
                return choose(streams, pick)
        return None

    def finish(self) -> None:
        """No new streams; those that run go on to their end."""
        self._finishing = True

    async def cancel(self, stream: Stream) -> None:
        """Returns when the client has left."""
        task = self._running[stream.client][1]
        stream.wanted = FaultKind.CANCEL
        task.cancel()
        await asyncio.wait({task}, timeout=LEAVE_TIMEOUT_S)

    async def cut(self, stream: Stream) -> None:
        """Returns when the client has noticed; at the latest after `LEAVE_TIMEOUT_S`."""
        task = self._running[stream.client][1]
        stream.wanted = FaultKind.CUT
        self._proxies[stream.client].cut()
        await asyncio.wait({task}, timeout=LEAVE_TIMEOUT_S)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for number in range(self._config.clients):
                tasks.create_task(self._client(number, tasks), name=f"client {number}")

    async def _client(self, number: int, tasks: asyncio.TaskGroup) -> None:
        rng = random.Random(f"{self._name} {self._config.seed} {number}")
        async with AsyncExitStack() as stack:
            address = self._target
            if FaultKind.CUT in self._config.faults:
                proxy = await stack.enter_async_context(CuttableProxy(self._target))
                self._proxies[number], address = proxy, proxy.address
            client = self._make_client(address)
            try:
                for count in range(1 << 62):
                    if not self._take_turn():
                        return
                    stream = await self._one(client, number, count, rng, tasks)
                    # Also when the answer was complete before the cut took effect: the next one must not meet it. And a
                    # channel that was cut may wait before it connects again.
                    if stream.wanted is FaultKind.CUT:
                        await client.close()
                        client = self._make_client(address)
                    elif stream.fate is Fate.FAILED:
                        await asyncio.sleep(FAILURE_PAUSE_S)
            finally:
                await client.close()

    async def _one(
        self, client: AsyncClient, number: int, count: int, rng: random.Random, tasks: asyncio.TaskGroup
    ) -> Stream:
        """Asks a question and waits for the end of its answer, whatever that is."""
        at = rng.randrange(len(self._cases)) if self._num_left is None else self._num_left % len(self._cases)
        case, name = self._cases[at], f"{self._name}-{number}-{count}"
        stream = Stream(request_id=name, case=case, client=number, begin_ns=time.monotonic_ns())
        # Half of the answers begin with what the caches hold, half with nothing.
        task = tasks.create_task(self._read(client, stream, name if rng.random() < 0.5 else ""), name=name)
        self._running[number] = stream, task
        self._began.set()
        await asyncio.wait({task})
        del self._running[number]
        stream.end(Fate.CANCELLED, time.monotonic_ns())  # if it was cancelled before it began
        self.outcomes.append(outcome(stream, self._references[case.number]))
        return stream

    def _take_turn(self) -> bool:
        if self._num_left is not None:
            self._num_left -= 1
            return self._num_left >= 0
        return not self._finishing

    async def _read(self, client: AsyncClient, stream: Stream, cache_salt: str) -> None:
        events = client.stream(
            token_ids=stream.case.prompt,
            sampling=stream.case.sampling,
            request_id=stream.request_id,
            cache_salt=cache_salt,
            timeout_s=self._config.stream_timeout_s,
        )
        try:
            async with aclosing(events):
                async for event in events:
                    stream.take(event, time.monotonic_ns())
            stream.end(Fate.FAILED, time.monotonic_ns(), "it ended without a final message")
        except KvferryError as error:
            cut = stream.wanted is FaultKind.CUT
            stream.end(Fate.CUT if cut else Fate.FAILED, time.monotonic_ns(), f"{error.label}: {error}")
        except asyncio.CancelledError:
            ours = stream.wanted is FaultKind.CANCEL
            stream.end(Fate.CANCELLED if ours else Fate.FAILED, time.monotonic_ns(), "" if ours else "interrupted")
            if not ours:
                raise
