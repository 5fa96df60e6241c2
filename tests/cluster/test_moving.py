"""Groups are emptied while their sequences run: every stream goes on, each token once, nothing is left behind.

Guards against: tokens lost, repeated or mixed from two legs; a sequence that waits for a move; blocks, legs or
transfers left at either side; a group that leaves with work on it.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvferry.cluster.budgets import CoordinatorConfig
from kvferry.cluster.registry import RegistryConfig
from kvferry.runtime.errors import GroupUnavailable, NoFreeBlocks
from kvferry.runtime.request import FinishReason, Request
from kvferry.runtime.transfer.ticket import TransferEvent, TransferState
from tests.cluster.test_real_engines import Case, RealGroup
from tests.support.cluster_world import event, turns

pytestmark = pytest.mark.core
EMPTY_S = 20.0


# ---------------------------------------------------------------- one move, message by message
class Moving:
    """A request that decodes on `d` with three tokens delivered; `d` is being emptied and `e` was asked to expect."""

    def __init__(self, toy: Any, world: Any) -> None:
        self.toy, self.world = toy, world

    async def begin(self) -> Moving:
        w, toy = self.world, self.toy
        self.d, self.e = w.up(toy.ManualPort("d", 1, "decode")), toy.ManualPort("e", 2, "decode")
        self.stream = w.coordinator.start(toy.request(max_tokens=9))
        await turns()
        self.old = self.d.submitted[0].key
        w.frame(self.d, *(event(self.old, i, 10 + i) for i in range(3)))
        w.up(self.e)
        self.task = asyncio.create_task(w.coordinator.empty(self.d.peer, EMPTY_S))
        await turns()
        assert self.e.expects[-1][0].token_ids == [*range(100, 110), 10, 11]
        return self

    async def arrive(self) -> Any:
        """The blocks are there; returns the second leg's key."""
        ticket = self.e.answer()
        await turns()
        assert self.d.tickets[-1] == ticket
        done = TransferEvent(transfer_id=ticket.transfer_id, attempt=ticket.attempt, state=TransferState.COMPLETE)
        self.world.frame(self.e, transfers=[done])
        await turns()
        return self.e.submitted[-1].key

    async def read(self) -> list[int]:
        return [e.token_id async for e in self.stream]


def play(toy: Any, scene: Any) -> None:
    async def main() -> None:
        patient = RegistryConfig(unreachable_after_s=3600, abandon_after_s=3600)
        async with toy.World(CoordinatorConfig(retry_pause_s=0.01), patient) as world:
            await scene(await Moving(toy, world).begin(), world)
            await world.settled()

    toy.run(main())


def test_second_leg_takes_over(toy: Any) -> None:
    """Fault: tokens that both legs draw are shown twice, or the source is cut off before the other one speaks."""

    async def scene(m: Moving, w: Any) -> None:
        new = await m.arrive()
        assert m.e.submitted[-1].output_token_ids == [10, 11, 12]
        w.frame(m.d, event(m.old, 3, 13), event(m.old, 4, 14))
        assert m.d.cancelled == []
        w.frame(m.e, event(new, 3, 13))
        assert m.d.cancelled == [m.old]
        w.frame(m.d, event(m.old, 5, 99))
        w.frame(m.e, event(new, 4, 14), event(new, 5, 15, FinishReason.STOP))
        assert await m.read() == [10, 11, 12, 13, 14, 15]
        assert (await m.task).num_moved == 1
        assert m.stream.timeline.attempts == 1

    play(toy, scene)


def test_second_leg_that_draws_another_token_is_given_up(toy: Any) -> None:
    """Fault: the beginning of one leg is shown with the end of the other, though they differ."""

    async def scene(m: Moving, w: Any) -> None:
        new = await m.arrive()
        w.frame(m.d, event(m.old, 3, 13))
        w.frame(m.e, event(new, 3, 77))
        assert (m.d.cancelled, m.e.cancelled) == ([], [new])
        w.frame(m.e, event(new, 4, 78))
        w.frame(m.d, event(m.old, 4, 14))
        await asyncio.sleep(0.05)
        assert len(m.e.expects) == 2, "no second try"
        newer = await m.arrive()
        assert m.e.submitted[-1].output_token_ids == [10, 11, 12, 13, 14]
        w.frame(m.e, event(newer, 5, 15, FinishReason.STOP))
        assert await m.read() == [10, 11, 12, 13, 14, 15]
        assert (await m.task).num_moved == 1

    play(toy, scene)


@pytest.mark.parametrize("kind", ["token", "end"])
def test_difference_after_the_take_over_restarts_with_what_was_delivered(toy: Any, kind: str) -> None:
    """Fault: a rounding difference behind what was delivered is not noticed, or an early end hangs the stream."""

    async def scene(m: Moving, w: Any) -> None:
        new = await m.arrive()
        w.frame(m.d, event(m.old, 3, 13), event(m.old, 4, 14))
        w.frame(m.e, event(new, 3, 13))
        w.frame(m.e, event(new, 4, 77) if kind == "token" else event(new, 4, 14, FinishReason.LENGTH))
        await turns()
        again = m.e.submitted[-1]
        assert again.output_token_ids == [10, 11, 12, 13, 14]
        w.frame(m.e, event(again.key, 5, 15, FinishReason.STOP))
        assert await m.read() == [10, 11, 12, 13, 14, 15]

    play(toy, scene)


