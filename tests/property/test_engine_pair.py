"""Two engines and a link between them, stepped by hand in any order: a lost transfer is a cache miss.

Guards against: tokens that depend on what arrived; blocks or leases left behind by any order of arrival, loss,
duplication, expiry or cancel; a destination that waits for what will never come.
"""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.runtime.engine import RECLAIM_AFTER_NS
from kvferry.runtime.errors import CapacityError
from kvferry.runtime.ids import TransferId
from kvferry.runtime.transfer.ticket import ExpectRequest, Received, Sent, TransferState
from tests.support.toy_engine import ToyEngine, toy_address, toy_output, toy_request

pytestmark = pytest.mark.core
TIMEOUT_S = 0.001
"""The toy clock moves a microsecond per reading."""


class Pair:
    def __init__(self, prefill_blocks: int = 24, decode_blocks: int = 24, **kv: int | None) -> None:
        """`kv`: `window` and `num_window_blocks`."""
        self.prefill = ToyEngine(num_blocks=prefill_blocks, max_batch_tokens=7, name="prefill", **kv)
        self.decode = ToyEngine(num_blocks=decode_blocks, max_batch_tokens=7, name="decode", **kv)

    def begin(
        self,
        name: str,
        prompt: list[int],
        max_tokens: int,
        timeout_s: float = 60.0,
        eos_token_ids: list[int] | None = None,
    ) -> None:
        transfer_id = TransferId(name)
        request = ExpectRequest(
            transfer_id=transfer_id,
            attempt=1,
            source=self.prefill.address,
            token_ids=prompt,
            cache_salt="",
            timeout_s=timeout_s,
        )
        leg = toy_request(name, prompt, max_tokens, handoff_after=1, sends_transfer_id=transfer_id, seed=3)
        self.prefill.submit(msgspec.structs.replace(leg, eos_token_ids=eos_token_ids or []))
        try:
            ticket = self.decode.engine.expect(request, self.decode.clock())
        except CapacityError:
            return
        self.prefill.engine.send(ticket, self.prefill.clock())

    def hand_over(self, name: str, prompt: list[int], max_tokens: int) -> None:
        """What the coordinator does on HANDOFF."""
        key = toy_request(name, prompt).key
        if self.prefill.ends.get(key) == "handoff":
            done = self.prefill.tokens[key]
            self.decode.submit(
                toy_request(
                    name, prompt, max_tokens, attempt=2, output_token_ids=done, transfer_id=TransferId(name), seed=3
                )
            )

    def deliver(self, fate: str) -> None:
        """The oldest message on the link meets `fate`."""
        if not self.prefill.runner.sends:
            return
        send, payload = self.prefill.runner.sends.pop(0)
        name = (send.transfer_id, send.attempt, send.seq)
        error = "cut" if fate == "lose" else None
        self.prefill.engine.report(Sent(*name, 0, error))
        if fate == "lose":
            return
        report = Received(*name, self.prefill.address.peer, 0, 0, send.hashes, send.destination_block_ids, len(payload))
        self.decode.runner.staged[name] = payload
        self.decode.engine.report(report)
        if fate == "repeat":
            self.decode.engine.report(report)

    def step(self, side: ToyEngine) -> None:
        for event in side.step().transfers:
            if side is self.prefill and event.state is TransferState.FAILED:  # the coordinator passes it on
                self.decode.engine.end_transfer(event.transfer_id, event.attempt, event.reason)
            elif side is self.prefill and event.state is TransferState.ACTIVE:
                self.decode.engine.shorten_transfer(event.transfer_id, event.attempt, event.lacking)

    def settle(self) -> None:
        for _ in range(400):
            if not (self.prefill.engine.has_work() or self.decode.engine.has_work() or self.prefill.runner.sends):
                if not self.decode.engine.scheduler.waiting:
                    return
                self.decode.clock.now_ns += RECLAIM_AFTER_NS  # transfers hold what all lack: the last one lets go
            self.step(self.prefill)
            self.deliver("arrive")
            self.step(self.decode)
        raise AssertionError("not at rest")

    def check_rest(self) -> None:
        for side in (self.prefill, self.decode):
            audit = side.engine.audit()
            assert audit.broken == []
            assert (audit.sequences, audit.inbound, audit.outbound, audit.num_leased_blocks) == ([], [], [], 0)


