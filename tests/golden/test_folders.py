"""Folders as transformers saves them: every part, whole and cut, is what the model in memory has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers.core_model_loading import revert_weight_conversion

from kvferry.runtime.model.files import load_spec, resolve_model
from kvferry.runtime.model.loader import MemoryWeights, open_weights
from kvferry.runtime.model.parts import part_shapes
from tests.support.golden import oracle

pytestmark = pytest.mark.golden


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe-mixed", "deepseek-v2-lite", "deepseek-v3"])
def test_saved_by_transformers(name: str, tmp_path: Path) -> None:
    """Experts or pairs of rotated rows that a folder spells otherwise than memory, or a cut that divides a pair."""
    model = oracle(name)
    model.save_pretrained(tmp_path)
    files = resolve_model(str(tmp_path))
    spec = load_spec(files)
    memory, folder = (
        MemoryWeights(revert_weight_conversion(model, dict(model.state_dict())), spec),
        open_weights(files, spec),
    )
    for part, shape in part_shapes(spec).items():
        whole = folder.get(part, torch.float32)
        assert torch.equal(whole, memory.get(part, torch.float32)), part
        cut = slice(shape[0] // 4, shape[0] // 2)
        assert torch.equal(folder.get(part, torch.float32, 0, cut.start, cut.stop), whole[cut]), part
    folder.close()
