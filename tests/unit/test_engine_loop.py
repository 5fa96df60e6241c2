"""The engine's thread: who gets which token, what a lost gateway leaves behind, what a broken engine does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvferry.cluster import messages as m
from kvferry.cluster.engine_driver import GatewayClosed, Output
from kvferry.cluster.engine_loop import EngineLoop
from kvferry.runtime.errors import InvariantBroken, NotFound
from kvferry.runtime.ids import TransferId
from kvferry.runtime.kv.hashing import hash_chain
from kvferry.runtime.transfer.ticket import ExpectRequest, LinkDown
from tests.support import toy_shell as toy

pytestmark = pytest.mark.core


class Recorder:
    """A sink that remembers, and lets a test wait for what it needs."""

    def __init__(self) -> None:
        self.outputs: list[Output] = []
        self.replies: list[tuple[str, Any]] = []
        self.crashes: list[str] = []
        self._news = threading.Condition()

    def output(self, output: Output) -> None:
        with self._news:
            self.outputs.append(output)
            self._news.notify_all()

    def reply(self, gateway: str, reply: Any) -> None:
        with self._news:
            self.replies.append((gateway, reply))
            self._news.notify_all()

    def crash(self, reason: str) -> None:
        with self._news:
            self.crashes.append(reason)
            self._news.notify_all()

    def wait(self, until: Callable[[], bool]) -> None:
        with self._news:
            assert self._news.wait_for(until, timeout=5), (self.outputs, self.replies, self.crashes)

    def tokens(self, gateway: str) -> list[int | None]:
        return [event.token_id for output in self.outputs for event in output.tokens.get(gateway, [])]


class Rig:
    def __init__(self) -> None:
        self.engine = toy.engine()
        self.seen = Recorder()
        self.working_rests: list[bool] = []
        """Whether there was work, each time the loop said that there is none."""
        self.loop = EngineLoop(
            self.engine,
            self.seen,
            max_inbox=64,
            on_crash=self.seen.crash,
            on_rest=lambda: self.working_rests.append(self.engine.has_work()),
        )


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    assert rig.loop.stop(5)


def started(rig: Rig) -> EngineLoop:
    rig.loop.start()
    return rig.loop


def test_each_gateway_gets_its_own_tokens_only(rig: Rig) -> None:
    """Fault: tokens of one gateway's request shown to another."""
    rig.loop.post("a", m.Submit([toy.sequence("ra", [1, 2], max_tokens=3)]))
    rig.loop.post("b", m.Submit([toy.sequence("rb", [3], max_tokens=5)]))
    started(rig)
    rig.seen.wait(lambda: len(rig.seen.tokens("b")) == 5)
    assert len(rig.seen.tokens("a")) == 3
    assert not rig.loop._driver.owners(), "ended sequences must be forgotten"


def test_output_comes_one_frame_per_step(rig: Rig) -> None:
    """Fault: a frame per token instead of per step."""
    rig.loop.post("a", m.Submit([toy.sequence(f"r{i}", [i], max_tokens=2) for i in range(8)]))
    started(rig)
    rig.seen.wait(lambda: len(rig.seen.tokens("a")) == 16)
    assert len(rig.seen.outputs) == 2


def test_it_rests_when_there_is_nothing_to_do_and_only_then(rig: Rig) -> None:
    """Fault: a worker keeps its share of the cores while it waits, or gives it away between two steps."""
    rig.loop.post("a", m.Submit([toy.sequence("r", [1], max_tokens=50)]))
    started(rig)
    rig.seen.wait(lambda: len(rig.seen.tokens("a")) == 50)
    rig.loop.post("a", m.Query(1, "audit"))
    rig.seen.wait(lambda: bool(rig.seen.replies))
    assert rig.working_rests
    assert not any(rig.working_rests)


def test_lost_gateway_leaves_nothing_behind(rig: Rig) -> None:
    """Fault: sequences and leases of a dead gateway live on, or another gateway's die with it."""
    request = ExpectRequest(
        transfer_id=TransferId("t1"),
        attempt=1,
        source=toy.address("src"),
        token_ids=[1] * 8,
        cache_salt="",
        timeout_s=9,
    )
    rig.loop.post("a", m.Submit([toy.sequence("ra", [1], max_tokens=10**6)]))
    rig.loop.post("a", m.Expect(7, request))
    rig.loop.post("b", m.Submit([toy.sequence("rb", [1], max_tokens=10**6)]))
    started(rig)
    rig.seen.wait(lambda: bool(rig.seen.replies))
    rig.loop.post("a", GatewayClosed())
    rig.loop.post("b", m.Query(1, "audit"))
    rig.seen.wait(lambda: any(isinstance(reply, m.Audit) for _, reply in rig.seen.replies))
    audit = rig.seen.replies[-1][1]
    assert audit.sequences == [toy.key("rb")]
    assert audit.inbound == []
    rig.loop.post("b", GatewayClosed())
    rig.loop.post("b", m.Query(2, "audit"))
    rig.seen.wait(lambda: rig.seen.replies[-1][1].call_id == 2)
    assert rig.seen.replies[-1][1].sequences == []