@given(
    prompts=st.lists(st.tuples(st.integers(0, 12), st.integers(1, 20)), min_size=1, max_size=4),
    moves=st.lists(
        st.sampled_from(["prefill", "decode", "arrive", "lose", "repeat", "end", "cancel", "poison"]), max_size=60
    ),
    sizes=st.tuples(st.integers(10, 24), st.integers(10, 24)),
    kv=st.sampled_from(
        [
            {},
            {},
            {"window": 6},
            {"window": 14},
            {"window": 6, "num_window_blocks": 8},
            {"window": 14, "num_window_blocks": 12},
        ]
    ),
)
@settings(max_examples=400, deadline=None)
def test_same_tokens_whatever_arrives(
    prompts: list[tuple[int, int]], moves: list[str], sizes: tuple[int, int], kv: dict[str, int]
) -> None:
    """Losing, repeating or ending transfers at any moment changes no token and leaves nothing behind."""
    pair = Pair(*sizes, **kv)
    window = pair.decode.kv.main.window
    cancelled: set[str] = set()
    texts = {f"r{i}": [*range(shared), *([i] * own)] for i, (shared, own) in enumerate(prompts)}
    for name, prompt in texts.items():
        pair.begin(name, prompt, 6)
    handed: set[str] = set()

    def hand_over() -> None:
        for name, prompt in texts.items():
            if name not in handed and pair.prefill.ends.get(toy_request(name, prompt).key) == "handoff":
                handed.add(name)
                pair.hand_over(name, prompt, 6)

    for move in moves:
        if move == "prefill":
            pair.step(pair.prefill)
        elif move == "decode":
            pair.step(pair.decode)
        elif move == "end":
            pair.decode.engine.end_transfer(TransferId("r0"), 1, "test")
        elif move == "cancel":
            if "r1" in handed:
                pair.decode.engine.cancel(toy_request("r1", [], attempt=2).key)
                cancelled.add("r1")
        elif move == "poison":
            for side in (pair.prefill, pair.decode):
                side.runner.poison(side.engine.pools.free_blocks())
        else:
            pair.deliver(move)
        for side in (pair.prefill, pair.decode):
            assert side.engine.audit().broken == []
        hand_over()
    for _ in range(3):
        pair.settle()
        hand_over()
    for name, prompt in texts.items():
        first = pair.prefill.tokens[toy_request(name, prompt).key]
        rest = pair.decode.tokens.get(toy_request(name, prompt, attempt=2).key, [])
        truth = toy_output(prompt, 6, 3, window=window)
        assert first + rest == (truth[: 1 + len(rest)] if name in cancelled else truth)
    pair.check_rest()


def test_nothing_is_computed_twice_when_all_arrives() -> None:
    """Decode computes only the tail of the prompt that fills no block, and the first token."""
    pair = Pair()
    prompt = list(range(18))
    pair.begin("r", prompt, 4)
    pair.settle()
    pair.hand_over("r", prompt, 4)
    pair.settle()
    assert sum(p.num_tokens for p in pair.decode.runner.plans) == 2 + 1 + 2  # tail, first token, two decodes
    pair.check_rest()


def test_blocks_go_out_while_prefill_runs() -> None:
    """A long prompt must overlap its own transfer: blocks leave with the step after the one that sealed them."""
    pair = Pair()
    pair.begin("r", list(range(30)), 4)
    for _ in range(3):
        pair.step(pair.prefill)
    assert pair.prefill.runner.sends
    assert not pair.prefill.tokens
    pair.settle()
    pair.decode.engine.inbound.release(TransferId("r"))
    pair.settle()


def test_eviction_before_the_ticket_is_told() -> None:
    """The ticket came after the prefilled blocks were evicted: the destination must not wait for its time-out."""
    pair = Pair(prefill_blocks=6)
    prompt = list(range(16))
    transfer_id = TransferId("r")
    pair.prefill.submit(toy_request("r", prompt, 4, handoff_after=1, sends_transfer_id=transfer_id, seed=3))
    pair.prefill.run()
    pair.prefill.submit(toy_request("other", [9] * 20, 2))
    pair.prefill.run()
    expect = ExpectRequest(
        transfer_id=transfer_id, attempt=1, source=toy_address("prefill"), token_ids=prompt, cache_salt="", timeout_s=60
    )
    pair.prefill.engine.send(pair.decode.engine.expect(expect, pair.decode.clock()), pair.prefill.clock())
    pair.hand_over("r", prompt, 4)
    pair.settle()
    key = toy_request("r", prompt, attempt=2).key
    assert pair.prefill.tokens[toy_request("r", prompt).key] + pair.decode.tokens[key] == toy_output(prompt, 4, 3)
    pair.check_rest()


