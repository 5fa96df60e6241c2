"""The chaos suite's acting part against a server that lies, leaks and breaks; and the checks before a signal."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager

import msgspec
import psutil
import pytest

from kvferry.cluster import cli
from kvferry.cluster.api.grpc import make_server
from kvferry.cluster.chaos import plan
from kvferry.cluster.chaos import run as chaos_run
from kvferry.cluster.chaos.plan import ChaosConfig, FaultKind
from kvferry.cluster.chaos.processes import LocalProcesses, is_local, is_loopback
from kvferry.cluster.chaos.proxy import CuttableProxy
from kvferry.cluster.chaos.report import Report
from kvferry.cluster.chaos.run import Chaos
from kvferry.cluster.client import AsyncClient
from kvferry.cluster.service import (
    ChatMessage,
    ClusterView,
    Completed,
    Delta,
    GenerateCall,
    GroupView,
    ModelView,
    Started,
    StreamEvent,
)
from kvferry.runtime.errors import GroupUnavailable, InvalidArgument, NotFound
from kvferry.runtime.ids import RequestId
from kvferry.runtime.request import Usage
from kvferry.runtime.timeline import Timeline

STEP_S = 0.002
MODEL = ModelView(
    model="toy",
    dtype="float32",
    vocab_size=100,
    max_context=512,
    block_size=16,
    eos_token_ids=[0],
    has_chat_template=False,
)
CLIENT_FAULTS = (FaultKind.CUT, FaultKind.CANCEL)
CONFIG = ChaosConfig(seconds=1.0, clients=3, every_s=0.1, num_prompts=1, max_tokens=30, faults=CLIENT_FAULTS)


class ToyService:
    """Token i of an answer is a function of prompt, seed and i. `wrong`: what is not so, once faults may come."""

    def __init__(self, wrong: str = "") -> None:
        self.wrong = wrong
        self.num_asked = 0
        self.asked: set[tuple[tuple[int, ...], int | None]] = set()
        """Questions, once faults may come."""
        self.unsteady: set[int | None] = set()
        """Seeds of questions that are answered in two ways."""
        self.held: set[RequestId] = set()
        self.epochs = {"decode-0": 1, "decode-1": 1}
        self.states = dict.fromkeys(self.epochs, "live")

    async def generate(self, call: GenerateCall) -> AsyncIterator[StreamEvent]:
        if call.request_id in self.held:
            raise InvalidArgument("request_id", call.request_id, "is in flight already", "use a new id")
        self.held.add(call.request_id)
        whole = False
        try:
            async for event in self._events(call):
                yield event
            whole = True
        finally:
            if whole or self.wrong != "holds":
                self.held.discard(call.request_id)

    async def _events(self, call: GenerateCall) -> AsyncIterator[StreamEvent]:
        wrong = ""
        if "base" not in call.request_id and call.request_id.startswith("chaos-"):
            self.num_asked += 1
            wrong = self.wrong if self.num_asked % 3 == 0 else ""
            self.asked.add((tuple(call.token_ids or []), call.sampling.seed))
        yield Started(call.request_id, call.token_ids or [])
        num = call.sampling.max_tokens
        for i in range(num):
            await asyncio.sleep(STEP_S)
            if wrong == "fails" and i == 1:
                raise GroupUnavailable("no group lives")
            token = (sum(call.token_ids or []) + (call.sampling.seed or 0) + i * i) % 97
            token += wrong == "changes" and i == 0
            token += "base" in call.request_id and call.sampling.seed in self.unsteady
            repeat = 2 if wrong == "repeats" and i == 1 else 1
            for _ in range(0 if wrong == "loses" and i == 0 else repeat):
                yield Delta(0, [token], chr(97 + token % 26), finish_reason="length" if i == num - 1 else None)
        yield Completed(Usage(1, 0, num), Timeline(received_ns=0))

    async def cluster(self) -> ClusterView:
        groups = []
        for pid, (name, state) in enumerate(self.states.items()):
            zero = {f: 0 for f in GroupView.__struct_fields__ if f.startswith(("num_", "prompt", "cached", "received"))}
            rest = {"output_tokens": 0, "hit_rate": 0.0, "tp_size": 1, "role": "decode", "num_running": 1}
            known = {"group": name, "state": state, "epoch": self.epochs[name], "pids": [pid], **zero, **rest}
            groups.append(msgspec.convert(known, GroupView))
        return ClusterView(model="m", groups=groups, num_requests=0, num_finished=0, num_failed=0, num_resumed=0)

    async def audit(self) -> list[str]:
        return ["block 7 has no owner"] if self.wrong == "leaks" else []

    def model(self) -> ModelView:
        return MODEL

    def tokenize(self, text: str, add_special_tokens: bool) -> list[int]:
        raise NotImplementedError

    def tokenize_chat(self, messages: list[ChatMessage]) -> list[int]:
        raise NotImplementedError

    def detokenize(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        raise NotImplementedError


class ToyProcesses:
    """A kill starts the group anew; a stop makes it unreachable. `deaf`: neither does anything."""

    def __init__(self, service: ToyService, deaf: bool = False) -> None:
        self.service, self.deaf = service, deaf
        self.stopped: set[int] = set()
        self.num_signals = 0

    def check(self, groups: Sequence[GroupView]) -> None: ...

    def kill(self, pid: int) -> None:
        self.num_signals += 1
        if not self.deaf:
            self.service.epochs[f"decode-{pid}"] += 1

    def stop(self, pid: int) -> None:
        self.num_signals += 1
        self.stopped.add(pid)
        if not self.deaf:
            self.service.states[f"decode-{pid}"] = "unreachable"

    def go_on(self, pid: int) -> None:
        self.stopped.discard(pid)
        self.service.states[f"decode-{pid}"] = "live"

    def go_on_all(self) -> None:
        for pid in list(self.stopped):
            self.go_on(pid)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("RELEASE_TIMEOUT_S", 0.5), ("RETURN_TIMEOUT_S", 1.0), ("AUDIT_TIMEOUT_S", 0.2)):
        monkeypatch.setattr(chaos_run, name, seconds)
    monkeypatch.setattr(plan, "HOLD_S", (0.5, 0.6))


@asynccontextmanager
async def serving(service: ToyService) -> AsyncIterator[str]:
    server = make_server(service, "127.0.0.1", 0)
    await server.start()
    server.set_ready(True)
    try:
        yield f"127.0.0.1:{server.port}"
    finally:
        await server.stop(0)


async def hurt(service: ToyService, config: ChaosConfig = CONFIG, processes: ToyProcesses | None = None) -> Report:
    async with serving(service) as target:
        chaos = Chaos(config, target, AsyncClient, processes or ToyProcesses(service), lambda _said: None)
        return await chaos.run()


async def test_a_faultless_server_passes() -> None:
    """The suite accuses the innocent: of cancels and cuts that it made itself."""
    service = ToyService()
    report = await hurt(service)
    assert report.faults() == []
    costs = {cost.kind: cost for cost in report.costs}
    assert costs["cut"].num_observed > 2
    assert costs["cancel"].num_observed > 2
    assert (report.num_cut, report.num_cancelled) == (costs["cut"].num_observed, costs["cancel"].num_observed)
    assert report.num_complete > 5
    assert not service.held


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("changes", "changed answers"),
        ("repeats", "changed answers"),
        ("loses", "changed answers"),
        ("fails", "failed streams"),
        ("leaks", "1 audit findings"),
        ("holds", "things left behind"),
    ],
)
async def test_planted_faults_are_noticed(wrong: str, said: str) -> None:
    """A checker that checks nothing: each of these servers must be found out."""
    faults = (await hurt(ToyService(wrong))).faults()
    assert len(faults) == 1, faults
    assert said in faults[0]


async def test_questions_without_a_steady_answer_are_asked_no_more() -> None:
    """Rounding, where two tokens are equally likely, is taken for a consequence of the faults."""
    service = ToyService()
    config = msgspec.structs.replace(CONFIG, num_prompts=3)
    seeds = [case.sampling.seed for case in plan.make_cases(config, MODEL.vocab_size, [0], MODEL.max_context)]
    service.unsteady = {seeds[1]}
    report = await hurt(service, config)
    assert (report.faults(), report.num_unsteady) == ([], 1)
    assert {seed for _, seed in service.asked} == {None, seeds[3], seeds[5]}


@pytest.mark.parametrize("deaf", [False, True])
@pytest.mark.parametrize("kind", [FaultKind.KILL, FaultKind.STOP])
async def test_signals_are_counted_as_the_cluster_shows_them(kind: FaultKind, deaf: bool) -> None:
    """A signal that did nothing counts as a fault; or one that did, does not."""
    service = ToyService()
    processes = ToyProcesses(service, deaf)
    config = msgspec.structs.replace(CONFIG, faults=(kind,), every_s=0.3, seconds=1.2)
    report = await hurt(service, config, processes)
    cost = report.costs[0]
    assert cost.kind == kind
    assert processes.num_signals == cost.num_sent > 0
    assert (cost.num_observed > 0) is not deaf
    assert not processes.stopped


@pytest.mark.parametrize("way", ["interrupt", "cancel"])
async def test_whatever_was_stopped_goes_on_however_the_run_ends(way: str) -> None:
    """Ctrl-C leaves a worker stopped for ever."""
    service = ToyService()
    processes = ToyProcesses(service)
    config = msgspec.structs.replace(CONFIG, faults=(FaultKind.STOP,), seconds=60)
    async with serving(service) as target:
        chaos = Chaos(config, target, AsyncClient, processes, lambda _said: None)
        run = asyncio.create_task(chaos.run())
        async with asyncio.timeout(10):
            while not processes.stopped:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            if way == "cancel":
                run.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await run
            else:
                chaos.interrupt.set()
                assert (await run).run.interrupted
    assert not processes.stopped


async def test_a_cut_breaks_the_streams_of_one_proxy_only() -> None:
    """Others' connections break too, the cut one does not, or nothing can connect again."""
    async with serving(ToyService()) as target, CuttableProxy(target) as first, CuttableProxy(target) as second:
        async with AsyncClient(first.address) as one, AsyncClient(second.address) as other:
            streams = [client.stream(token_ids=[1], max_tokens=200) for client in (one, other)]
            async with aclosing(streams[0]) as cut, aclosing(streams[1]) as whole:
                await anext(cut)
                await anext(whole)
                assert first.cut() == 1
                with pytest.raises(GroupUnavailable):
                    async for _ in cut:
                        pass
                assert isinstance([event async for event in whole][-1], Completed)
        async with AsyncClient(first.address) as again:
            assert (await again.model()).model == "toy"


