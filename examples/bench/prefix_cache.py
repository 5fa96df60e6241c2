"""How much of a trace's prompts prefix caches find, in virtual time and with toy models.

    python examples/bench/prefix_cache.py [--seed N] [--conversations N]

One engine, for each pool size and eviction policy: prompt tokens found in the cache, beside what a cache that never
forgets would have found. Several groups behind a router (`routed.py`): the same, and what the router expected of the
groups that it chose. All but the models is the production's. The last line is JSON.
"""

from __future__ import annotations

import argparse
import heapq
import json
import time
from dataclasses import dataclass, field
from typing import Any

from chat_trace import VOCAB, Conversation, Shape, draw
from routed import measure_routing

from kvferry.runtime.config import CacheConfig, EngineConfig, SchedulerConfig
from kvferry.runtime.engine import Engine
from kvferry.runtime.ids import BlockHash, Epoch, GroupId, Peer, RequestId, SequenceKey
from kvferry.runtime.kv.eviction import EvictionName
from kvferry.runtime.kv.groups import one_group
from kvferry.runtime.kv.hashing import hash_chain
from kvferry.runtime.kv.layout import KVLayout
from kvferry.runtime.request import SamplingParams, SequenceRequest
from kvferry.runtime.step import SampledToken, SampleInput, StepPlan, StepResult
from kvferry.runtime.transfer.ticket import GroupAddress

BLOCK_SIZE = 16
STEP_S, TOKEN_S = 0.02, 0.0002
"""A step without tokens, and what each adds: about an 8B model on one accelerator."""
ROOT = b"prefix-cache-16b"
POLICIES: tuple[EvictionName, ...] = ("lru", "reuse")
POOLS = {"tight": 0.05, "middle": 0.15, "ample": 1.1}
"""Pool sizes as a share of all distinct blocks of the trace."""


@dataclass
class Result:
    """Of one replay. `hits`: prompt tokens found; `best`: what an endless cache would have found."""

    num_requests: int = 0
    prompt_tokens: int = 0
    hits: int = 0
    best: int = 0
    num_blocks: int = 0
    """Distinct full blocks that were computed."""


@dataclass
class _Chat:
    trace: Conversation
    tokens: list[int] = field(default_factory=list)
    num_turns: int = 0
    prompt: list[int] = field(default_factory=list)


