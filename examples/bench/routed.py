"""A trace over several groups: the router's expected prefix hits against what the groups found.

Two prefill and two decode groups in the simulator: the coordinator, the router and the engines are the production's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

import chat_trace

from kvferry.cluster.sim.faults import Behaviour, PlannedRequest, PlannedTurn, Scenario
from kvferry.cluster.sim.group import GroupShape
from kvferry.cluster.sim.model import BLOCK_SIZE, VOCAB
from kvferry.cluster.sim.runner import simulate

SHAPE = chat_trace.Shape(
    num_system_prompts=12,
    system_tokens=(200, 800),
    answer_tokens=25.0,
    document_tokens=400.0,
    think_s=2.0,
    think_spread=0.6,
    per_s=5.0,
)
NUM_BLOCKS = 900
"""Of each group; a block of the simulator holds 4 tokens."""
Fetch = Literal["auto", "always", "never"]


def measure_routing(seed: int, num_conversations: int) -> list[dict[str, Any]]:
    """One row for each way of fetching. `hit_rate`: of the prompts' tokens, those found where a request began."""
    conversations = chat_trace.draw(seed, replace(SHAPE, num_conversations=num_conversations))
    num_prompt_tokens = sum(_prompt_tokens(c) for c in conversations)
    best = sum(_best_hits(conversations))
    rows = []
    groups = [("p0", "prefill"), ("p1", "prefill"), ("d0", "decode"), ("d1", "decode")]
    fetches: tuple[Fetch, ...] = ("never", "auto", "always")
    for fetch in fetches:
        observed = _run(conversations, groups, fetch)
        hits, expected = observed["hit token"], observed["hit token, expected"]
        rows.append(
            {
                "fetch": fetch,
                "hit_rate": hits / num_prompt_tokens,
                "of_best": hits / best,
                "expected_rate": expected / num_prompt_tokens,
                "found_of_expected": hits / expected,
                "fetched_blocks": observed["fetched block"],
            }
        )
    return rows


def _prompt_tokens(conversation: chat_trace.Conversation) -> int:
    total, length = 0, len(conversation.system)
    for turn in conversation.turns:
        length += len(turn.message)
        total += length
        length += turn.num_answer_tokens
    return total


def _best_hits(conversations: list[chat_trace.Conversation]) -> Iterator[int]:
    """What one endless cache would find: a system prompt that came before, then the conversation so far."""
    seen = set()
    for conversation in conversations:
        known = _whole_blocks(len(conversation.system)) if conversation.system in seen else 0
        seen.add(conversation.system)
        length = len(conversation.system)
        for turn in conversation.turns:
            length += len(turn.message)
            yield min(known, _whole_blocks(length - 1))  # the last token is always computed
            length += turn.num_answer_tokens
            known = _whole_blocks(length - 1)  # and the last one that was drawn has no KV


def _whole_blocks(num_tokens: int) -> int:
    return num_tokens // BLOCK_SIZE * BLOCK_SIZE


def _run(conversations: list[chat_trace.Conversation], groups: list[tuple[str, Any]], fetch: Fetch) -> Counter[str]:
    shape = GroupShape(
        tp_size=1,
        num_blocks=NUM_BLOCKS,
        max_batch_tokens=512,
        max_sequences=64,
        max_waiting=64,
        step_s=0.01,
        token_s=0.001,
    )
    report = simulate(
        Scenario(
            seed=0,
            num_gateways=1,
            groups=[(name, role, shape) for name, role in groups],
            disaggregate="auto",
            fetch_prefix=fetch,
            retry_budget=3,
            max_in_flight=4096,
            max_unread_bytes=1 << 20,
            crowded=True,
            transfer_timeout_s=20.0,
            expect_timeout_s=5.0,
            unavailable_timeout_s=20.0,
            requests=[_request(c) for c in conversations],
            faults=[],
        )
    )
    if report.failures:
        raise RuntimeError("\n".join(report.failures))
    return report.observed


def _request(conversation: chat_trace.Conversation) -> PlannedRequest:
    first, *later = conversation.turns
    return PlannedRequest(
        at_s=conversation.begin_s,
        name=conversation.name,
        gateway=0,
        prompt=_toy([*conversation.system, *first.message]),
        n=1,
        max_tokens=first.num_answer_tokens,
        min_tokens=0,
        seed=0,
        eos=[],
        priority=0,
        salt="",
        logprobs=False,
        deadline_s=None,
        behaviour=Behaviour(),
        turns=[
            PlannedTurn(message=_toy(list(t.message)), think_s=t.think_s, max_tokens=t.num_answer_tokens) for t in later
        ],
    )


def _toy(tokens: list[int]) -> list[int]:
    return [token % VOCAB for token in tokens]