def test_source_that_ends_first_ends_the_move(toy: Any) -> None:
    """Fault: a second leg goes on after the sequence's end."""

    async def scene(m: Moving, w: Any) -> None:
        new = await m.arrive()
        w.frame(m.d, event(m.old, 3, 13, FinishReason.STOP))
        assert m.e.cancelled == [new]
        w.frame(m.e, event(new, 3, 13))
        assert await m.read() == [10, 11, 12, 13]
        assert (await m.task).num_moved == 0

    play(toy, scene)


@pytest.mark.parametrize("begun", [False, True])
def test_client_leaves_during_the_move(toy: Any, begun: bool) -> None:
    """Fault: one of two legs, or the transfer between them, outlives the request."""

    async def scene(m: Moving, w: Any) -> None:
        new = await m.arrive() if begun else None
        await m.stream.aclose()
        assert m.d.cancelled == [m.old]
        assert m.e.cancelled == ([new] if begun else [])
        assert m.e.ended
        assert (await m.task).num_moved == 0

    play(toy, scene)


def test_source_dies_after_the_second_leg_began(toy: Any) -> None:
    """Fault: what the second leg would have gone on with is computed once more, or lost."""

    async def scene(m: Moving, w: Any) -> None:
        new = await m.arrive()
        w.frame(m.d, event(m.old, 3, 13))
        w.coordinator.on_group_down(m.d.peer, "killed")
        w.frame(m.e, event(new, 3, 13), event(new, 4, 14, FinishReason.STOP))
        assert await m.read() == [10, 11, 12, 13, 14]
        assert len(m.e.submitted) == 1
        assert m.stream.timeline.attempts == 2
        await m.task

    play(toy, scene)


@pytest.mark.parametrize("begun", [False, True])
def test_destination_dies(toy: Any, begun: bool) -> None:
    """Fault: the source, which is well, loses the sequence with the destination. Then nobody could take over."""

    async def scene(m: Moving, w: Any) -> None:
        if begun:
            await m.arrive()
        w.coordinator.on_group_down(m.e.peer, "killed")
        w.frame(m.d, event(m.old, 3, 13))
        assert m.d.cancelled == []
        await asyncio.sleep(EMPTY_S / 2)
        w.frame(m.d, event(m.old, 4, 14))
        with pytest.raises(GroupUnavailable):
            await m.task
        w.frame(m.d, event(m.old, 5, 15, FinishReason.STOP))
        assert await m.read() == [10, 11, 12, 13, 14, 15]
        assert w.registry.get(m.d.peer).routable, "the group that stays must be used again"

    play(toy, scene)


def test_time_is_up(toy: Any) -> None:
    """Fault: a group that must go waits for ever for one that has no room; or its sequences are lost."""

    async def scene(m: Moving, w: Any) -> None:
        async def refuse() -> None:
            while not m.task.done():
                if not m.e.expects[-1][1].done():
                    m.e.refuse(NoFreeBlocks("full"))
                await asyncio.sleep(0.05)

        refusing = asyncio.create_task(refuse())
        await asyncio.sleep(EMPTY_S - 1)
        w.frame(m.d, event(m.old, 3, 13))
        done = await m.task
        await refusing
        assert 5 < len(m.e.expects) < 50
        assert (done.num_moved, done.num_resumed) == (0, 1)
        assert m.d.cancelled == [m.old]
        await turns()
        resumed = m.e.submitted[-1]
        assert resumed.output_token_ids == [10, 11, 12, 13]
        w.frame(m.e, event(resumed.key, 4, 14, FinishReason.STOP))
        assert await m.read() == [10, 11, 12, 13, 14]
        assert m.stream.timeline.attempts == 1

    play(toy, scene)


def test_only_group_is_not_emptied(toy: Any) -> None:
    """Fault: the last group is taken out of service and requests wait for nobody."""

    async def main() -> None:
        async with toy.World() as w:
            d = w.up(toy.ManualPort("d", 1, "decode"))
            with pytest.raises(GroupUnavailable, match="scale"):
                await w.coordinator.empty(d.peer, 1.0)
            assert w.registry.get(d.peer).routable

    toy.run(main())


