"""Small setbacks, message by message: no room, no answer, a refusal, a gap. The request goes on another way."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.cluster.budgets import CoordinatorConfig
from kvferry.cluster.stream import EVENT_BYTES
from kvferry.runtime.errors import ClientTooSlow, GroupUnavailable, NoFreeBlocks
from kvferry.runtime.request import FinishReason
from kvferry.runtime.timeline import Phase
from tests.support.cluster_world import event, turns

pytestmark = pytest.mark.core


def test_expect_without_room_goes_on_without_a_transfer(toy: Any) -> None:
    async def main() -> None:
        async with toy.World() as w:
            p, d = w.add("p", "prefill"), w.add("d", "decode")
            d.refuse_expect = NoFreeBlocks("full")
            request = toy.request(prompt=30)
            stream = w.coordinator.start(request)
            assert await toy.collect(stream, 1) == toy.expected(request)
            assert stream.usage.num_ferried_blocks == 0
            assert stream.timeline.attempts == 1
            await w.settled()
            assert p.num_expired + d.num_expired == 0

    toy.run(main())


def test_expect_unanswered_goes_to_another_decode_group(toy: Any) -> None:
    async def main() -> None:
        config = CoordinatorConfig(expect_timeout_s=0.5)
        async with toy.World(config) as w:
            p = w.up(toy.ManualPort("p", 1, "prefill"))
            d1, d2 = w.up(toy.ManualPort("d1", 2, "decode")), w.up(toy.ManualPort("d2", 3, "decode"))
            stream = w.coordinator.start(toy.request())
            await turns()
            mute, other = (d1, d2) if d1.expects else (d2, d1)
            assert not other.expects
            await w.clock.sleep(0.6)
            assert len(other.expects) == 1
            other.answer()
            await turns()
            assert mute.ended == [mute.expects[0][0].transfer_id]
            assert len(p.tickets) == 1
            w.frame(p, event(p.submitted[0].key, 0, 7, FinishReason.HANDOFF))
            assert len(other.submitted) == 1
            assert not mute.submitted
            await stream.aclose()
            await w.settled()

    toy.run(main())


def test_expect_unanswered_by_the_only_decode_group(toy: Any) -> None:
    """It is asked once; after the hand-over the prefill group, the only one that answers, does the rest."""

    async def main() -> None:
        async with toy.World(CoordinatorConfig(expect_timeout_s=0.5)) as w:
            p, d = w.up(toy.ManualPort("p", 1, "prefill")), w.up(toy.ManualPort("d", 2, "decode"))
            stream = w.coordinator.start(toy.request())
            await w.clock.sleep(0.6)
            w.frame(p, event(p.submitted[0].key, 0, 7, FinishReason.HANDOFF))
            await turns()
            assert len(d.expects) == 1
            assert [s.handoff_after for s in p.submitted] == [1, None]
            assert p.submitted[1].output_token_ids == [7]
            await stream.aclose()
            await w.settled()

    toy.run(main())


def test_a_ticket_that_comes_too_late_is_not_sent(toy: Any) -> None:
    """The source would hold blocks for a transfer that was ended before it began."""

    async def main() -> None:
        async with toy.World() as w:
            p, d = w.up(toy.ManualPort("p", 1, "prefill")), w.up(toy.ManualPort("d", 2, "decode"))
            stream = w.coordinator.start(toy.request())
            await turns()
            w.frame(p, event(p.submitted[0].key, 0, None, error_label="queue_full"))
            old = d.answer()
            await turns()
            assert p.ended == d.ended == [old.transfer_id]
            assert not p.tickets
            await stream.aclose()
            await w.settled()

    toy.run(main())


def test_what_arrived_before_the_source_failed_counts(toy: Any) -> None:
    """Fault: blocks that came are missing in the usage, because the source's report closed the book on the transfer."""

    async def main() -> None:
        async with toy.World() as w:
            p, d = w.up(toy.ManualPort("p", 1, "prefill")), w.up(toy.ManualPort("d", 2, "decode"))
            stream = w.coordinator.start(toy.request())
            await turns()
            ticket = d.answer()
            await turns()

            def report(num_blocks: int, attempt: int = ticket.attempt) -> Any:
                return toy.TransferEvent(
                    transfer_id=ticket.transfer_id,
                    attempt=attempt,
                    state=toy.TransferState.FAILED,
                    num_blocks=num_blocks,
                    num_bytes=1000 * num_blocks,
                )

            w.frame(p, transfers=[report(0)])
            assert d.ended == [ticket.transfer_id]
            w.frame(p, transfers=[report(7)])
            w.frame(d, transfers=[report(5, attempt=ticket.attempt + 1)])
            for _ in range(2):
                w.frame(d, transfers=[report(1)])
            assert (stream.usage.num_ferried_blocks, stream.usage.ferried_bytes) == (1, 1000)
            await stream.aclose()
            await w.settled()

    toy.run(main())


