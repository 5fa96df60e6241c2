"""The coordinator's flow, message by message and with toy engines. Guards against everything that loses, repeats or
leaks something when nothing unusual happens, and when consumers leave."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import pytest

from kvferry.cluster.budgets import CoordinatorConfig
from kvferry.runtime.errors import (
    Cancelled,
    DeadlineExceeded,
    GroupUnavailable,
    InvalidArgument,
    QueueFull,
)
from kvferry.runtime.ids import SequenceKey
from kvferry.runtime.request import FinishReason
from tests.support.cluster_world import event, turns

pytestmark = pytest.mark.core


def test_ordinary_flow(toy: Any) -> None:
    """The messages of one disaggregated request, in order."""

    async def main() -> None:
        async with toy.World() as w:
            p, d = w.up(toy.ManualPort("p", 1, "prefill")), w.up(toy.ManualPort("d", 2, "decode"))
            stream = w.coordinator.start(toy.request())
            await turns()
            (first,) = p.submitted
            assert (first.handoff_after, first.transfer_id, first.output_token_ids) == (1, None, [])
            ticket = d.answer()
            await turns()
            assert p.tickets == [ticket]
            assert w.router.booked(p.peer) == (10, 0)
            assert w.router.booked(d.peer) == (0, 1)
            w.frame(p, event(first.key, 0, 7, FinishReason.HANDOFF, num_cached_tokens=4, begin_ns=10, end_ns=20))
            assert w.router.booked(p.peer) == (0, 0)
            shown = await anext(stream)
            assert (shown.token_id, shown.finish_reason) == (7, None)
            (second,) = d.submitted
            assert (second.output_token_ids, second.handoff_after) == ([7], None)
            assert second.transfer_id == ticket.transfer_id
            done = toy.TransferEvent(
                transfer_id=ticket.transfer_id,
                attempt=ticket.attempt,
                state=toy.TransferState.COMPLETE,
                num_blocks=2,
                num_bytes=2000,
                begin_ns=15,
                end_ns=25,
            )
            w.frame(d, event(second.key, 1, 8, begin_ns=30, num_cached_tokens=8), transfers=[done])
            w.frame(d, event(second.key, 2, 9, FinishReason.LENGTH, num_cached_tokens=8))
            assert [e.token_id async for e in stream] == [8, 9]
            usage, times = stream.usage, stream.timeline
            assert (usage.num_prompt_tokens, usage.num_cached_tokens, usage.num_output_tokens) == (10, 4, 3)
            assert (usage.num_ferried_blocks, usage.ferried_bytes) == (2, 2000)
            assert (times.prefill_begin_ns, times.prefill_end_ns, times.decode_begin_ns) == (10, 20, 30)
            assert (times.transfer_begin_ns, times.transfer_end_ns, times.attempts) == (15, 25, 1)
            assert None not in (times.routed_ns, times.first_token_ns, times.finished_ns)
            assert not p.cancelled + d.cancelled + p.ended + d.ended
            await w.settled()

    toy.run(main())


def test_nothing_missing_needs_no_send(toy: Any) -> None:
    async def main() -> None:
        async with toy.World() as w:
            p, d = w.up(toy.ManualPort("p", 1, "prefill")), w.up(toy.ManualPort("d", 2, "decode"))
            stream = w.coordinator.start(toy.request())
            await turns()
            d.answer(num_missing=0)
            await turns()
            assert not p.tickets
            await stream.aclose()
            await w.settled()

    toy.run(main())


@pytest.mark.parametrize("ticket_first", [True, False])
def test_handoff_before_the_ticket(toy: Any, ticket_first: bool) -> None:
    """A prefill faster than the ticket's way must neither lose the transfer nor submit twice."""

    async def main() -> None:
        async with toy.World() as w:
            p, d = w.up(toy.ManualPort("p", 1, "prefill")), w.up(toy.ManualPort("d", 2, "decode"))
            stream = w.coordinator.start(toy.request())
            await turns()
            if ticket_first:
                d.answer()
                await turns()
            w.frame(p, event(p.submitted[0].key, 0, 7, FinishReason.HANDOFF))
            assert d.submitted[0].transfer_id is not None
            if not ticket_first:
                d.answer()
                await turns()
            assert len(p.tickets) == len(d.submitted) == 1
            await stream.aclose()
            await w.settled()

    toy.run(main())


