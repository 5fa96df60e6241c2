"""The channel between the ranks of a group, over real sockets: order, strangers, and the loss of either side."""

from __future__ import annotations

import queue
import socket
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest

from kvferry.cluster import group
from kvferry.cluster.group import FollowerChannel, LeaderChannel
from kvferry.runtime.errors import DeviceError, GroupUnavailable, Unauthenticated
from kvferry.runtime.ids import BlockHash, BlockId, TransferId
from kvferry.runtime.step import Row, StepPlan, make_table
from kvferry.runtime.transfer.ticket import LinkDown, Received, Sent
from tests.support import toy_shell as toy

pytestmark = pytest.mark.core
SECRET = "s3cret"


class Pair:
    """A leader with two followers."""

    def __init__(self) -> None:
        self.lost: queue.Queue[str] = queue.Queue()
        self.reports: queue.Queue[Any] = queue.Queue()
        self.leader = LeaderChannel("127.0.0.1", SECRET, 2, on_lost=self.lost.put)
        self.followers: list[FollowerChannel] = []
        joins = [threading.Thread(target=self._join, args=(rank,)) for rank in (2, 1)]
        for join in joins:
            join.start()
        self.leader.start(self.reports.put, timeout_s=5)
        for join in joins:
            join.join(5)

    def _join(self, rank: int) -> None:
        self.followers.append(FollowerChannel("127.0.0.1", self.leader.port, SECRET, rank, timeout_s=5))

    def close(self) -> None:
        self.leader.close()
        for follower in self.followers:
            follower.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


def test_every_follower_gets_every_plan_in_order(pair: Pair) -> None:
    """Fault: a plan lost, repeated or changed on its way: ranks that compute different things."""
    plans = [
        StepPlan(step=i, rows=[Row(list(range(i)), 0, make_table([BlockId(i)] * i), num_samples=1)])
        for i in range(1, 20)
    ]
    for plan in plans:
        pair.leader.send(plan)
    for follower in pair.followers:
        stream = follower.plans()
        assert [next(stream) for _ in plans] == plans


def test_reports_arrive_from_all_ranks(pair: Pair) -> None:
    hashes, blocks = [BlockHash(b"h" * 16)], [BlockId(3)]
    received = Received(TransferId("t"), 1, 0, toy.peer("src"), 0, 1, hashes, blocks, 64)
    reports = [received, Sent(TransferId("t"), 1, 0, 1, "cut"), LinkDown(toy.peer("src"), 1, "cut")]
    for report in reports:
        pair.followers[0].report(report)
    assert [pair.reports.get(timeout=5) for _ in reports] == reports


def test_large_plan_passes(pair: Pair) -> None:
    """Fault: a frame larger than a socket's buffer is cut."""
    plan = StepPlan(step=1, rows=[Row(list(range(400_000)), 0, make_table(), num_samples=0)])
    sender = threading.Thread(target=pair.leader.send, args=(plan,))
    sender.start()
    assert [next(follower.plans()) for follower in pair.followers] == [plan, plan]
    sender.join(5)


def test_lost_follower_ends_the_group(pair: Pair) -> None:
    """Fault: a leader that goes on alone after a rank died."""
    pair.followers[0].close()
    assert "closed the connection" in pair.lost.get(timeout=5)


def test_lost_leader_ends_its_followers(pair: Pair) -> None:
    """Fault: an orphaned rank that waits for plans for ever."""
    pair.leader.close()
    for follower in pair.followers:
        assert list(follower.plans()) == []
    with pytest.raises(DeviceError):
        deque((pair.followers[0].done(1) for _ in range(1000)), maxlen=0)  # the first may still find room in a buffer


def test_stuck_follower_is_lost_in_bounded_time(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a follower that no longer executes lets the leader run ahead without end."""
    monkeypatch.setattr(group, "SEND_TIMEOUT_S", 0.2)
    pair.leader.send(StepPlan(step=group.MAX_STEPS_AHEAD))
    assert pair.lost.empty()
    pair.leader.send(StepPlan(step=group.MAX_STEPS_AHEAD + 1))
    assert "steps behind" in pair.lost.get_nowait()


def test_answers_let_the_leader_go_on(pair: Pair) -> None:
    for follower in pair.followers:
        follower.done(10)
    pair.leader.send(StepPlan(step=10 + group.MAX_STEPS_AHEAD))
    assert pair.lost.empty()


def test_strangers_are_refused_and_disturb_nobody() -> None:
    """Fault: a port scanner or a rank of another cluster takes a place in the group."""
    lost: queue.Queue[str] = queue.Queue()
    leader = LeaderChannel("127.0.0.1", SECRET, 1, on_lost=lost.put)
    start = threading.Thread(target=leader.start, args=(lambda _: None, 10))
    start.start()
    with socket.create_connection(("127.0.0.1", leader.port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert stranger.recv(100) == b""
    with pytest.raises(Unauthenticated):
        FollowerChannel("127.0.0.1", leader.port, "wrong", 1, timeout_s=5)
    with pytest.raises(Unauthenticated):
        FollowerChannel("127.0.0.1", leader.port, SECRET, 2, timeout_s=5)
    follower = FollowerChannel("127.0.0.1", leader.port, SECRET, 1, timeout_s=5)
    start.join(5)
    assert not start.is_alive()
    assert lost.empty()
    follower.close()
    leader.close()


def test_missing_rank_is_named() -> None:
    """Fault: a start that waits for ever for a rank that died while loading."""
    leader = LeaderChannel("127.0.0.1", SECRET, 1)
    with pytest.raises(GroupUnavailable, match=r"ranks \[1\]"):
        leader.start(lambda _: None, timeout_s=0.1)
    leader.close()


def test_absent_leader_is_an_error() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(GroupUnavailable, match="cannot reach"):
            FollowerChannel("127.0.0.1", unused.getsockname()[1], SECRET, 1, timeout_s=1)
