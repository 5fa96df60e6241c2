"""Windows against transformers, through real engines: freed blocks are poisoned, so nobody reads what was let go.

Guards against: a window that is one token off; a block given back too early; tables of two block groups mixed up;
blocks that a transfer leaves out, or brings to the wrong layers.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM as AutoModel
from transformers import Gemma3TextConfig, MistralConfig, PreTrainedModel, Qwen2Config

from kvferry.runtime.config import CacheConfig, EngineConfig, SchedulerConfig, TransferConfig
from kvferry.runtime.engine import Engine
from kvferry.runtime.ids import Epoch, GroupId, Peer, RequestId, SequenceKey, TransferId
from kvferry.runtime.kv.groups import KVGroups
from kvferry.runtime.kv.storage import RankStorage
from kvferry.runtime.model.decoder import build_model
from kvferry.runtime.model.families import from_hf_config
from kvferry.runtime.model.fit import resolve_kv
from kvferry.runtime.model.loader import MemoryWeights
from kvferry.runtime.model.parallel import LocalGroup, LocalParallel
from kvferry.runtime.model.runner import Runner
from kvferry.runtime.request import SamplingParams, SequenceRequest
from kvferry.runtime.step import SampleInput, Send, StepPlan, StepResult
from kvferry.runtime.transfer.group_span import GroupSpan
from kvferry.runtime.transfer.plan import copy_plan
from kvferry.runtime.transfer.ticket import ExpectRequest, GroupAddress, Received, Sent
from tests.support.toy_engine import Ticks

pytestmark = pytest.mark.golden

VOCAB, BLOCK, WINDOW, NEW_TOKENS = 200, 4, 12, 64
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "sliding_window": WINDOW,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
MIXED = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
CONFIGS: dict[str, Callable[[], Any]] = {
    "mistral": lambda: MistralConfig(**COMMON, head_dim=16),
    "mixed": lambda: Qwen2Config(**COMMON, use_sliding_window=True, layer_types=MIXED),
    "gemma3": lambda: Gemma3TextConfig(
        **COMMON,
        head_dim=16,
        query_pre_attn_scalar=16,
        layer_types=MIXED,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
}
PROMPTS = [np.random.default_rng(n).integers(0, VOCAB, n).tolist() for n in (1, 5, 12, 13, 24, 50)]


@cache
def oracle(name: str) -> PreTrainedModel:
    torch.manual_seed(list(CONFIGS).index(name))
    model = AutoModel.from_config(CONFIGS[name](), dtype=torch.float32).eval()
    for key, parameter in model.named_parameters():
        if key.endswith("bias"):
            parameter.data.normal_(0, 0.5)
        elif "norm" in key:
            parameter.data.uniform_(0.5, 1.5)
    return model


@cache
def expected_tokens(name: str) -> list[list[int]]:
    outputs = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        out = oracle(name).generate(ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False)
        outputs.append(out[0, len(prompt) :].tolist())
    return outputs


class Replica:
    """An engine over the ranks of one group, each in a thread."""

    def __init__(self, name: str, tp: int, chunk: int, num_blocks: int = 90, group: str = "one") -> None:
        model = oracle(name)
        spec = from_hf_config(model.config.to_dict() | {"architectures": [type(model).__name__]})
        config = EngineConfig(
            dtype="float32",
            cache=CacheConfig(block_size=BLOCK, num_blocks=num_blocks),
            scheduler=SchedulerConfig(max_batch_tokens=chunk, max_context=256),
            transfer=TransferConfig(blocks_per_message=3),
        )
        self.kv = resolve_kv(config, spec, tp)
        ranks = LocalGroup(tp, timeout_s=60)
        self.storages, self.runners = [], []
        for rank in range(tp):
            parallel = LocalParallel(rank, ranks)
            weights = MemoryWeights(dict(model.state_dict()), spec)
            self.storages.append(RankStorage(self.kv, "cpu", poison=True))
            decoder = build_model(spec, weights, torch.float32, rank, parallel)
            self.runners.append(Runner(decoder, self.storages[-1], parallel))
        self.threads = ThreadPoolExecutor(tp)
        self.sends: list[Send] = []
        self.arrived: dict[tuple[str, int], list[Callable[[], None]]] = {}
        self.clock = Ticks()
        self.address = GroupAddress(Peer(GroupId(group), Epoch(1)), tp, self.kv.fingerprint, [])
        self.engine = Engine(config, self.kv, b"golden-root-16by", self.address, 256, self._execute, self.clock)
        self.tokens: dict[RequestId, list[int]] = {}
        self.most_held = 0

    def _execute(self, plan: StepPlan, samples: list[SampleInput]) -> StepResult:
        for command in plan.imports:
            for write in self.arrived.pop((command.transfer_id, command.seq)):
                write()
        given = [samples, *([] for _ in self.runners[1:])]
        results = list(self.threads.map(lambda runner, mine: runner.execute(plan, mine), self.runners, given))
        self.sends += plan.sends
        return results[0]

    def step(self) -> None:
        for event in self.engine.step(self.clock()).tokens:
            if event.token_id is not None:
                self.tokens.setdefault(event.key.request_id, []).append(event.token_id)
        for block_id in self.engine.pools.free_blocks():
            group = self.kv.index_of(block_id)
            for storage in self.storages:
                storage.groups[group].blocks[block_id - self.kv.groups[group].first_block].fill_(float("nan"))
        assert self.engine.audit().broken == []
        self.most_held = max(self.most_held, self.engine.pools.pools[-1].num_leased)

    def run(self) -> None:
        while self.engine.has_work():
            self.step()

    def span(self, rank: int, heads: tuple[int, int]) -> GroupSpan:
        return GroupSpan(self.kv, [group.blocks for group in self.storages[rank].groups], heads)


def request(i: int, attempt: int = 1, **fields: Any) -> SequenceRequest:
    return SequenceRequest(
        key=SequenceKey(RequestId(f"r{i}"), 0, attempt),
        prompt_token_ids=PROMPTS[i],
        sampling=SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, seed=0),
        eos_token_ids=[],
        arrival_ns=i,
        **fields,
    )


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("tp", "chunk"), [(1, 256), (1, 7), (2, 16)], ids=["whole", "chunked", "tp2"])
def test_tokens(name: str, tp: int, chunk: int) -> None:
    """Ragged batches of prompts shorter and longer than the window, in chunks shorter and longer than it."""
    replica = Replica(name, tp, chunk)
    for i in range(len(PROMPTS)):
        replica.engine.submit(request(i), replica.clock())
    replica.run()
    assert [replica.tokens[RequestId(f"r{i}")] for i in range(len(PROMPTS))] == expected_tokens(name)
    assert replica.most_held <= len(PROMPTS) * (-(-WINDOW // BLOCK) + 1), "flat once past the window"


@pytest.mark.parametrize("name", CONFIGS)
def test_a_pool_too_small_for_all(name: str) -> None:
    """Preemption, eviction and hits of what is left."""
    replica = Replica(name, 1, 16, num_blocks=12 if name == "mistral" else 34)
    for i in range(len(PROMPTS)):
        replica.engine.submit(request(i), replica.clock())
    replica.run()
    assert [replica.tokens[RequestId(f"r{i}")] for i in range(len(PROMPTS))] == expected_tokens(name)


def carry(source: Replica, destination: Replica) -> int:
    """What links do. Returns the number of blocks."""
    here, there = source.kv.main.layout, destination.kv.main.layout
    count = 0
    while source.sends:
        send = source.sends.pop(0)
        count += len(send.hashes)
        for route in copy_plan(here, there):
            pieces = source.span(route.source_rank, route.source_heads).read(send.source_block_ids, torch.device("cpu"))
            payload = torch.cat(pieces)
            target = destination.span(route.destination_rank, route.destination_heads)
            writes = destination.arrived.setdefault((send.transfer_id, send.seq), [])
            writes.append(partial(target.write, send.destination_block_ids, [payload]))
            destination.engine.report(
                Received(
                    send.transfer_id,
                    send.attempt,
                    send.seq,
                    source.address.peer,
                    route.source_rank,
                    route.destination_rank,
                    send.hashes,
                    send.destination_block_ids,
                    payload.numel(),
                )
            )
        for rank in range(here.tp_size):
            source.engine.report(Sent(send.transfer_id, send.attempt, send.seq, rank))
    return count


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("from_tp", "to_tp"), [(1, 1), (2, 1), (1, 2)])
def test_prefill_transfer_decode(name: str, from_tp: int, to_tp: int) -> None:
    """Only what the next token sees is ferried, and it is enough: decode computes the tail of the prompt alone."""
    prefill, decode = Replica(name, from_tp, 16, group="prefill"), Replica(name, to_tp, 16, group="decode")
    i = len(PROMPTS) - 1
    prompt, transfer_id = PROMPTS[i], TransferId("t")
    wanted = ExpectRequest(
        transfer_id=transfer_id,
        attempt=1,
        source=prefill.address,
        token_ids=prompt,
        cache_salt="",
        timeout_s=60,
    )
    ticket = decode.engine.expect(wanted, decode.clock())
    prefill.engine.submit(request(i, handoff_after=1, sends_transfer_id=transfer_id), prefill.clock())
    prefill.engine.send(ticket, prefill.clock())
    num_blocks = 0
    while prefill.engine.has_work() or prefill.sends:
        prefill.step()
        num_blocks += carry(prefill, decode)
    first = prefill.tokens[RequestId(f"r{i}")]
    decode.engine.submit(request(i, attempt=2, transfer_id=transfer_id, output_token_ids=first), decode.clock())
    decode.run()
    assert first + decode.tokens[RequestId(f"r{i}")] == expected_tokens(name)[i]
    seen = -(-(WINDOW - 1) // BLOCK)
    assert num_blocks == (seen if name == "mistral" else seen + len(prompt) // BLOCK)
    assert decode.engine.load().cached_tokens_total == len(prompt) // BLOCK * BLOCK
    for side in (prefill, decode):
        audit = side.engine.audit()
        assert (audit.inbound, audit.outbound, audit.num_leased_blocks) == ([], [], 0)


def test_the_mixed_model_has_two_groups() -> None:
    """Without it the tests above would show nothing of them."""
    kv: KVGroups = Replica("mixed", 1, 16).kv
    assert [group.layers for group in kv.groups] == [(1,), (0, 2, 3)]
    assert msgspec.structs.asdict(kv.groups[1])["window"] == WINDOW