def test_eviction_before_another_ticket_is_told() -> None:
    """Fault: the decode group died, another one's ticket came late, and it waited a whole lease for evicted blocks."""
    pair = Pair(prefill_blocks=6)
    prompt = list(range(16))
    pair.begin("r", prompt, 4)
    pair.prefill.run()
    pair.prefill.engine.end_transfer(TransferId("r"), 1, "its decode group died")
    pair.prefill.runner.sends.clear()
    pair.prefill.submit(toy_request("other", [9] * 20, 2))
    for report in [Sent(TransferId("r"), 1, seq, 0) for seq in range(4)]:
        pair.prefill.engine.report(report)
    pair.prefill.run()
    expect = ExpectRequest(
        transfer_id=TransferId("r"),
        attempt=2,
        source=toy_address("prefill"),
        token_ids=prompt,
        cache_salt="",
        timeout_s=60,
    )
    another = ToyEngine(num_blocks=24, max_batch_tokens=7, name="decode")
    pair.prefill.engine.send(another.engine.expect(expect, another.clock()), pair.prefill.clock())
    failed = pair.prefill.step().transfers
    assert [(e.attempt, e.state) for e in failed] == [(2, TransferState.FAILED)]
    assert "evicted" in failed[0].reason


def test_audit_counts_every_reference() -> None:
    """Fault 1: a leak that each ledger on its own finds in order."""
    pair = Pair()
    pair.begin("r", list(range(16)), 4)
    pair.prefill.step()
    pair.decode.step()
    for side in (pair.prefill, pair.decode):
        assert side.engine.audit().broken == []
    (leaked,) = pair.decode.engine.pool.lease(1)
    assert "references" in pair.decode.engine.audit().broken[0]
    pair.decode.engine.pool.release(leaked)
    assert pair.decode.engine.audit().broken == []


def test_lease_lapses_when_nobody_comes() -> None:
    """The source died before sending and the coordinator too: the destination's blocks come back by themselves."""
    pair = Pair()
    pair.begin("r", list(range(16)), 4, timeout_s=TIMEOUT_S)
    engine = pair.decode.engine
    assert engine.pool.num_leased == 4
    deadline = engine.next_deadline_ns()
    assert deadline is not None
    output = engine.step(deadline)
    assert [e.state for e in output.transfers] == [TransferState.EXPIRED]
    assert engine.pool.num_leased == 0


def test_renewal_keeps_a_transfer_whose_prefill_waits_in_a_queue() -> None:
    """Fault: only the destination's lease was renewed; a burst at the source failed every transfer behind it."""
    pair = Pair()
    pair.begin("r", list(range(16)), 4, timeout_s=TIMEOUT_S)
    for side in (pair.prefill, pair.decode):
        side.engine.renew([TransferId("r")], 60.0, side.clock())
    later = pair.prefill.clock() + int(2 * TIMEOUT_S * 1e9)
    assert pair.prefill.engine.step(later).transfers == []
    pair.settle()
    pair.hand_over("r", list(range(16)), 4)
    pair.settle()
    assert pair.decode.engine.load().cached_tokens_total == 16
    pair.check_rest()


def test_first_token_that_ends_the_sequence_keeps_its_blocks_at_home() -> None:
    """Blocks leave one step after the token that made them useless, before the coordinator can say so."""
    pair, prompt = Pair(), [1, 2, 3, 4, 5, 6]
    pair.begin("r", prompt, 4, eos_token_ids=toy_output(prompt, 1, seed=3))
    pair.step(pair.prefill)
    assert list(pair.prefill.ends.values()) == ["stop"]
    pair.step(pair.prefill)
    plan = pair.prefill.runner.plans[-1]
    assert len(plan.sends) == 1
    assert [d.transfer_id for d in plan.discards] == ["r"], "links drop what is sent after its discard"
    pair.deliver("lose")
    pair.settle()
    pair.decode.engine.end_transfer(TransferId("r"), 1, "the request is over")
    pair.check_rest()


def test_room_is_made_where_others_hold_the_prefix() -> None:
    """Fault: blocks that running sequences hold counted as wanted, so a pool full of one long prefix took no more."""
    pair = Pair(decode_blocks=16)
    shared = list(range(40))
    pair.decode.submit(toy_request("first", [*shared, 1], 8))
    for _ in range(7):
        pair.decode.step()
    assert pair.decode.tokens
    pair.begin("r", [*shared, *range(60, 64)], 4)
    assert len(pair.decode.engine.inbound.ids()) == 1
    pair.settle()
    pair.hand_over("r", [*shared, *range(60, 64)], 4)
    pair.settle()
    pair.check_rest()
