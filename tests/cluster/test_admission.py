"""The line at the gateway's door and what is refused there. Guards against requests that starve, that are stuck behind
a bigger one, that wait for what cannot come in time, and against room that nobody is told of."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.cluster.admission import MAX_LOOK, Admission, Line, Place
from kvferry.cluster.budgets import CoordinatorConfig
from kvferry.cluster.registry import Member
from kvferry.cluster.router import Demand, Router, RouterConfig
from kvferry.cluster.router_load import ENOUGH_STEPS, PRIOR_OUTPUT_TOKENS
from kvferry.runtime.errors import QueueFull
from kvferry.runtime.ids import RequestId
from kvferry.runtime.request import FinishReason, Request, SamplingParams
from tests.support.cluster_world import event, turns

pytestmark = pytest.mark.core
SECOND = 1_000_000_000


# ---------------------------------------------------------------- the line
class Crowd:
    """A room of some size, and people of different sizes who try when they are woken, as drivers do."""

    def __init__(self, room: int, max_bypass: int) -> None:
        self.room, self.line = room, Line(max_bypass)
        self.inside: list[int] = []
        self.entered: list[int] = []
        self.woken: list[int] = []
        self.places: dict[int, Place] = {}
        self.sizes: dict[int, int] = {}

    def arrive(self, who: int, rank: int, size: int) -> None:
        self.sizes[who] = size
        wake: Callable[[], None] = lambda: self.woken.append(who)  # noqa: E731
        self.places[who] = self.line.enter(rank, Demand(1, 1, 1), wake)
        self.woken.append(who)

    def turn(self) -> None:
        """Everybody who was woken tries, in order."""
        while self.woken:
            who = self.woken.pop(0)
            place = self.places.get(who)
            if place is None or not self.line.may_try(place):
                continue
            if not self.inside or self.used + self.sizes[who] <= self.room:
                self.inside.append(who)
                self.entered.append(who)
                self.line.leave(self.places.pop(who), admitted=True)
            else:
                self.line.block(place)

    @property
    def used(self) -> int:
        return sum(self.sizes[who] for who in self.inside)

    def go(self, index: int) -> None:
        self.inside.pop(index % len(self.inside))
        self.line.call()


@given(
    max_bypass=st.integers(0, 4),
    steps=st.lists(
        st.tuples(st.sampled_from(["arrive", "go", "quit"]), st.integers(0, 9), st.integers(1, 9)), max_size=60
    ),
)
@settings(max_examples=200, deadline=None)
def test_line(max_bypass: int, steps: list[tuple[str, int, int]]) -> None:
    """Starvation, an idle room while somebody fits, a wake-up that is lost."""
    crowd, passed = Crowd(10, max_bypass), dict[int, int]()
    for who, (what, number, size) in enumerate(steps):
        before = list(crowd.entered)
        if what == "arrive":
            crowd.arrive(who, who - 4 * (number % 2), size)
        elif what == "go" and crowd.inside:
            crowd.go(number)
        elif what == "quit" and crowd.places:
            crowd.line.leave(crowd.places.pop(sorted(crowd.places)[number % len(crowd.places)]))
        ranks = {w: p.rank for w, p in crowd.places.items()}
        crowd.turn()
        for entered in crowd.entered[len(before) :]:
            for other, place in crowd.places.items():
                if place.rank < ranks[entered]:
                    passed[other] = passed.get(other, 0) + 1
                    assert passed[other] <= max_bypass
        assert crowd.inside or not crowd.places, "the room is empty and somebody waits"
        for place in crowd.line.places[:MAX_LOOK]:
            if not place.blocked:
                break
            who_waits = next(w for w, p in crowd.places.items() if p is place)
            assert crowd.used + crowd.sizes[who_waits] > crowd.room
            if place.num_passed >= max_bypass:
                break
        else:
            assert len(crowd.line.places) <= MAX_LOOK or all(p.blocked for p in crowd.line.places[:MAX_LOOK])
    while crowd.inside:
        crowd.go(0)
        crowd.turn()
    assert not crowd.places, "somebody was forgotten"


# ---------------------------------------------------------------- estimates
def cluster(toy: Any, measured: bool = True, **info: Any) -> tuple[Router, Admission, list[Member]]:
    router = Router(RouterConfig())
    admission = Admission(router, max_queue_s=10.0, max_bypass=2)
    members = [
        Member(toy.ManualPort(g, i, r, **info), 0) for i, (g, r) in enumerate((("p", "prefill"), ("d", "decode")))
    ]
    if measured:
        for member in members * ENOUGH_STEPS:
            router.observe(member.peer, toy.Load(prefill_tokens_per_s=100.0, decode_step_s=0.1, num_running=1))
    return router, admission, members


def request(prompt: int, deadline_s: float | None = None, max_tokens: int = 16) -> Request:
    return Request(
        request_id=RequestId("r"),
        prompt_token_ids=[1] * prompt,
        sampling=SamplingParams(max_tokens=max_tokens),
        eos_token_ids=[],
        deadline_ns=None if deadline_s is None else int(deadline_s * 1e9),
    )


def check(admission: Admission, members: list[Member], asked: Request) -> None:
    demand = Demand(len(asked.prompt_token_ids), 1, asked.sampling.max_tokens)
    admission.check(asked, demand, 0, members, 0)


def test_a_long_queue_refuses_with_the_time_until_it_is_shorter(toy: Any) -> None:
    """A client that is told nothing, or a constant, comes back into the same queue."""
    router, admission, members = cluster(toy)
    decision = router.route(Demand(3000, 1, 16), members, {})
    assert decision is not None
    booking = router.book(decision)
    with pytest.raises(QueueFull) as refused:
        check(admission, members, request(10))
    # 3000 tokens at 100 tokens/s, on the one group that prefills
    assert refused.value.retry_after_s == pytest.approx(30.0 - 10.0, rel=0.01)
    assert refused.value.facts["limit"] == "queue"
    assert float(refused.value.facts["estimated_wait_s"]) == pytest.approx(30.0, rel=0.01)
    booking.release()
    check(admission, members, request(10))


def test_decodes_that_fill_the_pools_are_work_too(toy: Any) -> None:
    """The prefill queue is empty, the pools are not: requests were let in and waited for minutes."""
    router, admission, members = cluster(toy, num_blocks=10)
    for _ in range(40):
        decision = router.route(Demand(4, 1, 16), members, {})
        assert decision is not None
        router.book(decision).prefilled()
    with pytest.raises(QueueFull):
        check(admission, members, request(4))


@pytest.mark.parametrize(("deadline_s", "fits"), [(0.5, False), (4.0, False), (6.0, True), (100.0, True)])
def test_a_deadline_that_cannot_be_met_is_refused_at_once(toy: Any, deadline_s: float, fits: bool) -> None:
    """Work is done for a request whose deadline ends it before its first token. Half an estimate must be too long."""
    _, admission, members = cluster(toy)
    asked = request(1000, deadline_s)
    if fits:
        check(admission, members, asked)
        return
    with pytest.raises(QueueFull) as refused:
        check(admission, members, asked)
    assert refused.value.facts["limit"] == "deadline"
    assert refused.value.retry_after_s == pytest.approx(max(0.1, 5.0 - deadline_s))


def test_nothing_is_refused_on_a_guess(toy: Any) -> None:
    """A fresh deployment turned its first long prompts away because of priors."""
    _, admission, members = cluster(toy, measured=False)
    check(admission, members, request(100_000, deadline_s=0.5))
    check(admission, [], request(100_000))


def test_nor_on_first_steps_which_take_long(toy: Any) -> None:
    """One slow step made 7 s out to be 398: of a burst on a fresh deployment, some were turned away."""
    router, admission, members = cluster(toy, measured=False, num_blocks=10)
    for _ in range(40):
        decision = router.route(Demand(4, 1, 16), members, {})
        assert decision is not None
        router.book(decision).prefilled()
    step_s = 0.005 / PRIOR_OUTPUT_TOKENS  # for all that waits: less than 1 s
    own = [30 * step_s] + [step_s] * 100
    mean_s = own[0]  # as an engine averages its steps
    for seconds in own:
        mean_s += 0.2 * (seconds - mean_s)
        for member in members:
            router.observe(member.peer, toy.Load(prefill_tokens_per_s=1e6, decode_step_s=mean_s, num_running=1))
        check(admission, members, request(4, deadline_s=1.0))
    estimate = admission.estimate(Demand(4, 1, 16), 0, members)
    assert estimate is not None
    assert 0 < estimate.wait_s < 1.0


def test_a_resumed_sequence_goes_where_it_fits(toy: Any) -> None:
    """A group with a smaller pool refused, as too long, a sequence that another one had begun."""
    _, admission, _ = cluster(toy)
    small, large = (
        Member(toy.ManualPort(g, i, "decode", num_blocks=n), 0) for i, (g, n) in enumerate((("s", 5), ("l", 50)))
    )
    assert admission.closed_to(Demand(30, 1, 16), [small, large], {}, new=False) == {small.peer}
    assert admission.closed_to(Demand(10, 1, 4), [small, large], {}, new=False) == set()


# ---------------------------------------------------------------- in the coordinator
def ask(w: Any, toy: Any, name: str, prompt: int, **more: Any) -> Any:
    """A salt each: what they share would take no room."""
    fields = {"arrival_ns": w.clock.now_ns(), "cache_salt": name, **more}
    return w.coordinator.start(toy.request(name, prompt=prompt, **fields))


def test_small_requests_pass_a_big_one_a_bounded_number_of_times(toy: Any) -> None:
    """Head-of-line blocking, and its opposite."""

    async def main() -> None:
        async with toy.World(CoordinatorConfig(max_bypass=2), router=toy.RouterConfig(disaggregate="never")) as w:
            d = w.up(toy.ManualPort("d", 1, "decode", num_blocks=12))
            streams = [ask(w, toy, "first", 34)]
            await turns()
            streams.append(ask(w, toy, "big", 38))
            await w.clock.sleep(0.01)
            for i in range(4):
                streams.append(ask(w, toy, f"s{i}", 1))
                await w.clock.sleep(0.01)
            assert [s.key.request_id for s in d.submitted] == ["first", "s0", "s1"]
            for sequence in list(d.submitted):
                w.frame(d, event(sequence.key, 0, 0, FinishReason.STOP))
            await turns(20)
            assert [s.key.request_id for s in d.submitted[3:]] == ["big", "s2", "s3"]
            for stream in streams:
                await stream.aclose()
            await w.settled()

    toy.run(main())


def test_priorities_age_at_the_gateway(toy: Any) -> None:
    """Requests of a better priority that keep coming are let in before it for ever."""

    async def main() -> None:
        config = CoordinatorConfig(priority_step_s=5.0)
        async with toy.World(config, router=toy.RouterConfig(disaggregate="never")) as w:
            d = w.up(toy.ManualPort("d", 1, "decode", num_blocks=12))
            streams = [ask(w, toy, "first", 36)]
            await turns()
            streams.append(ask(w, toy, "low", 36, priority=1))
            for i in range(9):
                await w.clock.sleep(1.0)
                streams.append(ask(w, toy, f"high{i}", 36))
            served = 0
            while len(d.submitted) > served:
                w.frame(d, event(d.submitted[served].key, 0, 0, FinishReason.STOP))
                served += 1
                await turns(10)
            assert [s.key.request_id for s in d.submitted].index("low") == 1 + 4, "those of the first five seconds"
            assert served == 11
            await asyncio.sleep(0)
            for stream in streams:
                await stream.aclose()
            await w.settled()

    toy.run(main())


@pytest.mark.parametrize("how", ["leaves", "deadline"])
def test_who_leaves_the_line_leaves_nothing_behind(toy: Any, how: str) -> None:
    """A permit, or a place in the line, of a request that ended while it waited: those behind it never move."""

    async def main() -> None:
        async with toy.World(router=toy.RouterConfig(disaggregate="never")) as w:
            d = w.up(toy.ManualPort("d", 1, "decode", num_blocks=12))
            first = ask(w, toy, "first", 36)
            await turns()
            deadline_ns = w.clock.now_ns() + SECOND if how == "deadline" else None
            waits = ask(w, toy, "waits", 36, deadline_ns=deadline_ns)
            behind = ask(w, toy, "behind", 36)
            await w.clock.sleep(2.0)
            assert w.coordinator.num_waiting == (1 if how == "deadline" else 2)
            await waits.aclose()
            await turns()
            w.frame(d, event(d.submitted[0].key, 0, 0, FinishReason.STOP))
            await turns(10)
            assert [s.key.request_id for s in d.submitted] == ["first", "behind"]
            for stream in (first, behind):
                await stream.aclose()
            await w.settled()

    toy.run(main())
