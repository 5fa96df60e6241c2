"""Small setbacks, message by message: no room, no answer, a refusal, a gap. The request goes on another way."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvferry.cluster.coordinator import CoordinatorConfig
from kvferry.runtime.errors import NoFreeBlocks
from kvferry.runtime.ids import SequenceKey
from kvferry.runtime.request import FinishReason, TokenEvent

pytestmark = pytest.mark.core


def event(key: SequenceKey, position: int, token: int | None, reason: FinishReason | None = None, **more: Any) -> Any:
    return TokenEvent(key=key, position=position, token_id=token, finish_reason=reason, **more)


async def turns(n: int = 5) -> None:
    for _ in range(n):
        await asyncio.sleep(0)


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
