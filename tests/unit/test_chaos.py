"""The chaos suite's pure part: a checker that overlooks something would be believed."""

from __future__ import annotations

import random

import msgspec
import pytest

from kvferry.cluster.chaos.faults import STALL_S, Fault, FaultLog, choose_victim
from kvferry.cluster.chaos.plan import (
    HOLD_S,
    ChaosConfig,
    FaultKind,
    Planned,
    make_cases,
    plan_faults,
    read_faults,
)
from kvferry.cluster.chaos.report import BASELINE, UNHURT, RunFacts, lines, make_report, percentile, rows
from kvferry.cluster.chaos.streams import Fate, Outcome, Reference, Stream, outcome
from kvferry.cluster.service import ClusterView, Completed, Delta, GroupView
from kvferry.runtime.errors import InvalidArgument
from kvferry.runtime.request import Usage
from kvferry.runtime.timeline import Timeline

pytestmark = pytest.mark.core
S = 10**9
CONFIG = ChaosConfig(seconds=60, max_tokens=4)
CASE = make_cases(CONFIG, 100, [0], 512)[0]
REFERENCE = Reference([1, 2, 3, 4], "abcd", "length")


def group(name: str = "decode-0", **fields: object) -> GroupView:
    zero = dict.fromkeys((f for f in GroupView.__struct_fields__ if f.startswith(("num_", "prompt", "cached"))), 0)
    rest = {"output_tokens": 0, "received_bytes": 0, "hit_rate": 0.0, "tp_size": 1}
    known = {"group": name, "role": "decode", "state": "live", "epoch": 1, "pids": [7], **zero, **rest}
    return msgspec.convert({**known, **fields}, GroupView)


def view(*groups: GroupView) -> ClusterView:
    return ClusterView(model="m", groups=list(groups), num_requests=0, num_finished=0, num_failed=0, num_resumed=0)


def planned(pick: float = 0.0, pick_rank: float = 0.0) -> Planned:
    return Planned(at_s=1.0, kind=FaultKind.KILL, pick=pick, pick_rank=pick_rank, hold_s=3.0)


def stream(
    *tokens: int, text: str = "", end: Fate | None = Fate.COMPLETE, attempts: int = 1, name: str = "r"
) -> Stream:
    """One token a second from second 1 on."""
    made = Stream(request_id=name, case=CASE, client=0, begin_ns=0)
    for i, token in enumerate(tokens):
        last = i == len(tokens) - 1
        letter = text[i : None if last else i + 1]
        made.take(
            Delta(0, [token], letter, finish_reason="length" if last and end is Fate.COMPLETE else None), (i + 1) * S
        )
    now_ns = (len(tokens) + 1) * S
    if end is Fate.COMPLETE:
        made.take(Completed(Usage(1, 0, len(tokens)), Timeline(received_ns=0, attempts=attempts)), now_ns)
    elif end is not None:
        made.end(end, now_ns, "why")
    return made


# ---------------------------------------------------------------- the plan
def test_plan_is_a_function_of_the_seed() -> None:
    """A run that found something cannot be repeated; or two seeds do the same."""
    assert plan_faults(CONFIG) == plan_faults(CONFIG)
    assert plan_faults(CONFIG) != plan_faults(msgspec.structs.replace(CONFIG, seed=1))
    assert make_cases(CONFIG, 100, [0], 512) == make_cases(CONFIG, 100, [0], 512)


@pytest.mark.parametrize("seed", range(20))
def test_plan_brings_each_kind_equally_often_and_in_time(seed: int) -> None:
    """A kind is rare by chance, a fault comes after the end, or a stop lasts until the group is given up."""
    plan = plan_faults(msgspec.structs.replace(CONFIG, seed=seed, every_s=2.5))
    assert len(plan) == 24
    assert {kind: sum(p.kind is kind for p in plan) for kind in FaultKind} == dict.fromkeys(FaultKind, 6)
    assert [p.at_s for p in plan] == sorted(p.at_s for p in plan)
    assert all(0 < p.at_s <= CONFIG.seconds and HOLD_S[0] <= p.hold_s <= HOLD_S[1] < 20 for p in plan)


def test_only_the_kinds_asked_for() -> None:
    """A kill where none was allowed."""
    config = msgspec.structs.replace(CONFIG, faults=read_faults(" cancel, cut,"))
    assert {p.kind for p in plan_faults(config)} == {FaultKind.CUT, FaultKind.CANCEL}


