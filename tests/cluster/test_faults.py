"""Groups die, refuse, fall silent: streams equal the undisturbed run, each token once, nothing is left behind."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.cluster.budgets import CoordinatorConfig
from kvferry.cluster.registry import RegistryConfig
from kvferry.runtime.errors import NoFreeBlocks, QueueFull, RetriesExhausted
from kvferry.runtime.request import FinishReason, TokenEvent

pytestmark = pytest.mark.core


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("victim", ["p", "d"])
def test_death_at_every_moment(toy: Any, victim: str, n: int) -> None:
    """Faults 1, 26, 27: whatever the request is doing when a group dies, it finishes elsewhere, tokens unchanged."""

    async def main(after_s: float) -> bool:
        async with toy.World() as w:
            groups = {name: w.add(name, role) for name, role in (("p", "prefill"), ("d", "decode"))}
            spare = w.add("spare", "mixed")
            seed = toy.seed_where(lambda o: all(len(x) == 6 for x in o), n=n, prompt=33)
            request = toy.request(n=n, prompt=33, seed=seed)
            stream = w.coordinator.start(request)
            await w.clock.sleep(after_s)
            running = w.coordinator.in_flight == 1
            w.kill(groups[victim])
            assert await toy.collect(stream, n) == toy.expected(request)
            assert stream.timeline.attempts <= 2
            await w.settled()
            assert sum(g.num_expired for g in (*groups.values(), spare)) == 0
            return running

    after_s = 0.0
    while toy.run(main(after_s)):
        after_s += 0.007
    assert after_s > 0.1


def test_decode_death_after_each_token(toy: Any) -> None:
    """Every token's position: the resumed leg gets exactly the delivered tokens."""

    async def main(after: int) -> None:
        async with toy.World() as w:
            w.add("p", "prefill")
            decoders = [w.add("d1", "decode"), w.add("d2", "decode")]
            seed = toy.seed_where(lambda o: len(o[0]) == 8, max_tokens=8)
            request = toy.request(max_tokens=8, seed=seed)
            stream = w.coordinator.start(request)
            got = []
            async for event in stream:
                got.append(event.token_id)
                if len(got) == after:
                    for d in decoders:
                        if d.running or d.waiting or d.inbound:
                            w.kill(d)
            assert [got] == toy.expected(request)
            resumed = w.coordinator.num_resumed
            assert resumed == (after < 8)
            await w.settled()

    for after in range(1, 9):
        toy.run(main(after))


@pytest.mark.parametrize("n", [1, 3])
def test_lost_message_is_not_waited_for_for_ever(toy: Any, n: int) -> None:
    """The lease is renewed as long as the request waits, and the request waits as long as it is renewed."""

    async def main() -> None:
        async with toy.World(CoordinatorConfig(transfer_timeout_s=0.3)) as w:
            p, d = w.add("p", "prefill"), w.add("d", "decode")
            p.prefill_chunk = 1  # so slow that leases must be renewed until it is over
            w.carry = lambda ticket: None
            seed = toy.seed_where(lambda o: all(len(x) == 6 for x in o), n=n, prompt=40)
            request = toy.request(n=n, prompt=40, seed=seed)
            stream = w.coordinator.start(request)
            assert await toy.collect(stream, n) == toy.expected(request)
            assert stream.usage.num_ferried_blocks == 0
            assert stream.timeline.attempts == 1
            assert (p.num_expired, d.num_expired) == (0, 1)
            await w.settled()

    toy.run(main())


def test_prefill_goes_on_when_decode_dies(toy: Any) -> None:
    """Fault 27 turned round: only the decode part is routed again."""

    async def main() -> None:
        async with toy.World() as w:
            p = w.up(toy.ManualPort("p", 1, "prefill"))
            d1, d2 = w.up(toy.ManualPort("d1", 2, "decode")), w.up(toy.ManualPort("d2", 3, "decode"))
            stream = w.coordinator.start(toy.request())
            await w.clock.sleep(0.01)
            dead, other = (d1, d2) if d1.expects else (d2, d1)
            old = dead.answer()
            await w.clock.sleep(0.01)
            w.coordinator.on_group_down(dead.peer, "test")
            await w.clock.sleep(0.01)
            new = other.answer()
            await w.clock.sleep(0.01)
            assert p.tickets == [old, new]
            assert p.ended == [old.transfer_id]
            assert new.transfer_id == old.transfer_id, "the prefill leg knows its transfer by that name"
            assert new.attempt > old.attempt
            assert p.gone == other.gone == [dead.peer]
            assert len(p.submitted) == 1
            assert not p.cancelled
            w.frame(p, TokenEvent(key=p.submitted[0].key, position=0, token_id=3, finish_reason=FinishReason.HANDOFF))
            assert other.submitted[0].transfer_id == new.transfer_id
            assert stream.timeline.attempts == 1
            await stream.aclose()
            await w.settled()

    toy.run(main())


