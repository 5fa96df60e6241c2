"""An engine over given block groups, with the toy runner: what its sequences hold."""

from __future__ import annotations

from kvferry.runtime.config import CacheConfig, EngineConfig, SchedulerConfig
from kvferry.runtime.engine import Engine
from kvferry.runtime.kv.groups import KVGroups
from kvferry.runtime.request import SequenceRequest
from tests.support.toy_engine import ROOT, Ticks, ToyRunner, toy_address


def run_to(kv: KVGroups, request: SequenceRequest, num_tokens: int) -> int:
    """Bytes of one rank that the sequence holds once so many tokens are computed."""
    clock = Ticks()
    config = EngineConfig(
        cache=CacheConfig(block_size=kv.block_size, num_blocks=kv.num_blocks),
        scheduler=SchedulerConfig(max_batch_tokens=256),
    )
    engine = Engine(config, kv, ROOT, toy_address("toy", kv=kv), 1 << 20, ToyRunner(kv).execute, clock)
    engine.submit(request, clock())
    (sequence,) = engine.scheduler.sequences()
    while sequence.num_computed < num_tokens:
        engine.step(clock())
    return sum(
        pool.num_leased * group.layout.block_bytes for pool, group in zip(engine.pools.pools, kv.groups, strict=True)
    )