@pytest.mark.parametrize("text", ["", ",", "kill,gateway", "KILL"])
def test_unknown_kinds_are_refused(text: str) -> None:
    """A typing error makes the run harmless."""
    with pytest.raises(InvalidArgument, match="faults="):
        read_faults(text)


@pytest.mark.parametrize(
    "fields", [{"seconds": 0}, {"clients": 0}, {"every_s": 0}, {"max_tokens": 1}, {"faults": ()}, {"num_prompts": 0}]
)
def test_limits(fields: dict[str, object]) -> None:
    """A run that does nothing, or never ends."""
    with pytest.raises(InvalidArgument):
        ChaosConfig(**{"seconds": 60, **fields})  # type: ignore[arg-type]


def test_cases_fit_the_model_and_are_both_greedy_and_sampled() -> None:
    """Prompts with tokens that the model lacks or that end an answer; a context that is too short is found too late."""
    cases = make_cases(ChaosConfig(seconds=60, max_tokens=64), 50, [0, 49], 128)
    assert all(0 < token < 49 for case in cases for token in case.prompt)
    assert all(len(case.prompt) + case.sampling.max_tokens <= 128 and case.sampling.ignore_eos for case in cases)
    assert [case.sampling.temperature > 0 for case in cases[:4]] == [False, True, False, True]
    assert all(case.sampling.seed is not None for case in cases[1::2])
    with pytest.raises(InvalidArgument, match="max_tokens"):
        make_cases(ChaosConfig(seconds=60, max_tokens=100), 50, [0], 128)


def test_victims() -> None:
    """The last live group is hit, or one that has not got over its last fault, or one that does not live."""
    pair = view(group("a", pids=[1, 2]), group("b", pids=[3], num_running=1))
    assert {v.pid for i in range(100) if (v := choose_victim(pair, (), planned(i / 100, 0.99)))} == {2, 3}
    assert choose_victim(pair, {"a"}, planned()) is None
    assert choose_victim(view(group("a"), group("b", state="starting")), (), planned()) is None
    assert choose_victim(view(group("a")), (), planned()) is not None
    assert choose_victim(view(group("a", state="unreachable")), (), planned()) is None


# ---------------------------------------------------------------- observation
def test_a_kill_counts_when_the_group_is_seen_dead_or_replaced() -> None:
    """A signal that did nothing is counted; or a replacement between two looks is not."""
    for state, epoch, seen, over in (
        ("live", 1, False, False),
        ("unreachable", 1, False, False),
        ("dead", 1, True, False),
        ("starting", 2, True, False),
        ("live", 2, True, True),
    ):
        fault = Fault(kind=FaultKind.KILL, begin_ns=0, group="decode-0", epoch=1)
        fault.on_group(group(state=state, epoch=epoch), 5)
        assert (fault.observed_ns is not None, fault.end_ns is not None) == (seen, over), state


def stopped() -> Fault:
    return Fault(kind=FaultKind.STOP, begin_ns=0, group="decode-0", epoch=1)