def test_death_of_one_group_leaves_other_sequences_alone(toy: Any) -> None:
    async def main() -> None:
        async with toy.World() as w:
            p, d = w.up(toy.ManualPort("p", 1, "prefill")), w.up(toy.ManualPort("d", 2, "decode"))
            stream = w.coordinator.start(toy.request(n=2))
            await w.clock.sleep(0.01)
            d.answer()
            await w.clock.sleep(0.01)
            w.frame(p, TokenEvent(key=p.submitted[0].key, position=0, token_id=3, finish_reason=FinishReason.HANDOFF))
            w.coordinator.on_group_down(p.peer, "test")
            await w.clock.sleep(0.01)
            assert [s.key.index for s in d.submitted] == [0, 1]
            assert [s.output_token_ids for s in d.submitted] == [[3], []]
            assert not d.cancelled
            await stream.aclose()
            await w.settled()

    toy.run(main())


@pytest.mark.parametrize("after_s", [0.0, 0.03, 0.06, 0.09, 0.12, 0.15])
def test_all_groups_die_and_one_comes_back(toy: Any, after_s: float) -> None:
    """Fault 26: with nobody left the request waits for a replacement, then goes on where it stood."""

    async def main() -> None:
        async with toy.World() as w:
            p, d = w.add("p", "prefill"), w.add("d", "decode")
            seed = toy.seed_where(lambda o: len(o[0]) == 8, max_tokens=8, prompt=33)
            request = toy.request(max_tokens=8, prompt=33, seed=seed)
            stream = w.coordinator.start(request)
            await w.clock.sleep(after_s)
            w.kill(p)
            w.kill(d, back_after_s=8.0)
            assert await toy.collect(stream, 1) == toy.expected(request)
            assert stream.timeline.attempts >= 2
            await w.settled()

    toy.run(main())


def test_retry_budget(toy: Any) -> None:
    """A request that kills whoever runs it must stop somewhere."""

    async def main() -> None:
        async with toy.World(CoordinatorConfig(retry_budget=2)) as w:
            ports = [w.up(toy.ManualPort(f"m{i}", i, "mixed")) for i in range(5)]
            stream = w.coordinator.start(toy.request(prompt=3))
            for _ in range(3):
                await w.clock.sleep(0.01)
                (victim,) = [p for p in ports if p.submitted and w.registry.get(p.peer)]
                w.coordinator.on_group_down(victim.peer, "poisoned")
            with pytest.raises(RetriesExhausted, match="poisoned"):
                await anext(stream)
            assert sum(len(p.submitted) for p in ports) == 3
            await w.settled()

    toy.run(main())


def test_a_full_group_is_left_for_another(toy: Any) -> None:
    async def main() -> None:
        async with toy.World() as w:
            groups = [w.add("a", "mixed"), w.add("b", "mixed")]
            for g in groups:
                g.refuse_submits = ["queue_full"]
            request = toy.request(prompt=3)
            stream = w.coordinator.start(request)
            assert await toy.collect(stream, 1) == toy.expected(request)
            assert stream.timeline.attempts == 3
            await w.settled()

    toy.run(main())


def test_everybody_full_is_said_at_once(toy: Any) -> None:
    """Overload must look like overload to the client, not like a broken cluster."""

    async def main() -> None:
        async with toy.World() as w:
            w.add("a", "mixed").refuse_submits = ["no_free_blocks"] * 9
            began = w.clock.now_ns()
            stream = w.coordinator.start(toy.request(prompt=3))
            with pytest.raises(QueueFull):
                await anext(stream)
            assert 0.7e9 < w.clock.now_ns() - began < 1.2e9  # 0.1 + 0.2 + 0.4 s of pauses
            await w.settled()

    toy.run(main())


def test_a_lost_frame_is_a_lost_leg(toy: Any) -> None:
    """A gap in a sequence's positions must never reach the client."""

    async def main() -> None:
        async with toy.World() as w:
            w.add("m", "mixed")
            seed = toy.seed_where(lambda o: len(o[0]) == 8, max_tokens=8)
            request = toy.request(max_tokens=8, seed=seed)
            lost: list[int] = []

            def lose(_: Any, frame: Any) -> list[Any]:
                if not lost and any(e.position == 3 for e in frame.tokens):
                    lost.append(frame.seq)
                    return []
                return [frame]

            w.disturb = lose
            stream = w.coordinator.start(request)
            assert await toy.collect(stream, 1) == toy.expected(request)
            assert lost
            assert stream.timeline.attempts == 2
            await w.settled()

    toy.run(main())


