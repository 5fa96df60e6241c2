"""Block groups of a model: which layers share one, and how memory is shared out.

Guards against: local layers that hold what they cannot see; a split that starves one of the groups.
"""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.runtime.config import CacheConfig, EngineConfig, SchedulerConfig
from kvferry.runtime.errors import InvalidArgument
from kvferry.runtime.kv.groups import KVGroups
from kvferry.runtime.model.families.windows import windowed
from kvferry.runtime.model.fit import check_fit, resolve_kv
from kvferry.runtime.model.spec import AttentionSpec, LayerSpec, MLPSpec, ModelSpec, NormSpec, RopeSpec
from tests.support.toy_engine import toy_request
from tests.support.windows import run_to

pytestmark = pytest.mark.core
MIB = 1 << 20


def spec(windows: list[int | None], max_context: int = 32768) -> ModelSpec:
    """Gemma-3-270M's attention."""
    attention = AttentionSpec(num_heads=4, num_kv_heads=1, head_dim=256, rope=RopeSpec(theta=1e4))
    layer = LayerSpec(attention=attention, mlp=MLPSpec(inner_size=2048))
    plain = ModelSpec(
        architecture="llama",
        vocab_size=1000,
        hidden_size=640,
        layers=(layer,) * len(windows),
        norm=NormSpec(eps=1e-6),
        tied_embeddings=True,
        max_context=max_context,
        eos_token_ids=[],
        bos_token_id=None,
        dtype="bfloat16",
    )
    return windowed(plain, windows)


GEMMA = [None if i % 6 == 5 else 512 for i in range(18)]


def config(max_context: int | None = None, **cache: int) -> EngineConfig:
    return EngineConfig(cache=CacheConfig(**cache), scheduler=SchedulerConfig(max_context=max_context))


def test_layers_with_and_without_a_window_are_apart() -> None:
    full, window = resolve_kv(config(num_blocks=1000), spec(GEMMA), 1).groups
    assert (full.layers, full.window, full.num_blocks, full.layout.num_layers) == ((5, 11, 17), None, 1000, 3)
    assert (len(window.layers), window.window, window.layout.num_layers) == (15, 512, 15)
    assert window.first_block == 1000
    assert set(full.layers) | set(window.layers) == set(range(18))


@pytest.mark.parametrize(
    ("windows", "window"), [([512] * 3, 512), ([512, 256, 100], 512), ([None] * 3, None), ([4096, None], None)]
)
def test_layers_that_are_alike_are_together(windows: list[int | None], window: int | None) -> None:
    """The widest window counts; one that reaches over the whole context is none."""
    kv = resolve_kv(config(num_blocks=10), spec(windows, max_context=4096), 1)
    assert [group.window for group in kv.groups] == [window]


@given(
    num_local=st.integers(1, 30),
    num_full=st.integers(1, 30),
    window=st.sampled_from([64, 512, 1024, 4096]),
    longest=st.sampled_from([2048, 8192, 131072]),
)
@settings(max_examples=60, deadline=None)
def test_no_length_loses_more_than_half(num_local: int, num_full: int, window: int, longest: int) -> None:
    """Against the best split for each length."""
    memory = 4096 * MIB
    kv = resolve_kv(
        config(kv_memory_bytes=memory), spec([window] * num_local + [None] * num_full, max_context=longest), 1
    )
    assert memory * 0.99 < kv.num_bytes <= memory
    if len(kv.groups) == 1:
        return
    full, local = kv.groups
    for length in (16, 512, 2048, longest):
        held = [length * full.layout.bytes_per_token, min(length, window) * local.layout.bytes_per_token]
        best = memory / sum(held)
        served = min(
            full.num_blocks * full.layout.block_bytes / held[0], local.num_blocks * local.layout.block_bytes / held[1]
        )
        assert served > 0.49 * best


def test_options_apply_to_both() -> None:
    by_memory = resolve_kv(config(kv_memory_bytes=64 * MIB), spec(GEMMA), 1)
    by_count = resolve_kv(config(num_blocks=by_memory.num_blocks), spec(GEMMA), 1)
    assert by_count.groups[1].num_blocks == pytest.approx(by_memory.groups[1].num_blocks, rel=0.01)
    assert all(group.num_blocks >= 1 for group in resolve_kv(config(num_blocks=1), spec(GEMMA), 1).groups)
    with pytest.raises(InvalidArgument, match="one block takes"):
        check_fit(config(kv_memory_bytes=100_000), spec(GEMMA), 1)
    short, long = (resolve_kv(config(kv_memory_bytes=64 * MIB, max_context=n), spec(GEMMA), 1) for n in (1024, 32768))
    assert short.num_blocks < long.num_blocks, "who knows his lengths gets the split for them"


def held_bytes(kv: KVGroups, num_tokens: int) -> int:
    """Of a sequence of that many tokens, at rest between steps of its decode."""
    return run_to(kv, toy_request("r", list(range(num_tokens - 8)), 64), num_tokens)


def test_gemma_holds_what_the_formula_says() -> None:
    """4 096 tokens of a Gemma-3-like model against the same without windows: 2·L·T·N·D·bytes, local layers with T=W."""
    scheduler = SchedulerConfig(max_batch_tokens=256, max_context=8192)
    options = EngineConfig(cache=CacheConfig(num_blocks=600), scheduler=scheduler)
    mixed, plain = (resolve_kv(options, spec(windows), 1) for windows in (GEMMA, [None] * 18))
    per_token_and_layer = 2 * 1 * 256 * 2
    full_bytes = held_bytes(plain, 4096)
    assert full_bytes == pytest.approx(18 * 4096 * per_token_and_layer, rel=0.01)
    mixed_bytes = held_bytes(mixed, 4096)
    assert full_bytes == plain.held_bytes(4096)
    assert mixed_bytes == pytest.approx(mixed.held_bytes(4096), rel=0.02)
    assert mixed_bytes == pytest.approx((3 * 4096 + 15 * (512 + 16)) * per_token_and_layer, rel=0.02)
    assert mixed_bytes < 0.28 * full_bytes


def test_mistral_is_flat_once_past_the_window() -> None:
    kv = resolve_kv(config(num_blocks=600), spec([512] * 18), 1)
    assert held_bytes(kv, 1030) == held_bytes(kv, 2050) == held_bytes(kv, 4100) == kv.held_bytes(4100)
    assert kv.held_bytes(4100) == 33 * kv.main.layout.block_bytes
    assert msgspec.structs.replace(kv.main, num_blocks=33).max_tokens is None, "one window of blocks serves any length"


def test_options_are_checked_without_a_tokenizer() -> None:
    """Every worker holds 5 MiB of what only a draft model's check needs."""
    code = "import sys, kvferry.runtime.model.fit; sys.exit('tokenizers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