async def test_a_new_client_has_a_connection_of_its_own() -> None:
    """gRPC shares connections within a process: who makes a client anew after a break may get the broken one again."""
    async with (
        serving(ToyService()) as target,
        CuttableProxy(target) as proxy,
        AsyncClient(proxy.address) as one,
        AsyncClient(proxy.address) as other,
    ):
        await asyncio.gather(one.model(), other.model())
        assert proxy.cut() == 2


# ---------------------------------------------------------------- signals
@pytest.fixture
def worker() -> Iterator[subprocess.Popen[bytes]]:
    """A process whose title is a worker's. Linux has no title to show between the start of `exec` and its end."""
    process = subprocess.Popen(["ray::Worker.wait_end", "60"], executable="/bin/sleep")
    deadline = time.monotonic() + 10
    while not psutil.Process(process.pid).cmdline():
        assert time.monotonic() < deadline
        time.sleep(0.001)
    yield process
    process.kill()
    process.wait()


def test_workers_are_stopped_let_go_on_and_killed(worker: subprocess.Popen[bytes]) -> None:
    """A signal does not arrive, or to a process that was not stopped here."""
    processes, seen = LocalProcesses("127.0.0.1:1"), psutil.Process(worker.pid)
    processes.stop(worker.pid)
    os.waitpid(worker.pid, os.WUNTRACED)
    assert seen.status() == psutil.STATUS_STOPPED
    processes.go_on_all()
    processes.go_on_all()
    assert seen.status() != psutil.STATUS_STOPPED
    processes.kill(worker.pid)
    assert worker.wait(10) == -signal.SIGKILL
    processes.go_on(worker.pid)
    with pytest.raises(NotFound):
        processes.kill(worker.pid)