@pytest.mark.parametrize("kind", ["max_tokens", "eos"])
def test_a_request_that_ends_at_its_first_token_never_moves(toy: Any, kind: str) -> None:
    """Fault 39, and blocks reserved at the destination that nobody gives back."""

    async def main() -> None:
        async with toy.World() as w:
            p, d = w.add("p", "prefill"), w.add("d", "decode")
            seed = toy.seed_where(lambda out: out[0][0] == toy.EOS)
            request = toy.request(max_tokens=1) if kind == "max_tokens" else toy.request(seed=seed)
            stream = w.coordinator.start(request)
            assert await toy.collect(stream, 1) == toy.expected(request)
            assert stream.usage.num_output_tokens == 1
            assert not d.running + d.waiting
            await w.settled()
            assert p.num_expired + d.num_expired == 0

    toy.run(main())


def test_one_token_asks_for_no_ticket(toy: Any) -> None:
    async def main() -> None:
        async with toy.World() as w:
            p, d = w.up(toy.ManualPort("p", 1, "prefill")), w.up(toy.ManualPort("d", 2, "decode"))
            stream = w.coordinator.start(toy.request(max_tokens=1))
            await turns()
            assert not p.expects + d.expects
            assert [s.handoff_after for s in p.submitted + d.submitted] == [None]
            await stream.aclose()
            await w.settled()

    toy.run(main())


def test_eos_at_prefill_ends_the_transfer_on_both_sides(toy: Any) -> None:
    async def main() -> None:
        async with toy.World() as w:
            p, d = w.up(toy.ManualPort("p", 1, "prefill")), w.up(toy.ManualPort("d", 2, "decode"))
            stream = w.coordinator.start(toy.request())
            await turns()
            ticket = d.answer()
            await turns()
            w.frame(p, event(p.submitted[0].key, 0, 0, FinishReason.STOP))
            assert [e.finish_reason async for e in stream] == [FinishReason.STOP]
            assert p.ended == d.ended == [ticket.transfer_id]
            await w.settled()

    toy.run(main())


@pytest.mark.parametrize("n", [1, 3])
def test_toy_cluster(toy: Any, n: int) -> None:
    """Streams equal the toy model's; blocks were ferried; the second request hits what the first left."""

    async def main() -> None:
        async with toy.World() as w:
            w.add("p", "prefill"), w.add("d", "decode")
            seed = toy.seed_where(lambda outs: all(len(o) == 8 for o in outs), n=n, max_tokens=8)
            request = toy.request(n=n, max_tokens=8, seed=seed, prompt=40)
            stream = w.coordinator.start(request)
            assert await toy.collect(stream, n) == toy.expected(request)
            assert stream.usage.num_ferried_blocks == 10
            assert stream.usage.num_cached_tokens == 0
            again = toy.request(name="again", n=n, max_tokens=8, seed=seed, prompt=40)
            stream = w.coordinator.start(again)
            assert await toy.collect(stream, n) == toy.expected(again)
            assert stream.usage.num_cached_tokens == 39
            assert w.coordinator.num_finished == 2
            await w.settled()

    toy.run(main())


def test_sequences_that_end_at_prefill_stay_the_others_move(toy: Any) -> None:
    async def main() -> None:
        async with toy.World() as w:
            p, d = w.up(toy.ManualPort("p", 1, "prefill")), w.up(toy.ManualPort("d", 2, "decode"))
            stream = w.coordinator.start(toy.request(n=3))
            await turns()
            ticket = d.answer()
            await turns()
            keys = [s.key for s in p.submitted]
            w.frame(
                p,
                event(keys[0], 0, 5, FinishReason.HANDOFF),
                event(keys[1], 0, 0, FinishReason.STOP),
                event(keys[2], 0, 6, FinishReason.HANDOFF),
            )
            assert [(s.key.index, s.transfer_id) for s in d.submitted] == [
                (0, ticket.transfer_id),
                (2, ticket.transfer_id),
            ]
            for sequence in d.submitted:
                w.frame(d, event(sequence.key, 1, 0, FinishReason.STOP))
            assert len([e async for e in stream]) == 5
            assert not d.ended
            await w.settled()

    toy.run(main())


def test_stop_ends_one_sequence_and_drops_what_was_not_read(toy: Any) -> None:
    """A stop string is seen later than the engine runs: what it made since must not be shown or counted."""

    async def main() -> None:
        async with toy.World() as w:
            d = w.up(toy.ManualPort("d", 2, "mixed"))
            stream = w.coordinator.start(toy.request(n=2))
            await turns()
            a, b = (s.key for s in d.submitted)
            w.frame(d, event(a, 0, 5), event(b, 0, 6))
            w.frame(d, event(a, 1, 5), event(b, 1, 6))
            assert (await anext(stream)).key == a
            stream.stop(0)
            stream.stop(0)
            assert d.cancelled == [a]
            w.frame(d, event(a, 2, 5), event(b, 2, 6, FinishReason.LENGTH))
            assert [(e.key, e.position) async for e in stream] == [(b, 0), (b, 1), (b, 2)]
            assert stream.usage.num_output_tokens == 1 + 3
            assert w.coordinator.num_finished == 1
            await w.settled()

    toy.run(main())


