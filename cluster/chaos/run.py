"""A whole run: references, a time without faults, a time with them, and what is left at the end.

references ─▶ baseline ─▶ load + faults + watch ─▶ load ends ─▶ all groups live? ─▶ audit ─▶ report
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import aclosing
from typing import Any

from kvferry.cluster.chaos.faults import Fault, FaultLog, Victim, all_live, choose_victim
from kvferry.cluster.chaos.load import Load, MakeClient
from kvferry.cluster.chaos.plan import (
    PROCESS_FAULTS,
    Case,
    ChaosConfig,
    FaultKind,
    Planned,
    make_cases,
    plan_faults,
)
from kvferry.cluster.chaos.processes import Processes
from kvferry.cluster.chaos.report import Report, RunFacts, make_report
from kvferry.cluster.chaos.streams import Fate, Reference, Stream
from kvferry.cluster.client import AsyncClient
from kvferry.runtime.errors import InvalidArgument, KvferryError, NotFound

BASELINE_ROUNDS = 3
"""How often each question is asked without faults, in ever other batches. Those whose answers are not steady even then
(two tokens equally likely, but for rounding) are asked no more."""
WATCH_S = 0.2
CALL_TIMEOUT_S = 10.0
RELEASE_TIMEOUT_S = 10.0
"""After a cancel or a cut, for the server to let go of the request."""
RETURN_TIMEOUT_S = 120.0
"""After the last fault, for all groups to live."""
SURELY_S = 0.5
AUDIT_TIMEOUT_S = 30.0
"""Longer than a lease: what a broken client left behind lapses."""


class Chaos:
    """One run against one deployment. Set `interrupt` to end the time of faults early."""

    def __init__(
        self,
        config: ChaosConfig,
        target: str,
        make_client: MakeClient,
        processes: Processes,
        say: Callable[[str], None],
    ) -> None:
        """`make_client`: to an address, which may be that of a proxy before `target`."""
        self._config = config
        self._target = target
        self._make_client = make_client
        self._processes = processes
        self._say = say
        self._name = f"chaos-{secrets.token_hex(3)}"
        self._log = FaultLog()
        self._left_behind: list[str] = []
        self._well = asyncio.Event()
        self.interrupt = asyncio.Event()

    async def run(self) -> Report:
        """Leaves no process stopped, however it ends."""
        config = self._config
        async with self._make_client(self._target) as admin:
            model, view = await admin.model(), await admin.cluster()
            if PROCESS_FAULTS & set(config.faults):
                self._processes.check(view.groups)
            cases = make_cases(config, model.vocab_size, model.eos_token_ids, model.max_context)
            self._say(f"{len(cases)} undisturbed answers")
            references = {case.number: await self._reference(admin, case) for case in cases}
            num_streams = max(BASELINE_ROUNDS * len(cases), 4 * config.clients)
            baseline = self._load("base", cases, references, num_streams)
            self._say(f"{config.clients} clients without faults")
            await baseline.run()
            unsteady = {o.change.case for o in baseline.outcomes if o.change is not None}
            load = self._load("", [c for c in cases if c.number not in unsteady] or cases, references)
            self._say(f"{config.seconds:.0f} s of faults: {', '.join(config.faults)}")
            try:
                seconds = await self._disturb(admin, load)
            finally:
                self._processes.go_on_all()
            facts = RunFacts(
                target=self._target,
                dtype=model.dtype,
                seed=config.seed,
                num_cases=len(cases),
                seconds=seconds,
                interrupted=self.interrupt.is_set(),
                left_behind=self._left_behind,
                findings=await self._findings(admin),
            )
        self._log.close(time.monotonic_ns())
        return make_report(self._log, load.outcomes, baseline.outcomes, facts)

    # ------------------------------------------------------------ phases
    def _load(
        self, name: str, cases: list[Case], references: dict[int, Reference], num_streams: int | None = None
    ) -> Load:
        name = "-".join(filter(None, (self._name, name)))
        return Load(name, self._target, self._make_client, cases, references, self._config, num_streams)

    async def _reference(self, admin: AsyncClient, case: Case) -> Reference:
        answer = await admin.generate(
            token_ids=case.prompt, sampling=case.sampling, timeout_s=self._config.stream_timeout_s
        )
        output = answer.outputs[0]
        return Reference(output.token_ids, output.text, output.finish_reason)

    async def _disturb(self, admin: AsyncClient, load: Load) -> float:
        """The time of faults, and until the groups have recovered. Returns how long the load lasted."""
        begin = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            watch = tasks.create_task(self._watch(admin), name="watch")
            clients = tasks.create_task(load.run(), name="load")
            await self._inject(admin, load, begin)
            load.finish()
            await asyncio.wait({clients})
            seconds = time.monotonic() - begin
            self._well.clear()
            with contextlib.suppress(TimeoutError):  # the audit's findings say who is missing
                async with asyncio.timeout(RETURN_TIMEOUT_S):
                    await self._well.wait()
            watch.cancel()
        return seconds

    async def _watch(self, admin: AsyncClient) -> None:
        """Looks at the cluster for as long as it is not cancelled."""
        while True:
            with contextlib.suppress(KvferryError):  # its streams tell whether that was a failure
                view = await admin.cluster()
                self._log.on_view(view, time.monotonic_ns())
                if all_live(view.groups) and not self._log.busy():
                    self._well.set()
            await asyncio.sleep(WATCH_S)

    async def _findings(self, admin: AsyncClient) -> list[str]:
        """Of the audit, once it says the same for `AUDIT_TIMEOUT_S`; and groups that do not live."""
        deadline = time.monotonic() + AUDIT_TIMEOUT_S
        while True:
            try:
                findings = (await admin.audit()).findings
                groups = (await admin.cluster()).groups
                findings += [f"{g.group}@{g.epoch}: {g.state}" for g in groups if not all_live([g])]
            except KvferryError as error:
                findings = [f"no audit: {error}"]
            if not findings or time.monotonic() > deadline:
                return findings
            await asyncio.sleep(1.0)

    # ------------------------------------------------------------ faults
    async def _inject(self, admin: AsyncClient, load: Load, begin: float) -> None:
        async with asyncio.TaskGroup() as aftermaths:
            for planned in plan_faults(self._config):
                if await self._interrupted_before(begin + planned.at_s):
                    return
                begun = await self._begin(planned, admin, load)
                if begun is None:
                    self._log.skip(planned.kind)
                else:
                    aftermaths.create_task(begun)
            await self._interrupted_before(begin + self._config.seconds)

    async def _interrupted_before(self, instant: float) -> bool:
        """Waits until then, or for the interrupt."""
        try:
            async with asyncio.timeout(max(0.0, instant - time.monotonic())):
                return await self.interrupt.wait()
        except TimeoutError:
            return False

    async def _begin(self, planned: Planned, admin: AsyncClient, load: Load) -> Coroutine[Any, Any, None] | None:
        """Does the fault; returns what is to be done about it later. `None`: there is nobody to hit."""
        if planned.kind not in PROCESS_FAULTS:
            stream = await load.early(planned.pick)
            if stream is None:
                return None
            leave = load.cancel if planned.kind is FaultKind.CANCEL else load.cut
            return self._leave(planned.kind, stream, leave, admin)
        try:
            victim = choose_victim(await admin.cluster(), self._log.busy(), planned)
        except KvferryError:
            return None
        return None if victim is None else self._signal(planned, victim)

    def _signal(self, planned: Planned, victim: Victim) -> Coroutine[Any, Any, None] | None:
        try:
            send = self._processes.kill if planned.kind is FaultKind.KILL else self._processes.stop
            send(victim.pid)
        except (NotFound, InvalidArgument) as error:  # it ended meanwhile, or was replaced on another machine
            self._say(f"no {planned.kind}: {error}")
            return None
        fault = self._fault(planned.kind, group=victim.group, epoch=victim.epoch, rank=victim.rank)
        return self._hold(fault, victim.pid, 0.0 if planned.kind is FaultKind.KILL else planned.hold_s)

    async def _hold(self, fault: Fault, pid: int, hold_s: float) -> None:
        """Until a stopped process is let go on. A killed one needs nothing."""
        await self._interrupted_before(time.monotonic() + hold_s)
        self._processes.go_on(pid)
        fault.released_ns = time.monotonic_ns()

    async def _leave(
        self, kind: FaultKind, stream: Stream, leave: Callable[[Stream], Awaitable[None]], admin: AsyncClient
    ) -> None:
        fault = self._fault(kind, request_id=stream.request_id)
        await leave(stream)
        left_ns = time.monotonic_ns()
        if stream.fate is Fate.CUT:
            fault.observe(left_ns, "the stream broke")
        elif stream.fate is not Fate.CANCELLED:  # its answer was complete first
            fault.end_ns = left_ns
            return
        if not await self._released(admin, stream):
            what = f"request {stream.request_id} {RELEASE_TIMEOUT_S:g} s after its client's {kind}"
            self._left_behind.append(f"{what}: the server still holds it")
            return
        fault.end_ns = time.monotonic_ns()
        if (fault.end_ns - left_ns) / 1e9 < max(SURELY_S, stream.rest_s / 2):
            fault.observe(fault.end_ns, "the server let go")

    async def _released(self, admin: AsyncClient, stream: Stream) -> bool:
        """Whether the server has let go of the request: only then does it accept the id again."""
        deadline = time.monotonic() + RELEASE_TIMEOUT_S
        while time.monotonic() < deadline:
            again = admin.stream(
                token_ids=stream.case.prompt, max_tokens=1, request_id=stream.request_id, timeout_s=CALL_TIMEOUT_S
            )
            try:
                async with aclosing(again):
                    await anext(again)
                return True
            except InvalidArgument as error:
                if error.field != "request_id":
                    raise
            except KvferryError:  # the server has other worries at the moment
                pass
            await asyncio.sleep(WATCH_S)
        return False

    def _fault(self, kind: FaultKind, **fields: Any) -> Fault:
        return self._log.add(Fault(kind=kind, begin_ns=time.monotonic_ns(), **fields))