def test_a_lost_leg_is_cancelled_and_never_heard_again(toy: Any) -> None:
    """The same group may run the next attempt: what the former one still says has the right positions."""

    async def main() -> None:
        async with toy.World() as w:
            m = w.up(toy.ManualPort("m", 1, "mixed"))
            stream = w.coordinator.start(toy.request())
            await turns()
            old = m.submitted[0].key
            w.frame(m, event(old, 0, 5), event(old, 2, 99))
            await turns()
            assert m.cancelled == [old]
            new = m.submitted[1]
            assert new.output_token_ids == [5]
            w.frame(m, event(old, 1, 99))
            w.frame(m, event(new.key, 1, 6, FinishReason.LENGTH))
            assert [e.token_id async for e in stream] == [5, 6]
            await w.settled()

    toy.run(main())


def test_decode_group_that_dies_before_it_answered_loses_what_was_handed_over(toy: Any) -> None:
    """Fault: the prefill was quicker than the answer, the dead group's sequence was forgotten, its request hung."""

    async def main() -> None:
        async with toy.World() as w:
            p, d = w.up(toy.ManualPort("p", 1, "prefill")), w.up(toy.ManualPort("d", 2, "decode"))
            stream = w.coordinator.start(toy.request())
            await turns()
            w.frame(p, event(p.submitted[0].key, 0, 7, FinishReason.HANDOFF))
            assert d.submitted
            d.refuse(GroupUnavailable("d is gone"))
            await turns()
            w.coordinator.on_group_down(d.peer, "killed")
            await turns()
            assert [s.output_token_ids for s in p.submitted] == [[], [7]]
            await stream.aclose()
            await w.settled()

    toy.run(main())


def test_request_id_that_is_used_again_is_another_request(toy: Any) -> None:
    """Fault: tokens of the former request reached the new one; its transfer counted as over before it began."""

    async def main() -> None:
        async with toy.World(router=toy.RouterConfig(disaggregate="always")) as w:
            p, d = w.up(toy.ManualPort("p", 1, "prefill")), w.up(toy.ManualPort("d", 2, "decode"))
            former = w.coordinator.start(toy.request())
            await turns()
            await former.aclose()
            stream = w.coordinator.start(toy.request(cache_salt="so that it is not thought to be cached"))
            await turns()
            old, new = (s.key for s in p.submitted)
            assert new.attempt > old.attempt
            transfers = [(wanted.transfer_id, wanted.attempt) for wanted, _ in d.expects]
            assert len({transfer_id for transfer_id, _ in transfers}) == 2
            w.frame(p, event(old, 0, 99))
            w.frame(p, event(new, 0, 7, FinishReason.STOP))
            assert [e.token_id async for e in stream] == [7]
            await w.settled()

    toy.run(main())


def test_transfer_is_renewed_only_while_its_source_computes(toy: Any) -> None:
    """Fault: a source that cannot send the rest never gives up while it is renewed, and decode waits for ever."""

    async def main() -> None:
        async with toy.World(CoordinatorConfig(transfer_timeout_s=0.3)) as w:
            p, d = w.up(toy.ManualPort("p", 1, "prefill")), w.up(toy.ManualPort("d", 2, "decode"))
            stream = w.coordinator.start(toy.request())
            await turns()
            d.answer()
            await w.clock.sleep(0.15)
            assert p.renewed
            assert d.renewed
            w.frame(p, event(p.submitted[0].key, 0, 7, FinishReason.HANDOFF))
            p.renewed.clear(), d.renewed.clear()
            await w.clock.sleep(0.15)
            assert not p.renewed
            assert not d.renewed, "what is lost on its way must not be waited for"
            await stream.aclose()
            await w.settled()

    toy.run(main())


@pytest.mark.parametrize("kind", ["auto", "always"])
def test_an_answer_that_nobody_reads_is_bounded(toy: Any, kind: Any) -> None:
    """A client that stops reading costs memory without bound, or holds its blocks until its answer is whole."""

    async def main() -> None:
        config = CoordinatorConfig(max_unread_bytes=20 * EVENT_BYTES)
        async with toy.World(config, router=toy.RouterConfig(disaggregate=kind)) as w:
            w.add("p", "prefill"), w.add("d", "decode")
            seed = toy.seed_where(lambda outs: all(len(o) == 50 for o in outs), max_tokens=50)
            slow = w.coordinator.start(toy.request("slow", max_tokens=50, seed=seed))
            other = toy.request("other", max_tokens=50, seed=seed)
            assert await toy.collect(w.coordinator.start(other), 1) == toy.expected(other)
            assert w.coordinator.in_flight == 0
            with pytest.raises(ClientTooSlow, match="--max-unread") as ended:
                await anext(slow)
            assert ended.value.facts["phase"] == Phase.DECODE
            await w.settled()

    toy.run(main())


def test_an_answer_that_is_read_late_but_in_time_is_whole(toy: Any) -> None:
    """The bound counts what was read long ago, and ends a request whose client only paused."""

    async def main() -> None:
        async with toy.World(CoordinatorConfig(max_unread_bytes=20 * EVENT_BYTES)) as w:
            w.add("p", "prefill"), w.add("d", "decode")
            seed = toy.seed_where(lambda outs: all(len(o) == 60 for o in outs), max_tokens=60)
            request = toy.request("r", max_tokens=60, seed=seed)
            stream = w.coordinator.start(request)
            got = []
            async for first in stream:
                got += [e.token_id for e in (first, *stream.arrived())]
                await w.clock.sleep(0.2)
            assert got == toy.expected(request)[0]
            await w.settled()

    toy.run(main())