def test_a_stop_counts_when_the_group_is_unreachable_or_stands_still() -> None:
    """Idle groups count as stopped; or those that work count because one counter did not move."""
    late = int(2 * STALL_S * S)
    fault = stopped()
    fault.on_group(group(state="unreachable"), 1)
    assert fault.how == "unreachable"
    for first, second, seen in (
        (group(num_running=1), group(num_running=1), True),
        (group(), group(), False),
        (group(num_running=1), group(num_running=1, output_tokens=1), False),
        (group(num_running=1), group(num_running=1, prompt_tokens=1), False),
    ):
        fault = stopped()
        fault.on_group(first, 0)
        fault.on_group(second, late)
        assert (fault.how == "stalled") is seen, (first, second)
    fault = stopped()
    for i in range(10):  # a stall that is shorter than it must be, again and again
        fault.on_group(group(num_running=1, output_tokens=i // 2), i * int(STALL_S * S / 2))
    assert fault.observed_ns is None


def test_a_stop_is_over_when_the_group_lives_after_it_was_let_go() -> None:
    """A look that still shows the time before the stop ends it."""
    fault = stopped()
    fault.on_group(group(), 1)
    assert fault.end_ns is None
    fault.released_ns = 2
    fault.on_group(group(state="unreachable"), 3)
    assert fault.end_ns is None
    fault.on_group(group(), 4)
    assert fault.end_ns == 4
    assert fault.observed_ns is None, "after the release, nothing counts as the stop's effect"


def test_a_group_is_busy_until_it_is_over_its_fault() -> None:
    """Faults pile up on one group until a stream's retries are used up."""
    log = FaultLog()
    log.add(Fault(kind=FaultKind.KILL, begin_ns=0, group="decode-0", epoch=1))
    log.add(Fault(kind=FaultKind.CANCEL, begin_ns=0, request_id="r"))
    log.on_view(view(group(state="starting", epoch=2)), 1)
    assert log.busy() == {"decode-0"}
    log.on_view(view(group(epoch=2)), 2)
    assert log.busy() == set()
    log.close(9)
    assert [fault.end_ns for fault in log.faults] == [2, 9]


# ---------------------------------------------------------------- answers
def test_the_reference_again_is_no_change() -> None:
    """A checker that finds faults everywhere."""
    assert outcome(stream(1, 2, 3, 4, text="abcd"), REFERENCE).change is None
    for end in (Fate.CANCELLED, Fate.CUT, Fate.FAILED):
        assert outcome(stream(1, 2, text="ab", end=end), REFERENCE).change is None
        assert outcome(stream(end=end), REFERENCE).change is None


@pytest.mark.parametrize(
    ("tokens", "text", "end", "position"),
    [
        ((1, 2, 9, 4), "abcd", Fate.COMPLETE, 2),
        ((1, 2, 2, 3), "abcd", Fate.COMPLETE, 2),
        ((1, 3, 4), "acd", Fate.COMPLETE, 1),
        ((1, 2, 3), "abc", Fate.COMPLETE, 3),
        ((1, 2, 3, 4, 4), "abcdd", Fate.COMPLETE, 4),
        ((1, 2, 3, 4), "abxd", Fate.COMPLETE, 4),
        ((1, 2, 3, 4), "abc", Fate.COMPLETE, 4),
        ((2,), "b", Fate.CANCELLED, 0),
        ((1, 2), "ax", Fate.CUT, 2),
        ((1, 2, 3, 4, 5), "abcd", Fate.FAILED, 4),
    ],
)
def test_changes_are_noticed(tokens: tuple[int, ...], text: str, end: Fate, position: int) -> None:
    """A changed, repeated, lost or surplus token passes, of whole answers and of broken ones."""
    change = outcome(stream(*tokens, text=text, end=end), REFERENCE).change
    assert change is not None
    assert change.position == position


def test_another_finish_reason_is_noticed() -> None:
    changed = outcome(stream(1, 2, 3, 4, text="abcd"), msgspec.structs.replace(REFERENCE, finish_reason="stop")).change
    assert changed is not None
    assert "finish reason" in changed.what


def test_gaps_and_totals() -> None:
    """The gap before the first token counts as one between tokens, or a pause is averaged away."""
    made = Stream(request_id="r", case=CASE, client=0, begin_ns=0)
    for instant, tokens in ((5, [1]), (6, [2]), (7, []), (9, [3, 4])):
        made.take(Delta(0, tokens, ""), instant * S)
    made.end(Fate.COMPLETE, 10 * S)
    kept = outcome(made, REFERENCE)
    assert (kept.longest_gap_s, kept.total_s) == (3.0, 10.0)
    assert made.rest_s == 0
    assert stream(1, 2, end=None).rest_s == 2.0
    assert stream(end=None).rest_s == 0


def test_the_first_end_counts() -> None:
    """A stream that was complete when its connection was cut becomes a broken one."""
    made = stream(1, 2, 3, 4, text="abcd")
    made.end(Fate.CUT, 99 * S)
    assert (made.fate, made.end_ns) == (Fate.COMPLETE, 5 * S)


# ---------------------------------------------------------------- report
def kept(begin_s: float, end_s: float, fate: Fate = Fate.COMPLETE, gap_s: float = 1.0, **fields: object) -> Outcome:
    known = {"request_id": "r", "attempts": 1, "error": "why", "change": None, "longest_gap_s": gap_s, "fate": fate}
    return msgspec.convert({**known, "begin_ns": int(begin_s * S), "end_ns": int(end_s * S), **fields}, Outcome)


FACTS = RunFacts(
    target="t", dtype="float32", seed=0, num_cases=4, seconds=60, interrupted=False, left_behind=[], findings=[]
)
KILL = Fault(kind=FaultKind.KILL, begin_ns=10 * S, end_ns=20 * S, observed_ns=11 * S)
CANCEL = Fault(kind=FaultKind.CANCEL, begin_ns=30 * S, end_ns=31 * S)


def log_of(*faults: Fault) -> FaultLog:
    log = FaultLog()
    log.faults = list(faults)
    return log


def test_costs_are_of_the_streams_that_ran_meanwhile() -> None:
    """A pause is charged to a fault that was long over, or to none; or injected faults count as observed."""
    streams = [kept(0, 9), kept(9, 11, gap_s=4.0, attempts=2), kept(19, 25), kept(21, 29), kept(0, 40, Fate.CANCELLED)]
    report = make_report(log_of(KILL, CANCEL), streams, [kept(0, 1, gap_s=0.5)], FACTS)
    costs = {cost.kind: cost for cost in report.costs}
    assert list(costs) == ["kill", "cancel", UNHURT, BASELINE]
    kill, cancel = costs["kill"], costs["cancel"]
    assert (kill.num_sent, kill.num_observed, kill.num_streams, kill.num_resumed) == (1, 1, 3, 1)
    assert (cancel.num_sent, cancel.num_observed, cancel.num_streams) == (1, 0, 1)
    assert costs[UNHURT].num_streams == 2
    assert (kill.latency.gap_p50_s, kill.added.gap_p50_s, kill.added.total_p50_s) == (2.5, 2.0, 3.0)
    assert report.faults() == []
    assert (report.num_complete, report.num_cancelled) == (4, 1)
    assert [row[:3] for row in rows(report)] == [
        ("kill", "1", "1"),
        ("cancel", "1", "0"),
        (UNHURT, "", ""),
        (BASELINE, "", ""),
    ]


def changed(case: int) -> Outcome:
    return kept(0, 1, change={"request_id": "r", "case": case, "position": 17, "what": "w"})


UNSTEADY = [changed(2), changed(3), changed(3)]


@pytest.mark.parametrize(
    ("streams", "baseline", "facts", "said"),
    [
        ([kept(0, 1, Fate.FAILED)], [], {}, "1 failed streams"),
        ([], [kept(0, 1, Fate.FAILED)], {}, "1 failed streams"),
        ([changed(3)], [], {}, "1 changed answers"),
        ([], UNSTEADY, {}, "2 of 4 answers that changed before any fault"),
        ([], [], {"left_behind": ["a"]}, "1 things left behind"),
        ([], [], {"findings": ["a", "b"]}, "2 audit findings"),
    ],
)
def test_everything_that_went_wrong_is_a_fault(
    streams: list[Outcome], baseline: list[Outcome], facts: dict[str, list[str]], said: str
) -> None:
    """Exit code 0 although something failed."""
    report = make_report(log_of(KILL), streams, baseline, msgspec.structs.replace(FACTS, **facts))
    assert len(report.faults()) == 1
    assert said in report.faults()[0]


def test_a_question_that_rounding_answers_in_two_ways_is_left_out() -> None:
    """One near tie among many answers fails every run; or it is not mentioned."""
    report = make_report(log_of(KILL), [kept(0, 1)], [changed(3), changed(3)], FACTS)
    assert report.faults() == []
    assert "left out: 1 of 4 questions" in "\n".join(lines(report))


def test_a_run_without_an_observed_fault_shows_nothing() -> None:
    """Success, although no signal ever arrived."""
    report = make_report(log_of(CANCEL), [kept(0, 1)], [], FACTS)
    assert report.faults() == ["no fault was observed, so nothing is shown"]


def test_what_stands_below_the_table() -> None:
    """The position of the first difference, or the reason why bfloat16 may differ, is missing; or lists are endless."""
    change = {"request_id": "r", "case": 3, "position": 17, "what": "w"}
    log = log_of(KILL)
    log.skip(FaultKind.STOP)
    streams = [kept(0, 1, change=change), *[kept(0, 1, Fate.FAILED)] * 30]
    report = make_report(log, streams, [], msgspec.structs.replace(FACTS, dtype="bfloat16", findings=["x"]))
    text = "\n".join(lines(report))
    for part in ("r (case 3) at token 17: w", "bfloat16", "float32", "1 stop", "audit: x", "and 20 more"):
        assert part in text, part
    assert len(text.splitlines()) < 20
    assert "rounds" not in "\n".join(lines(make_report(log, [kept(0, 1)], [], FACTS)))
    steps = "\n".join(lines(make_report(log, streams, [], FACTS)))
    assert "stores KV as int8, int4 or fp8" in steps, "in float32, a quantised cache makes rounding larger"


@pytest.mark.parametrize("percent", [0, 37, 50, 99, 100])
def test_percentile(percent: int) -> None:
    """An off-by-one in the rank."""
    values = [float(v) for v in random.Random(percent).sample(range(1000), 101)]
    assert percentile(values, percent) == pytest.approx(sorted(values)[percent])
    assert (percentile([3.0, 1.0], 50), percentile([], 50), percentile([2.0], 99)) == (2.0, 0.0, 2.0)