# ---------------------------------------------------------------- at every moment
FAULTS = ["none", "refuse", "destination dies", "source dies", "blocks lost", "client leaves"]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("leaves", ["p", "d"])
def test_group_leaves_at_every_moment(toy: Any, leaves: str, fault: str) -> None:
    """Waiting, prefilling, ferrying, decoding: the streams are those of the undisturbed run."""
    moved = 0

    async def main(moment: int, n: int) -> int:
        async with toy.World(CoordinatorConfig(transfer_timeout_s=2.0)) as w:
            groups = {name: w.add(name, role) for name, role in (("p", "prefill"), ("d", "decode"))}
            others = [w.add("q", "prefill"), w.add("e", "decode")]
            request = toy.request(prompt=30, max_tokens=24, n=n, seed=LONG[n])
            stream = w.coordinator.start(request)
            reading = asyncio.create_task(toy.collect(stream, n))
            await asyncio.sleep(moment * 0.01)
            source = groups[leaves]
            if fault == "refuse":
                others[1].refuse_expect = NoFreeBlocks("full")
            elif fault == "blocks lost":
                w.carry = lambda ticket: None
            elif fault == "client leaves":
                asyncio.get_running_loop().call_later(0.02, reading.cancel)
            elif fault != "none":
                victim = source if fault == "source dies" else others[1]
                asyncio.get_running_loop().call_later((moment % 7) * 0.006, w.kill, victim)
            done = await w.coordinator.empty(source.peer, 5.0)
            assert not source.running or not source.alive or await _soon_empty(source)
            w.kill(source, noticed_after_s=0.0)
            if fault == "client leaves":
                await asyncio.gather(reading, return_exceptions=True)
                await stream.aclose()
            else:
                assert await reading == toy.expected(request)
            await w.settled(5.0)
            return int(done.num_moved)

    for moment in range(0, 60, 4):
        for n in (1, 3):
            moved += toy.run(main(moment, n))
    if fault == "none" and leaves == "d":
        assert moved > 15


async def _soon_empty(group: Any) -> bool:
    await asyncio.sleep(0.05)
    return not group.running and not group.waiting


def _all_long(outputs: list[list[int]]) -> bool:
    return all(len(tokens) == 24 for tokens in outputs)


LONG: dict[int, int] = {}


@pytest.fixture(autouse=True, scope="module")
def _seeds(toy: Any) -> None:
    """Seeds whose sequences do not end early."""
    LONG.update({n: toy.seed_where(_all_long, prompt=30, max_tokens=24, n=n) for n in (1, 3)})


# ---------------------------------------------------------------- whole lives
class Leaving(Case):
    """As `Case`, and groups are emptied and leave, with or without a successor, or change roles, among the other
    faults.
    """

    num_moved = num_resumed = num_left = 0

    def request(self, number: int) -> Request:
        """Longer than `Case`'s, so that some decode when their group leaves."""
        request = super().request(number)
        room = 4 * min(group.num_blocks for group in self.groups) - len(request.prompt_token_ids)
        sampling = msgspec.structs.replace(request.sampling, max_tokens=min(self.rng.randrange(10, 80), room))
        return msgspec.structs.replace(request, sampling=sampling)

    async def disturb(self) -> None:
        rng = self.rng
        for _ in range(rng.randrange(1, 5)):
            await asyncio.sleep(rng.random() * rng.choice([0.1, 1]))
            live = [group for group in self.groups if group.alive]
            if not live:
                continue
            group = rng.choice(live)
            kind = rng.random()
            if kind < 0.5:
                await self.leave(group)
            elif kind < 0.6:
                self.world.registry.set_role(group.peer, rng.choice(["prefill", "decode", "mixed"]))
            elif self.loss and kind < 0.8:
                self.kill(group)
            elif self.loss:
                group.stop_for(rng.choice([0.3, 1.5, 5]))

    async def leave(self, group: RealGroup) -> None:
        rng, coordinator = self.rng, self.world.coordinator
        first = rng.random() < 0.5
        successor = RealGroup(self, group.peer.group, group.role, group.num_blocks, group.scheduler)
        if first:
            self.world.registry.stay(group.peer)
            self.add(successor)
        try:
            done = await coordinator.empty(group.peer, rng.choice([0.05, 1.0, 20.0]))
        except GroupUnavailable:
            return
        self.num_moved += done.num_moved
        self.num_resumed += done.num_resumed
        self.num_left += 1
        assert not any(record.on(group.peer) for record in coordinator._records.values())
        await asyncio.sleep(0.2)
        if group.alive and not group.silent:
            held = await group.audit(1.0)
            assert (held.sequences, held.inbound, held.num_leased_blocks) == ([], [], 0)
        group.die()
        coordinator.on_group_down(group.peer, "it was emptied")
        if not first:
            self.add(successor)


@pytest.mark.parametrize("twenties", range(2))
def test_lives_of_clusters_whose_groups_leave(toy: SimpleNamespace, twenties: int) -> None:
    num_moved = num_left = 0
    for seed in range(1000 + 20 * twenties, 1020 + 20 * twenties):
        case = Leaving(toy, seed)
        case.faulty = True  # or nothing at all would leave
        toy.run(case.run())
        num_moved += case.num_moved
        num_left += case.num_left
    assert num_left > 16
    assert num_moved > 0