def test_stop_of_the_last_sequence_ends_the_request(toy: Any) -> None:
    async def main() -> None:
        async with toy.World() as w:
            p, d = w.add("p", "prefill"), w.add("d", "decode")
            request = toy.request(max_tokens=50, seed=toy.seed_where(lambda o: len(o[0]) > 20, max_tokens=50))
            stream = w.coordinator.start(request)
            got = []
            async for e in stream:
                got.append(e.token_id)
                if len(got) == 5:
                    stream.stop(0)
            assert got == toy.expected(request)[0][:5]
            assert stream.usage.num_output_tokens == 5
            await w.settled()
            assert not p.running + d.running

    toy.run(main())


def test_repeated_late_and_stale_events_are_dropped(toy: Any) -> None:
    """Fault 7: messages nobody expects any more must neither be shown nor break anything."""

    async def main() -> None:
        async with toy.World() as w:
            p, d = w.up(toy.ManualPort("p", 1, "prefill")), w.up(toy.ManualPort("d", 2, "decode"))
            stream = w.coordinator.start(toy.request())
            await turns()
            d.answer()
            await turns()
            first = p.submitted[0].key
            handoff = event(first, 0, 7, FinishReason.HANDOFF)
            w.frame(p, handoff)
            w.frame(p, handoff)
            w.frame(d, handoff)
            w.frame(p, event(first, 1, 99))
            second = d.submitted[0].key
            w.frame(d, event(second, 0, 99), event(second, 1, 8), event(second, 1, 99))
            w.frame(d, event(SequenceKey(second.request_id, 5, 0), 1, 99), event(SequenceKey("nobody", 0, 0), 0, 99))
            stale = toy.StepFrame(1, 0, [event(second, 2, 99)], [], None, toy.Load())
            w.coordinator.on_frame(d.peer, stale)
            w.frame(d, event(second, 2, 9, FinishReason.LENGTH))
            assert [e.token_id async for e in stream] == [7, 8, 9]
            assert len(d.submitted) == 1
            await w.settled()

    toy.run(main())


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("kind", ["auto", "always"])
def test_cancel_at_every_moment(toy: Any, n: int, kind: Any) -> None:
    """Faults 8 and 10: a client that leaves at any point leaves nothing behind."""

    async def main(after_s: float) -> bool:
        async with toy.World(router=toy.RouterConfig(disaggregate=kind)) as w:
            p, d = w.add("p", "prefill", latency_s=0.004), w.add("d", "decode", latency_s=0.004)
            request = toy.request(n=n, prompt=33, max_tokens=6, seed=toy.seed_where(lambda o: len(o[0]) == 6, n=n))
            stream = w.coordinator.start(request)
            await w.clock.sleep(after_s)
            was_running = w.coordinator.in_flight == 1
            await stream.aclose()
            await stream.aclose()
            assert [e async for e in stream] == []
            await w.settled()
            assert p.num_expired + d.num_expired == 0
            assert w.coordinator.num_cancelled == was_running
            return was_running

    after_s = 0.0
    while toy.run(main(after_s)):
        after_s += 0.003
    assert after_s > 0.1


def test_consumer_cancelled_while_it_waits(toy: Any) -> None:
    async def main() -> None:
        async with toy.World() as w:
            w.add("p", "prefill"), w.add("d", "decode")

            async def consume() -> None:
                async with aclosing(w.coordinator.start(toy.request(max_tokens=500, prompt=100))) as stream:
                    async for _ in stream:
                        pass

            task = asyncio.ensure_future(consume())
            await w.clock.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await w.settled()

    toy.run(main())


def test_simultaneous_requests_follow_the_prefix_that_is_being_computed(toy: Any) -> None:
    """Of 16 that arrive at once with one system prompt, all but the first hit it, although nothing is cached yet."""

    async def main() -> None:
        async with toy.World(router=toy.RouterConfig()) as w:
            prefills = [w.up(toy.ManualPort(f"p{i}", i, "prefill")) for i in range(2)]
            decodes = [w.up(toy.ManualPort(f"d{i}", 2 + i, "decode")) for i in range(2)]
            streams = [w.coordinator.start(toy.request(f"r{i}", prompt=400)) for i in range(16)]
            await turns()
            assert len([p for p in prefills if p.submitted]) == 1
            assert len([d for d in decodes if d.submitted]) <= 1, "only where the prefix is being ferried to"
            assert sum(len(g.submitted) for g in prefills + decodes) == 16
            for stream in streams:
                await stream.aclose()
            await w.settled()

    toy.run(main())


