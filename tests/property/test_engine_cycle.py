"""Two groups that prefill for each other: neither may wait for what only the other's waiting prefill can bring."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.runtime.errors import NoFreeBlocks
from kvferry.runtime.ids import TransferId
from kvferry.runtime.transfer.ticket import ExpectRequest, Received, Sent
from tests.support.toy_engine import ToyEngine, toy_address, toy_output, toy_request

pytestmark = pytest.mark.core


class Couple:
    """Both groups have both roles. No lease lapses: as if the coordinator renewed them."""

    def __init__(self, num_blocks: int) -> None:
        self.groups = {name: ToyEngine(num_blocks=num_blocks, name=name) for name in ("a", "b")}
        for group in self.groups.values():
            group.clock.tick_ns = 20_000_000
        self.handed: set[str] = set()

    def begin(self, name: str, source: str, prompt: list[int]) -> None:
        destination = "b" if source == "a" else "a"
        sender, receiver = self.groups[source], self.groups[destination]
        sender.submit(toy_request(name, prompt, 4, handoff_after=1, sends_transfer_id=TransferId(name)))
        wanted = ExpectRequest(
            transfer_id=TransferId(name),
            attempt=1,
            source=toy_address(source),
            token_ids=prompt,
            cache_salt="",
            timeout_s=60.0,
        )
        try:
            sender.engine.send(receiver.engine.expect(wanted, receiver.clock()), sender.clock())
        except NoFreeBlocks:
            return

    def turn(self, source: str, destination: str, prompts: dict[str, list[int]]) -> None:
        sender, receiver = self.groups[source], self.groups[destination]
        sender.step()
        while sender.runner.sends:
            send, payload = sender.runner.sends.pop(0)
            name = (send.transfer_id, send.attempt, send.seq)
            sender.engine.report(Sent(*name, 0))
            receiver.runner.staged[name] = payload
            peer = toy_address(source).peer
            receiver.engine.report(Received(*name, peer, 0, 0, send.hashes, send.destination_block_ids, len(payload)))
        for name, prompt in prompts.items():
            first = toy_request(name, prompt).key
            if name not in self.handed and sender.ends.get(first) == "handoff":
                self.handed.add(name)
                receiver.submit(
                    toy_request(
                        name,
                        prompt,
                        4,
                        attempt=2,
                        output_token_ids=sender.tokens[first],
                        transfer_id=TransferId(name),
                    )
                )


@given(num_blocks=st.integers(7, 24), shared=st.integers(0, 16), own=st.integers(1, 6))
def test_both_requests_finish(num_blocks: int, shared: int, own: int) -> None:
    """Fault: each group's prefill waited for blocks, or for room, that the other's transfer held until it came."""
    couple = Couple(num_blocks)
    prompts = {"r": [*range(shared), *([30] * own)], "s": [*range(shared), *([40] * own)]}
    couple.begin("r", "a", prompts["r"])
    couple.begin("s", "b", prompts["s"])
    for _ in range(40):
        couple.turn("a", "b", prompts)
        couple.turn("b", "a", prompts)
    for name, source, destination in (("r", "a", "b"), ("s", "b", "a")):
        last = toy_request(name, prompts[name], attempt=2).key
        first = toy_request(name, prompts[name]).key
        assert name in couple.handed
        tokens = couple.groups[source].tokens[first] + couple.groups[destination].tokens[last]
        assert tokens == toy_output(prompts[name], 4)
    for group in couple.groups.values():
        audit = group.engine.audit()
        assert (audit.broken, audit.inbound, audit.num_leased_blocks) == ([], [], 0)
