"""Every retry leaves its cause behind, budgets are the request's and the server's, and whoever fails is told why."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.cluster.budgets import CoordinatorConfig
from kvferry.cluster.telemetry import Metrics
from kvferry.runtime.errors import DeadlineExceeded, GroupUnavailable, QueueFull, RetriesExhausted
from kvferry.runtime.timeline import Cause, Phase, Setback, Timeline
from tests.support.cluster_world import event, turns

pytestmark = pytest.mark.core


@pytest.mark.parametrize(("server", "asked", "allowed"), [(3, None, 3), (3, 1, 1), (3, 0, 0), (1, 5, 1), (0, None, 0)])
def test_retry_budget(toy: Any, server: int, asked: int | None, allowed: int) -> None:
    """A request that wants no retries gets some, or one takes more than the server allows."""

    async def main() -> None:
        async with toy.World(
            CoordinatorConfig(retry_budget=server), router=toy.RouterConfig(disaggregate="never")
        ) as w:
            stream = w.coordinator.start(toy.request(retry_budget=asked))
            for i in range(allowed + 1):
                m = w.up(toy.ManualPort("m", 1 + i, "mixed"))
                await turns()
                assert len(m.submitted) == 1
                w.frame(m, event(m.submitted[0].key, i, 7))
                w.coordinator.on_group_down(m.peer, "killed by the test")
                await turns()
            assert [(await anext(stream)).token_id for _ in range(allowed + 1)] == [7] * (allowed + 1)
            with pytest.raises(RetriesExhausted, match=f"after {allowed} retries") as ended:
                await anext(stream)
            assert ended.value.facts == {"attempts": str(allowed + 2), "phase": "decode", "causes": "group_died"}
            assert len(stream.timeline.setbacks) == allowed + 1
            await w.settled()

    toy.run(main())


def test_each_cause_has_its_name(toy: Any) -> None:
    """The reason of a retry is lost, and all that anybody sees is a pause."""

    async def main() -> None:
        config = CoordinatorConfig(retry_budget=9, retry_pause_s=0.001)
        async with toy.World(config, router=toy.RouterConfig(disaggregate="never")) as w:
            m = w.up(toy.ManualPort("m", 1, "mixed"))
            stream = w.coordinator.start(toy.request())
            await turns()
            for label in ("queue_full", "no_free_blocks", "device_error"):
                w.frame(m, event(m.submitted[-1].key, 0, None, error_label=label, error_message="as the test says"))
                await w.clock.sleep(0.1)
            w.frame(m, event(m.submitted[-1].key, 5, 7))
            await turns()
            w.registry.check(w.clock.now_ns() + 60_000_000_000)
            m2 = w.up(toy.ManualPort("n", 2, "mixed"))
            await turns()
            w.coordinator.on_group_down(m2.peer, "killed by the test")
            w.up(toy.ManualPort("o", 3, "mixed"))
            await turns()
            assert [(s.cause, s.group) for s in stream.timeline.setbacks] == [
                (Cause.NO_ROOM, "m"),
                (Cause.NO_ROOM, "m"),
                (Cause.REFUSED, "m"),
                (Cause.EVENT_GAP, "m"),
                (Cause.GROUP_SILENT, "m"),
                (Cause.GROUP_DIED, "n"),
            ]
            await stream.aclose()
            await w.settled()

    toy.run(main())


def test_a_deadline_says_where_it_passed(toy: Any) -> None:
    """`deadline exceeded` without a word whether it waited for room, in a queue, or was just too long an answer."""

    async def main() -> None:
        async with toy.World(router=toy.RouterConfig(disaggregate="never")) as w:
            deadline_ns = w.clock.now_ns() + 1_000_000_000
            m = w.up(toy.ManualPort("m", 1, "mixed", num_blocks=12))
            asked = {"deadline_ns": deadline_ns, "prompt": 40, "max_tokens": 8}
            streams = [w.coordinator.start(toy.request(n, **asked, cache_salt=n)) for n in ("decodes", "waits")]
            streams += [w.coordinator.start(toy.request("late", prompt=2, deadline_ns=deadline_ns))]
            await turns()
            w.frame(m, event(m.submitted[0].key, 0, 7))
            assert [s.key.request_id for s in m.submitted] == ["decodes", "late"]
            await w.clock.sleep(2)
            found = []
            for stream in streams:
                with pytest.raises(DeadlineExceeded) as ended:
                    async for _ in stream:
                        pass
                found.append(ended.value.facts["phase"])
                assert f"phase: {found[-1]}" in str(ended.value)
                assert stream.timeline.seconds()[Phase(found[-1]) if found[-1] == "decode" else last(stream)] > 0
            assert found == ["decode", "admission", "prefill_queue"]
            await w.settled()

    def last(stream: Any) -> Phase:
        phase: Phase = stream.timeline.spans[-1].phase
        return phase

    toy.run(main())


def test_refusals_say_which_limit(toy: Any) -> None:
    async def main() -> None:
        async with toy.World(CoordinatorConfig(max_in_flight=1)) as w:
            w.add("d", "mixed")
            stream = w.coordinator.start(toy.request("a"))
            with pytest.raises(QueueFull) as refused:
                w.coordinator.start(toy.request("b"))
            assert refused.value.facts == {"limit": "requests"}
            await stream.aclose()
            await w.settled()

    toy.run(main())


def test_nobody_lives(toy: Any) -> None:
    """Fault 26, and that requests in line wait no longer than others."""

    async def main() -> None:
        async with toy.World(CoordinatorConfig(unavailable_timeout_s=5.0)) as w:
            streams = [w.coordinator.start(toy.request(f"r{i}")) for i in range(40)]
            await w.clock.sleep(5.1)
            for stream in streams:
                with pytest.raises(GroupUnavailable) as ended:
                    await anext(stream)
                assert ended.value.facts["phase"] == Phase.ADMISSION
            await w.settled()

    toy.run(main())


def test_metrics_count_causes_and_phases() -> None:
    metrics = Metrics(lambda: [], lambda: 3)
    timeline = Timeline(received_ns=0, attempts=2, setbacks=[Setback(Cause.GROUP_DIED, "d", 5, 0)])
    metrics.begun()
    metrics.ended("retries_exhausted", timeline)
    metrics.refused(QueueFull("full", 1.0).explained(limit="queue"))
    value = metrics.registry.get_sample_value
    assert value("kvferry_retries_total", {"cause": "group_died"}) == 1
    assert value("kvferry_retries_total", {"cause": "no_room"}) == 0
    assert value("kvferry_refused_requests_total", {"reason": "queue"}) == 1
    assert value("kvferry_requests_total", {"outcome": "retries_exhausted"}) == 1
    assert value("kvferry_requests_waiting") == 3
    assert value("kvferry_requests_in_flight") == 0