def test_leases_are_renewed_while_the_decode_leg_waits(toy: Any) -> None:
    """Fault 3: leases of queued requests lapsed because only running ones renewed them."""

    async def main() -> None:
        config = CoordinatorConfig(transfer_timeout_s=0.3)
        async with toy.World(config) as w:
            p, d = w.add("p", "prefill"), w.add("d", "decode")
            p.prefill_chunk = 1  # two seconds of prefill
            request = toy.request(prompt=100)
            stream = w.coordinator.start(request)
            assert await toy.collect(stream, 1) == toy.expected(request)
            assert stream.usage.num_ferried_blocks == 25
            await w.settled()
            assert p.num_expired + d.num_expired == 0

    toy.run(main())


@pytest.mark.parametrize("left_s", [-1.0, 0.0005, 0.03, 0.1])
def test_deadline(toy: Any, left_s: float) -> None:
    async def main() -> None:
        async with toy.World() as w:
            w.add("p", "prefill"), w.add("d", "decode")
            deadline_ns = w.clock.now_ns() + int(left_s * 1e9)
            seed = toy.seed_where(lambda o: len(o[0]) == 50, max_tokens=50)
            stream = w.coordinator.start(toy.request(max_tokens=50, seed=seed, deadline_ns=deadline_ns))
            with pytest.raises(DeadlineExceeded):
                await toy.collect(stream, 1)
            assert w.clock.now_ns() < max(deadline_ns, toy.START_NS) + 5_000_000
            await w.settled()
            assert w.coordinator.num_failed == 1

    toy.run(main())


def test_admission(toy: Any) -> None:
    async def main() -> None:
        async with toy.World(CoordinatorConfig(max_in_flight=2)) as w:
            w.add("d", "mixed")
            streams = [w.coordinator.start(toy.request(name)) for name in "ab"]
            with pytest.raises(QueueFull) as full:
                w.coordinator.start(toy.request("c"))
            assert full.value.retry_after_s > 0
            for stream in streams:
                await toy.collect(stream, 1)
            again = w.coordinator.start(toy.request("a"))
            with pytest.raises(InvalidArgument, match="request_id"):
                w.coordinator.start(toy.request("a"))
            await toy.collect(again, 1)
            await w.settled()

    toy.run(main())


def test_a_callers_error_ends_the_whole_request(toy: Any) -> None:
    async def main() -> None:
        async with toy.World() as w:
            d = w.up(toy.ManualPort("d", 2, "mixed"))
            stream = w.coordinator.start(toy.request(n=2))
            await turns()
            a, b = (s.key for s in d.submitted)
            message = "prompt='...': too long; shorten it"
            w.frame(d, event(a, 0, None, error_label="invalid_argument", error_message=message))
            with pytest.raises(InvalidArgument) as error:
                await anext(stream)
            assert str(error.value) == message
            assert error.value.field == "prompt"
            assert d.cancelled == [b]
            await w.settled()

    toy.run(main())


def test_no_group_at_all(toy: Any) -> None:
    """Fault 26: a request waits, bounded, and goes on when somebody comes."""

    async def main() -> None:
        async with toy.World(CoordinatorConfig(unavailable_timeout_s=5.0)) as w:
            stream = w.coordinator.start(toy.request("a"))
            with pytest.raises(GroupUnavailable):
                await anext(stream)
            assert w.clock.now_ns() - toy.START_NS == pytest.approx(5e9, rel=0.01)
            request = toy.request("b")
            stream = w.coordinator.start(request)
            await w.clock.sleep(3)
            w.add("p", "prefill")
            began = w.clock.now_ns()
            assert await toy.collect(stream, 1) == toy.expected(request)
            assert w.clock.now_ns() - began < 0.5e9
            await w.settled()

    toy.run(main())


def test_shutting_down_cancels_what_is_in_flight(toy: Any) -> None:
    async def main() -> None:
        async with toy.World() as w:
            w.add("d", "mixed")
            stream = w.coordinator.start(toy.request(max_tokens=500))
            await w.clock.sleep(0.001)
        with pytest.raises(Cancelled):
            await toy.collect(stream, 1)
        with pytest.raises(GroupUnavailable):
            w.coordinator.start(toy.request("late"))

    toy.run(main())