def test_what_is_no_worker_is_never_signalled(worker: subprocess.Popen[bytes]) -> None:
    """A pid of another machine, or one that was used again, hits some other process of the user."""
    processes = LocalProcesses("127.0.0.1:1")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        for act in (processes.kill, processes.stop):
            with pytest.raises(InvalidArgument, match="no kvferry worker"):
                act(other.pid)
        assert other.poll() is None
        other.kill()
    with pytest.raises(InvalidArgument, match="no kvferry worker"):
        processes.kill(os.getpid())


def test_workers_of_another_user_are_refused(worker: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """Root hurts everybody."""
    monkeypatch.setattr(os, "getuid", lambda: 4242)
    with pytest.raises(InvalidArgument, match="user"):
        LocalProcesses("127.0.0.1:1").stop(worker.pid)
    assert psutil.Process(worker.pid).status() != psutil.STATUS_STOPPED


def test_workers_of_another_machine_are_refused() -> None:
    """Process ids mean something else there."""
    with pytest.raises(InvalidArgument, match="another machine"):
        LocalProcesses("203.0.113.1:50051").check([])
    LocalProcesses("127.0.0.1:50051").check([])
    assert is_local("::1") or not is_loopback("::1")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--faults", "gateway"), "faults="),
        (("--minutes", "0"), "minutes="),
        (("--tls",), "leave it out: --faults kill,stop,cancel"),
        (("--target", "203.0.113.1:5"), "confirm with --yes"),
        (("--target", "203.0.113.1:5", "--yes", "--timeout-s", "0.1"), "timeout_s="),
    ],
)
def test_commands_that_are_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], said: str
) -> None:
    """A server that is not this machine's is hurt without being asked; or a mistake ends in a traceback."""
    with pytest.raises(SystemExit) as caught:
        cli.main(["chaos", *arguments])
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("wrong", "json", "code"), [("", True, 0), ("leaks", False, 1)])
async def test_command(capsys: pytest.CaptureFixture[str], wrong: str, json: bool, code: int) -> None:
    """The exit code does not tell, or scripts get no JSON."""
    options = ("--minutes", "0.01", "--every-s", "0.1", "--clients", "4", "--faults", "cancel", "--max-tokens", "10")

    def call(target: str) -> int:
        try:
            cli.main(["chaos", *options, *["--json"] * json, "--target", target])
        except SystemExit as ended:
            return int(ended.code or 0)
        return 0

    async with serving(ToyService(wrong)) as target:
        assert await asyncio.to_thread(call, target) == code
    out, err = capsys.readouterr()
    assert "1 s of faults: cancel" in err
    if json:
        report = msgspec.json.decode(out)
        assert (report["faults"], report["run"]["target"]) == ([], target)
    else:
        assert "observed" in out
        assert "audit: block 7" in out
