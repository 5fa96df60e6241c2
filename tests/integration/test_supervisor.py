"""The supervisor against groups that live and die in this process, over real streams and without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from kvferry.cluster import hub as hub_module
from kvferry.cluster.completion import see_through
from kvferry.cluster.config import GroupSpec
from kvferry.cluster.peer_stream import RemoteGroup
from kvferry.cluster.supervisor import OnProgress, Supervisor, SupervisorPolicy
from kvferry.cluster.topology import Allotment
from kvferry.runtime.errors import (
    CorruptModel,
    GroupUnavailable,
    IncompatiblePeer,
    InvariantBroken,
    KvferryError,
    NotFound,
)
from kvferry.runtime.ids import Epoch, GroupId, Peer
from tests.support import toy_shell as toy
from tests.support.toy_leader import SECRET, Leader

pytestmark = pytest.mark.integration
QUICK = SupervisorPolicy(dead_after_s=0.8, first_pause_s=0.01, max_pause_s=0.05, max_first_starts=3)


class ToyGroup:
    """Implements `Incarnation`."""

    def __init__(self, peer: Peer) -> None:
        self.leader = Leader(toy.info(peer.group, peer.epoch))
        self.target = self.leader.target
        self.died = asyncio.Event()
        self.num_kills = 0

    async def wait_dead(self) -> str:
        await self.died.wait()
        return "rank 0: its process died"

    async def kill(self) -> None:
        self.num_kills += 1
        if self.num_kills == 1:
            await see_through(self.leader.stop(), 10)


class ToyLauncher:
    """`failures` are raised by the first starts, one each."""

    async def allot(self, specs: Sequence[GroupSpec]) -> list[Allotment]:
        return [Allotment(spec=spec, threads=1, cpus=1.0) for spec in specs]

    def __init__(self, *failures: KvferryError) -> None:
        self.failures = list(failures)
        self.started: list[ToyGroup] = []
        self.epochs: list[int] = []

    async def start(self, allotment: Allotment, epoch: Epoch, on_progress: OnProgress) -> ToyGroup:
        self.epochs.append(epoch)
        if self.failures:
            raise self.failures.pop(0)
        on_progress(1.0)
        group = ToyGroup(Peer(allotment.spec.group, epoch))
        await group.leader.start()
        self.started.append(group)
        return group


class Recorder:
    """Implements `Observer`."""

    def __init__(self) -> None:
        self.log: list[tuple[str, Any]] = []
        self.refuse: KvferryError | None = None
        self._news = asyncio.Event()

    def _note(self, what: str, of: Any) -> None:
        self.log.append((what, of))
        self._news.set()

    def group_starting(self, spec: GroupSpec, epoch: Epoch) -> None:
        self._note("starting", epoch)

    def group_progress(self, group: GroupId, share: float) -> None:
        self._note("progress", share)

    def group_up(self, port: RemoteGroup) -> None:
        if self.refuse is not None:
            raise self.refuse
        self._note("up", port.peer.epoch)

    def group_down(self, peer: Peer, reason: str) -> None:
        self._note("down", peer.epoch)
        self.reason = reason

    def group_ended(self, peer: Peer, out_of_service: bool) -> None:
        self._note("ended", peer.epoch)

    def on_frame(self, port: RemoteGroup, frame: Any) -> None:
        if frame.epoch != port.peer.epoch:
            self._note("foreign frame", frame)

    async def wait(self, what: str, of: Any) -> None:
        async with asyncio.timeout(10):
            while (what, of) not in self.log:
                self._news.clear()
                await self._news.wait()


class Rig:
    def __init__(self, *failures: KvferryError, groups: int = 1) -> None:
        self.launcher, self.seen = ToyLauncher(*failures), Recorder()
        specs = [GroupSpec(GroupId(f"mixed-{i}"), "mixed", 1) for i in range(groups)]
        allotments = [Allotment(spec=spec, threads=1, cpus=1.0) for spec in specs]
        self.supervisor = Supervisor(allotments, self.launcher, self.seen, secret=SECRET, gateway="gw", policy=QUICK)
        self.run = asyncio.create_task(self.supervisor.run())

    async def stop(self) -> None:
        self.run.cancel()
        await asyncio.gather(self.run, return_exceptions=True)
        assert all(group.num_kills for group in self.launcher.started), "a group outlives its supervisor"
        assert self.supervisor.live == []


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    await rig.seen.wait("up", 1)
    yield rig
    await rig.stop()


async def test_dead_process_is_replaced_under_a_new_epoch(rig: Rig) -> None:
    """Fault: a group restarted under its old epoch, so that old blocks and messages are believed."""
    rig.launcher.started[0].died.set()
    await rig.seen.wait("down", 1)
    await rig.seen.wait("up", 2)
    assert "process died" in rig.seen.reason
    assert [port.peer.epoch for port in rig.supervisor.live] == [2]
    assert rig.launcher.started[0].num_kills == 1


async def test_broken_stream_is_a_death(rig: Rig) -> None:
    await rig.launcher.started[0].leader.server.stop()
    await rig.seen.wait("down", 1)
    assert "stream ended" in rig.seen.reason
    await rig.seen.wait("up", 2)


async def test_long_silence_is_a_death_and_a_short_one_is_not(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a stopped process is kept for ever, or a busy one is killed for a moment's silence."""
    monkeypatch.setattr(hub_module, "STALL_S", -1.0)
    await asyncio.sleep(0.4)
    monkeypatch.setattr(hub_module, "STALL_S", 10.0)
    await asyncio.sleep(1.2)
    assert ("down", 1) not in rig.seen.log
    monkeypatch.setattr(hub_module, "STALL_S", -1.0)
    await rig.seen.wait("down", 1)
    monkeypatch.setattr(hub_module, "STALL_S", 10.0)
    assert "sent nothing" in rig.seen.reason


