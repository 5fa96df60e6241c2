"""Layers compiled into a step program compute what the same layers do one by one, bit for bit."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from kvferry.kernels.cpu.available import library
from kvferry.runtime.ids import BlockId
from kvferry.runtime.kv.groups import one_group
from kvferry.runtime.kv.storage import RankStorage
from kvferry.runtime.model.batch import make_batches
from kvferry.runtime.model.decoder import Decoder
from kvferry.runtime.model.parallel import SingleRank
from kvferry.runtime.step import Row
from tests.support.golden import BLOCK, build_from, randomised
from tests.support.golden_configs import CONFIGS, VOCAB

pytestmark = [
    pytest.mark.golden,
    pytest.mark.skipif(library() is None, reason="the CPU kernels are not built or are turned off"),
]
OTHERS = [name for name in CONFIGS if name.startswith(("gpt2", "mixtral", "deepseek")) or "moe" in name]
"""Layer norms, experts, latents."""
STEPS = [[(0, 200), (0, 3)], [(200, 1), (3, 1)], [(201, 1), (4, 9)], [(202, 70), (13, 1)], [(272, 1)]]
"""Per step the first position and number of tokens of the first and second sequence: alone, mixed, cached."""


def build(name: str, dtype: str) -> Decoder:
    """With heads that the kernels take."""
    config = CONFIGS[name]()
    config.head_dim = 16
    return build_from(randomised(name, config), SingleRank(), getattr(torch, dtype))


def run(model: Decoder, dtype: str, threads: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Logits of all tokens of each step, and the cache as bytes."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        storage = RankStorage(one_group(model.spec.kv_layout(BLOCK, dtype, 1), 160), "cpu", poison=True)
        ids = np.random.default_rng(0).permutation(160).tolist()
        tables = [[BlockId(i) for i in ids[:100]], [BlockId(i) for i in ids[100:]]]
        tokens = np.random.default_rng(1).integers(0, VOCAB, (2, 300)).tolist()
        logits = []
        with torch.inference_mode():
            for step in STEPS:
                rows = [
                    Row(tokens[i][start : start + count], start, tables[i], count)
                    for i, (start, count) in enumerate(step)
                ]
                batches = make_batches(rows, storage)
                assert model.compiled is None or model.compiled.takes(batches, storage)
                logits.append(model.logits(model.forward(batches, storage)))
        return logits, storage.groups[0].blocks.view(torch.uint8)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in OTHERS])
def test_compiled_layers_are_the_layers(name: str, dtype: str) -> None:
    """A norm, bias, window or buffer mixed up in the program; work that a thread leaves out or does too early."""
    model = build(name, dtype)
    assert model.compiled is not None
    expected, kept = run(dataclasses.replace(model, compiled=None), dtype, 1)
    for threads in (1, 2, 3):
        logits, cache = run(model, dtype, threads)
        for got, wanted in zip(logits, expected, strict=True):
            assert torch.equal(got, wanted)
        assert torch.equal(cache, kept)


@pytest.mark.parametrize("name", OTHERS)
def test_what_has_no_operation_is_not_compiled(name: str) -> None:
    """An activation or a kind of layer that the program would compute as another."""
    assert build(name, "float32").compiled is None