class Replay:
    """One engine under one trace; answers are what the toy model draws, so the next turn's prompt repeats them."""

    def __init__(self, conversations: list[Conversation], num_blocks: int, eviction: EvictionName) -> None:
        layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1, block_size=BLOCK_SIZE, dtype="float32")
        config = EngineConfig(
            cache=CacheConfig(block_size=BLOCK_SIZE, num_blocks=num_blocks, eviction=eviction),
            scheduler=SchedulerConfig(max_batch_tokens=2048),
        )
        address = GroupAddress(Peer(GroupId("toy"), Epoch(1)), 1, layout.fingerprint, [])
        self.now_s = 0.0
        groups = one_group(layout, num_blocks)
        self.engine = Engine(config, groups, ROOT, address, 1 << 20, self._execute, lambda: int(self.now_s * 1e9))
        self.result = Result()
        self._chats = [_Chat(c, list(c.system)) for c in conversations]
        self._due = [(c.begin_s, i) for i, c in enumerate(conversations)]
        heapq.heapify(self._due)
        self._seen: set[BlockHash] = set()

    def run(self) -> Result:
        while self._due or self.engine.scheduler.sequences():
            if not self.engine.has_work():
                self.now_s = max(self.now_s, self._due[0][0])
            while self._due and self._due[0][0] <= self.now_s:
                self._ask(heapq.heappop(self._due)[1])
            for event in self.engine.step(int(self.now_s * 1e9)).tokens:
                if event.error_label is not None:
                    raise RuntimeError(f"{event.key}: {event.error_message}")
                chat = self._chats[int(event.key.request_id)]
                if event.position == 0:
                    self.result.hits += event.num_cached_tokens
                if event.token_id is not None:
                    chat.tokens.append(event.token_id)
                if event.finish_reason is not None:
                    self._answered(chat, int(event.key.request_id))
        self.result.num_blocks = len(self._seen)
        return self.result

    def _ask(self, number: int) -> None:
        chat = self._chats[number]
        turn = chat.trace.turns[chat.num_turns]
        chat.num_turns += 1
        chat.tokens += turn.message
        chat.prompt = list(chat.tokens)
        self.result.num_requests += 1
        self.result.prompt_tokens += len(chat.prompt)
        hashes = hash_chain(ROOT, chat.prompt, BLOCK_SIZE)
        # The last prompt token is always computed: its logits are needed.
        usable = hashes[: (len(chat.prompt) - 1) // BLOCK_SIZE]
        self.result.best += BLOCK_SIZE * next((i for i, h in enumerate(usable) if h not in self._seen), len(usable))
        self._seen.update(hashes)
        request = SequenceRequest(
            key=SequenceKey(RequestId(str(number)), 0, chat.num_turns),
            prompt_token_ids=chat.prompt,
            sampling=SamplingParams(max_tokens=turn.num_answer_tokens, seed=0),
            eos_token_ids=[],
            arrival_ns=int(self.now_s * 1e9),
        )
        self.engine.submit(request, int(self.now_s * 1e9))

    def _answered(self, chat: _Chat, number: int) -> None:
        self._seen.update(hash_chain(ROOT, chat.tokens[:-1], BLOCK_SIZE))  # the last token has no KV
        if chat.num_turns < len(chat.trace.turns):
            heapq.heappush(self._due, (self.now_s + chat.trace.turns[chat.num_turns].think_s, number))

    def _execute(self, plan: StepPlan, samples: list[SampleInput]) -> StepResult:
        self.now_s += STEP_S + TOKEN_S * plan.num_tokens
        return StepResult([SampledToken((int(s.key.request_id) * 7919 + s.position * 31) % VOCAB) for s in samples])


def measure(seed: int, shape: Shape) -> list[dict[str, Any]]:
    """One row for each pool size and policy."""
    conversations = draw(seed, shape)
    endless = Replay(conversations, 1 << 20, "lru").run()
    rows = []
    for pool, share in POOLS.items():
        num_blocks = int(share * endless.num_blocks)
        for eviction in POLICIES:
            result = Replay(conversations, num_blocks, eviction).run()
            rows.append(
                {
                    "pool": pool,
                    "num_blocks": num_blocks,
                    "eviction": eviction,
                    "num_requests": result.num_requests,
                    "hit_rate": result.hits / result.prompt_tokens,
                    "best_hit_rate": result.best / result.prompt_tokens,
                    "of_best": result.hits / result.best,
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--conversations", type=int, default=400)
    args = parser.parse_args()
    begin = time.monotonic()
    rows = measure(args.seed, Shape(num_conversations=args.conversations))
    print(f"{'pool':8} {'blocks':>7} {'eviction':9} {'hit rate':>9} {'maximum':>9} {'of it':>7}")
    for row in rows:
        print(
            f"{row['pool']:8} {row['num_blocks']:7} {row['eviction']:9} {row['hit_rate']:9.1%} "
            f"{row['best_hit_rate']:9.1%} {row['of_best']:7.1%}"
        )
    routing = measure_routing(args.seed, args.conversations // 4)
    print(
        f"\n{'fetch':8} {'hit rate':>9} {'of maximum':>11} {'expected':>9} {'found of it':>12} {'fetched blocks':>15}"
    )
    for row in routing:
        print(
            f"{row['fetch']:8} {row['hit_rate']:9.1%} {row['of_best']:11.1%} {row['expected_rate']:9.1%} "
            f"{row['found_of_expected']:12.1%} {row['fetched_blocks']:15}"
        )
    seconds = round(time.monotonic() - begin, 1)
    print(json.dumps({"seed": args.seed, "seconds": seconds, "prefix_cache": rows, "routing": routing}))


if __name__ == "__main__":
    main()