async def test_groups_fail_apart() -> None:
    """Fault: one group's death restarts or delays another."""
    rig = Rig(groups=2)
    await rig.supervisor.usable()
    await rig.seen.wait("up", 2)
    one = next(group for group in rig.launcher.started if group.leader.hub._info.address.peer.epoch == 1)
    one.died.set()
    await rig.seen.wait("up", 3)
    assert ("down", 2) not in rig.seen.log
    await rig.stop()


async def test_callers_fault_ends_the_launch_at_once() -> None:
    """Fault: a model that cannot be loaded is loaded again and again."""
    rig = Rig(CorruptModel("cut off"), groups=2)
    with pytest.raises(CorruptModel):
        await rig.run
    await rig.stop()


async def test_first_start_is_tried_a_few_times() -> None:
    rig = Rig(GroupUnavailable("died"), GroupUnavailable("died"))
    await rig.seen.wait("up", 3)
    await rig.stop()
    rig = Rig(*(GroupUnavailable(f"died {i}") for i in range(3)))
    with pytest.raises(GroupUnavailable, match="died 2"):
        await rig.run
    await rig.stop()


@pytest.mark.parametrize("other_dies", [False, True])
async def test_a_group_that_does_not_come_up_does_not_end_what_has_served_without_it(other_dies: bool) -> None:
    """Fault: a busy machine lets one of two groups fail a few times at the start, and ends the other one.

    Also (found by seed 313201) when that one has just died and is about to come back.
    """
    rig, failures = Rig(groups=2), [GroupUnavailable("busy")] * 8
    start = rig.launcher.start

    async def unlucky(allotment: Allotment, epoch: Epoch, on_progress: OnProgress) -> ToyGroup:
        if epoch > 1 and failures:
            await rig.seen.wait("up", 1)
            if other_dies:
                rig.launcher.started[0].died.set()
            raise failures.pop()
        return await start(allotment, epoch, on_progress)

    rig.launcher.start = unlucky  # type: ignore[method-assign]
    async with asyncio.timeout(10):
        while failures or len(rig.supervisor.live) < 2:
            await asyncio.sleep(0.01)
            assert not rig.run.done()
    await rig.stop()


async def test_group_that_has_lived_is_never_given_up(rig: Rig) -> None:
    """Fault: a passing lack of resources at a restart ends the whole deployment."""
    rig.launcher.failures = [GroupUnavailable("died") for _ in range(5)] + [CorruptModel("disk hiccup")]
    rig.launcher.started[0].died.set()
    await rig.seen.wait("up", 8)
    assert rig.launcher.epochs == list(range(1, 9))


async def test_incompatible_group_is_not_kept() -> None:
    rig = Rig()
    rig.seen.refuse = IncompatiblePeer("another model")
    with pytest.raises(IncompatiblePeer):
        await rig.run
    await rig.stop()


async def test_broken_invariant_ends_everything(rig: Rig) -> None:
    """Fault: continue and hope."""
    rig.launcher.failures = [InvariantBroken("epoch reused")]
    rig.launcher.started[0].died.set()
    with pytest.raises(InvariantBroken):
        await rig.run


async def test_groups_are_added_and_ended_while_the_others_live(rig: Rig) -> None:
    """Fault: somebody else restarts with them; or an ended group comes back."""
    (spare,) = await rig.supervisor.allot([GroupSpec(GroupId("mixed-1"), "mixed", 1)])
    added = await rig.supervisor.add(spare)
    assert added == Peer(GroupId("mixed-1"), Epoch(2))
    assert {port.peer for port in rig.supervisor.live} == {Peer(GroupId("mixed-0"), Epoch(1)), added}
    await rig.supervisor.end(rig.supervisor.find(GroupId("mixed-1")))
    assert rig.launcher.started[1].num_kills == 1
    with pytest.raises(NotFound):
        rig.supervisor.find(GroupId("mixed-1"))
    await asyncio.sleep(0.2)
    assert rig.launcher.epochs == [1, 2]
    assert ("down", 1) not in rig.seen.log


async def test_added_group_that_cannot_start_leaves_no_place(rig: Rig) -> None:
    """Fault: the whole deployment ends with it, or it is tried for ever."""
    rig.launcher.failures = [CorruptModel("cut off")]
    (spare,) = await rig.supervisor.allot([GroupSpec(GroupId("mixed-1"), "mixed", 1)])
    with pytest.raises(CorruptModel):
        await rig.supervisor.add(spare)
    assert [place.group for place in rig.supervisor.places()] == ["mixed-0"]
    assert not rig.run.done()


async def test_predecessor_that_dies_beside_its_successor_is_not_replaced(rig: Rig) -> None:
    """Fault: two incarnations of a place stay; or none, when the successor fails."""
    old = rig.supervisor.find(GroupId("mixed-0"))
    rig.supervisor.hold(old)
    rig.launcher.started[0].died.set()
    await rig.seen.wait("down", 1)
    rig.launcher.failures = [CorruptModel("cut off")]
    with pytest.raises(CorruptModel):
        await rig.supervisor.add(old.allotment, successor_of=old)
    rig.supervisor.release(old)
    await rig.seen.wait("up", 3)
    assert [place.epoch for place in rig.supervisor.places()] == [3]