def test_silent_groups_lose_new_requests_first_and_their_own_later(toy: Any) -> None:
    """Faults 30 and 31: a short silence only costs routing; a long one is left, and waking up disturbs nobody."""

    async def main() -> None:
        async with toy.World(registry=RegistryConfig(unreachable_after_s=1.0, abandon_after_s=5.0)) as w:
            a = w.add("a", "mixed")
            seed = toy.seed_where(lambda o: len(o[0]) == 30, max_tokens=30)
            request = toy.request(max_tokens=30, seed=seed)
            stream = w.coordinator.start(request)
            await w.clock.sleep(0.2)
            b = w.add("b", "mixed")
            a.silent = True
            await w.clock.sleep(2.0)
            assert len(a.running) == 1
            other = toy.request("other")
            assert await toy.collect(w.coordinator.start(other), 1) == toy.expected(other)
            assert b.sent
            assert w.registry.get(a.peer).state == "unreachable"
            await w.clock.sleep(4.0)
            a.silent = False
            assert await toy.collect(stream, 1) == toy.expected(request)
            assert stream.timeline.attempts == 2
            await w.settled()
            assert w.registry.get(a.peer).routable

    toy.run(main())


# ---------------------------------------------------------------- random lives
FAULTS = st.lists(
    st.tuples(
        st.integers(0, 40).map(lambda i: i / 100),
        st.sampled_from(["kill", "hiccup", "refuse", "no_room", "cancel", "stop", "repeat"]),
        st.integers(0, 3),
    ),
    max_size=6,
)
SHAPES = st.lists(
    st.tuples(st.integers(1, 40), st.integers(1, 12), st.integers(1, 3), st.integers(0, 5)), min_size=1, max_size=5
)


async def _life(toy: Any, kind: str, shapes: list[Any], faults: list[Any], latencies: list[float]) -> None:
    config = CoordinatorConfig(retry_budget=20, transfer_timeout_s=1.0, expect_timeout_s=0.5)
    registry = RegistryConfig(unreachable_after_s=0.3, abandon_after_s=1.0)
    async with toy.World(config, registry, toy.RouterConfig(disaggregate=kind)) as w:
        for (name, role), latency_s in zip(
            (("p0", "prefill"), ("p1", "prefill"), ("d0", "decode"), ("d1", "decode")), latencies, strict=True
        ):
            w.add(name, role, latency_s=latency_s)
        requests = [
            toy.request(f"r{i}", prompt=prompt, max_tokens=tokens, n=n, seed=seed)
            for i, (prompt, tokens, n, seed) in enumerate(shapes)
        ]
        streams = [w.coordinator.start(r) for r in requests]
        for at_s, fault, which in sorted(faults):
            await w.clock.sleep(max(0.0, at_s - (w.clock.now_ns() - toy.START_NS) / 1e9))
            w.coordinator.check_invariants()
            alive = [g for g in w.groups if g.alive]
            group = alive[which % len(alive)] if alive else None
            stream = streams[which % len(streams)]
            if fault == "kill" and group:
                w.kill(group, back_after_s=0.2)
            elif fault == "hiccup" and group:
                group.silent = not group.silent
            elif fault == "refuse" and group:
                group.refuse_submits = ["queue_full", "group_unavailable"]
            elif fault == "no_room" and group:
                group.refuse_expect = NoFreeBlocks("full")
            elif fault == "cancel":
                await stream.aclose()
            elif fault == "stop":
                stream.stop(0)
            elif fault == "repeat":
                w.disturb = lambda g, frame: [frame, frame, *g.sent[-3:]]
        for group in w.groups:
            group.silent = False
        for request, stream in zip(requests, streams, strict=True):
            outputs: list[list[int]] = [[] for _ in range(request.sampling.n)]
            async for event in stream:
                if event.token_id is not None:
                    assert event.position == len(outputs[event.key.index])
                    outputs[event.key.index].append(event.token_id)
            for i, (got, wanted) in enumerate(zip(outputs, toy.expected(request), strict=True)):
                left_early = any(f in ("cancel", "stop") for _, f, _ in faults)
                assert got == (wanted[: len(got)] if left_early else wanted), f"{request.request_id}.{i}"
        await w.settled(5.0)
        w.disturb = lambda g, frame: [frame]


@given(
    kind=st.sampled_from(["auto", "always", "never"]),
    shapes=SHAPES,
    faults=FAULTS,
    latencies=st.lists(st.sampled_from([0.001, 0.005, 0.03]), min_size=4, max_size=4),
)
@settings(max_examples=60, deadline=None)
def test_random_lives(toy: Any, kind: str, shapes: list[Any], faults: list[Any], latencies: list[float]) -> None:
    """Streams are exactly-once and equal to the fault-free run, and nothing leaks, under any mix of faults."""
    toy.run(_life(toy, kind, shapes, faults, latencies))
