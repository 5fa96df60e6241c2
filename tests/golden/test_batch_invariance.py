"""A row's logits depend on its own tokens alone, bit for bit: whatever stands beside it, however its prompt is cut,
whether its prefix was computed by another, on any number of threads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from kvferry.kernels.cpu.available import library
from kvferry.runtime.ids import BlockId
from kvferry.runtime.kv.groups import one_group
from kvferry.runtime.kv.storage import RankStorage
from kvferry.runtime.model.batch import make_batches
from kvferry.runtime.model.decoder import Decoder
from kvferry.runtime.model.parallel import SingleRank
from kvferry.runtime.step import Row
from tests.support.golden import build_from, randomised

pytestmark = [
    pytest.mark.golden,
    pytest.mark.skipif(library() is None, reason="the CPU kernels are not built or are turned off"),
]
BLOCK, VOCAB, LENGTH = 16, 500, 260
"""Contexts reach over two chunks of attention."""
SHARED = 48
"""First tokens, alike in all sequences."""


@cache
def model() -> Decoder:
    """Two layers as wide as SmolLM2's, in bfloat16."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=2,
        num_attention_heads=9,
        num_key_value_heads=3,
        initializer_range=0.1,
    )
    return build_from(randomised("batch invariance", config), SingleRank(), torch.bfloat16)


@cache
def prompts() -> list[list[int]]:
    tokens = np.random.default_rng(3).integers(0, VOCAB, (33, LENGTH))
    tokens[:, :SHARED] = tokens[0, :SHARED]
    return [row[: LENGTH - 3 * i].tolist() for i, row in enumerate(tokens)]


class Sequences:
    """Some of the prompts with their blocks, in a poisoned pool."""

    def __init__(self, count: int, shared: bool = False) -> None:
        per = -(-LENGTH // BLOCK)
        layout = model().spec.kv_layout(BLOCK, "bfloat16", 1)
        self.storage = RankStorage(one_group(layout, count * per), "cpu", dtype=torch.bfloat16, poison=True)
        ids = np.random.default_rng(4).permutation(count * per).reshape(count, per)
        if shared:
            ids[:, : SHARED // BLOCK] = ids[0, : SHARED // BLOCK]
        self.tables = [[BlockId(b) for b in row] for row in ids.tolist()]

    def step(self, spans: Sequence[tuple[int, int, int]]) -> list[torch.Tensor]:
        """Logits of all tokens of each span: sequence, first token, number of tokens."""
        rows = [Row(prompts()[i][start : start + n], start, self.tables[i], n) for i, start, n in spans]
        with torch.inference_mode():
            batches = make_batches(rows, self.storage)
            logits = model().forward(batches, self.storage)[0].to(torch.float32, copy=True)
        return list(logits.split([n for _, _, n in spans]))


@cache
def alone(i: int) -> torch.Tensor:
    """All of a prompt in one step, on one thread, with nothing beside it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return Sequences(i + 1).step([(i, 0, len(prompts()[i]))])[0]
    finally:
        torch.set_num_threads(before)


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("count", [1, 2, 7, 33])
def test_a_row_does_not_depend_on_its_batch(count: int) -> None:
    """Sums in another order for another number of rows: whole prompts, chunks of every size, single tokens, mixed."""
    assert alone(0).std() > 0.5  # else equality proves little
    sequences, rng = Sequences(count), np.random.default_rng(count)
    done = [0] * count
    while any(left := [len(prompts()[i]) - done[i] for i in range(count)]):
        sizes = rng.choice([1, 1, 1, 2, 31, 64, 97, LENGTH], count)
        spans = [(i, done[i], min(int(size), left[i])) for i, size in enumerate(sizes) if left[i]]
        for (i, start, n), got in zip(spans, sequences.step(spans), strict=True):
            assert torch.equal(got, alone(i)[start : start + n]), (i, start, n)
            done[i] += n


@pytest.mark.usefixtures("_threads")
def test_a_cached_prefix_is_as_good_as_ones_own() -> None:
    """KV of a prefix that another sequence computed, among others and in other chunks."""
    sequences = Sequences(7, shared=True)
    sequences.step([(0, 0, 17)])
    sequences.step([(0, 17, SHARED - 17)])
    spans = [(i, SHARED, len(prompts()[i]) - SHARED) for i in range(1, 7)]
    for (i, start, _), got in zip(spans, sequences.step(spans), strict=True):
        assert torch.equal(got, alone(i)[start:])