def test_refused_call_is_answered_and_harms_nobody(rig: Rig) -> None:
    """Fault: an expectation that does not fit kills the engine's thread or is never answered."""
    request = ExpectRequest(
        transfer_id=TransferId("t"),
        attempt=1,
        source=toy.address("src"),
        token_ids=[1] * 999,
        cache_salt="",
        timeout_s=9,
    )
    rig.loop.post("a", m.Expect(3, request))
    rig.loop.post("a", m.Query(4, "nonsense"))
    started(rig)
    rig.seen.wait(lambda: len(rig.seen.replies) == 2)
    labels = [(gateway, reply.call_id, reply.error_label) for gateway, reply in rig.seen.replies]
    assert labels == [("a", 3, "no_free_blocks"), ("a", 4, "invalid_argument")]
    assert not rig.seen.crashes


def test_message_that_the_engine_refuses_costs_only_itself(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a stale message of one gateway ends the whole group."""

    def refuse(*_: Any) -> None:
        raise NotFound("no such transfer")

    monkeypatch.setattr(rig.engine, "renew", refuse)
    rig.loop.post("a", m.Renew([TransferId("x")], 1.0))
    rig.loop.post("a", m.Query(1, "audit"))
    started(rig)
    rig.seen.wait(lambda: len(rig.seen.replies) == 1)
    assert not rig.seen.crashes


@pytest.mark.parametrize("error", [InvariantBroken("pool"), ZeroDivisionError(), KeyError("x")])
def test_broken_engine_ends_the_process(rig: Rig, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Fault: continue and hope."""

    def fail(now_ns: int, _: Any) -> None:
        raise error

    monkeypatch.setattr(rig.engine, "step", fail)
    rig.loop.post("a", m.Submit([toy.sequence("r", [1])]))
    started(rig)
    rig.seen.wait(lambda: bool(rig.seen.crashes))
    assert type(error).__name__ in rig.seen.crashes[0]


def test_kv_events_are_net_and_prove_themselves(rig: Rig) -> None:
    """Fault: digest and count that do not match the hashes make every index ask for snapshots for ever."""
    prompt = list(range(12))
    rig.loop.post("a", m.Submit([toy.sequence("r", prompt, max_tokens=1)]))
    started(rig)
    rig.seen.wait(lambda: any(output.kv for output in rig.seen.outputs))
    (kv,) = [output.kv for output in rig.seen.outputs if output.kv]
    hashes = hash_chain(toy.ROOT, prompt, toy.BLOCK_SIZE)
    digest = 0
    for block_hash in hashes:
        digest ^= int.from_bytes(block_hash, "big")
    assert (kv.stored, kv.removed, kv.count, kv.digest) == (hashes, [], 3, digest.to_bytes(16, "big"))


def test_snapshot_equals_the_events_so_far(rig: Rig) -> None:
    """Fault: a snapshot that is ahead of the frames applied with it."""
    rig.loop.post("a", m.Submit([toy.sequence("r", list(range(12)), max_tokens=1)]))
    started(rig)
    rig.seen.wait(lambda: bool(rig.seen.outputs))
    rig.engine.cached[b"not yet reported"] = None
    rig.loop.post("a", m.Query(9, "snapshot"))
    rig.seen.wait(lambda: bool(rig.seen.replies))
    assert set(rig.seen.replies[0][1].hashes) == set(hash_chain(toy.ROOT, list(range(12)), toy.BLOCK_SIZE))


def test_idle_engine_steps_at_its_deadline_and_not_before(rig: Rig) -> None:
    """Fault: lapsed leases are freed only when the next request comes."""
    deadline_ns = time.time_ns() + 150_000_000
    rig.engine.deadline_ns = deadline_ns
    started(rig)
    rig.seen.wait(lambda: bool(rig.seen.outputs))
    assert time.time_ns() >= deadline_ns
    assert rig.engine.num_steps == 1


def test_full_inbox_refuses_instead_of_growing() -> None:
    """Fault: unbounded memory behind a slow engine."""
    rig = Rig()
    assert all(rig.loop.post("a", m.Cancel([])) for _ in range(64))
    assert not rig.loop.post("a", m.Cancel([]))
    assert not rig.loop.post("a", m.Cancel([]), timeout_s=0.01)


def test_stuck_engine_is_seen_as_silent(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: heartbeats that go on although the engine hangs."""
    entered, release = threading.Event(), threading.Event()
    real_step = rig.engine.step

    def hang(now_ns: int, _: Any) -> Any:
        entered.set()
        release.wait(5)
        return real_step(now_ns)

    monkeypatch.setattr(rig.engine, "step", hang)
    rig.loop.post("a", m.Submit([toy.sequence("r", [1], max_tokens=1)]))
    started(rig)
    assert entered.wait(5)
    before = rig.loop.silent_s()
    rig.seen._news.acquire()
    rig.seen._news.wait(0.2)
    rig.seen._news.release()
    assert rig.loop.silent_s() >= before + 0.15
    release.set()
    rig.seen.wait(lambda: bool(rig.seen.outputs))


def test_reports_of_links_reach_the_engine(rig: Rig) -> None:
    down = LinkDown(toy.peer("other"), 0, "cut")
    rig.loop.report(down)
    rig.loop.post("a", m.PeerGone(toy.peer("other").group, toy.peer("other").epoch))
    rig.loop.post("a", m.Query(1, "audit"))
    started(rig)
    rig.seen.wait(lambda: bool(rig.seen.replies))
    assert rig.engine.calls == [("report", down), ("peer_gone", toy.peer("other"))]
