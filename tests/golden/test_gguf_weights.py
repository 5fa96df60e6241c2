"""SmolLM2's GGUF file: our weights against those that transformers dequantises."""

from __future__ import annotations

import itertools

import pytest
import torch

from kvferry.runtime.model.families import hf_source
from kvferry.runtime.model.files import load_spec
from kvferry.runtime.model.loader import open_weights
from tests.support.real_models import SMOLLM2, installed, tensors_by_transformers

pytestmark = pytest.mark.golden
FILES = installed(SMOLLM2)
SPEC = load_spec(FILES)


@pytest.fixture(scope="module")
def oracle() -> dict[str, torch.Tensor]:
    from transformers import LlamaConfig, LlamaForCausalLM

    state: dict[str, torch.Tensor] = tensors_by_transformers(SMOLLM2, LlamaConfig, LlamaForCausalLM)["tensors"]
    return state


def test_all_tensors_equal_transformers(oracle: dict[str, torch.Tensor]) -> None:
    """Wrong names, a wrong order of q and k rows, or a wrong chunk border would change logits silently."""
    weights = open_weights(FILES, SPEC)
    stored = {part: hf_source(SPEC, part).name for part in weights.names()}
    assert set(stored.values()) == set(oracle)
    for part, name in stored.items():
        assert torch.equal(weights.get(part, torch.float32), oracle[name]), part
    weights.close()


@pytest.mark.parametrize(
    ("name", "dim", "parts"),
    [
        ("layers.3.attention.q.weight", 0, 9),
        ("layers.3.attention.k.weight", 0, 3),
        ("layers.29.attention.v.weight", 0, 3),
        ("layers.29.attention.o.weight", 1, 9),
        ("layers.0.mlp.down.weight", 1, 3),
        ("layers.0.mlp.down.weight", 1, 7),  # cuts through quantisation blocks
        ("embedding.weight", 0, 5),
        ("norm.weight", 0, 3),
    ],
)
def test_slices_join_to_the_whole(oracle: dict[str, torch.Tensor], name: str, dim: int, parts: int) -> None:
    """A rank whose slice is shifted or permuted by the wrong head count still runs, and talks nonsense."""
    weights = open_weights(FILES, SPEC)
    whole = oracle[hf_source(SPEC, name).name].to(torch.bfloat16)
    size = whole.shape[dim]
    borders = [size * part // parts for part in range(parts + 1)]
    slices = [weights.get(name, torch.bfloat16, dim, a, b) for a, b in itertools.pairwise(borders)]
    assert [piece.shape[dim] for piece in slices] == [b - a for a, b in itertools.pairwise(borders)]
    assert torch.equal(torch.cat(slices, dim), whole)
    weights.close()
