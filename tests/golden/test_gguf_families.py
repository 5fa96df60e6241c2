"""GGUF files as converters write them, family by family: tiny models whose logits must be those of transformers.

Names come from the gguf library's own table; what converters change in the tensors is done here once more.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from kvferry.runtime.ids import BlockId
from kvferry.runtime.kv.groups import one_group
from kvferry.runtime.kv.storage import RankStorage
from kvferry.runtime.model.batch import make_batches
from kvferry.runtime.model.decoder import build_model
from kvferry.runtime.model.files import load_spec, resolve_model
from kvferry.runtime.model.loader import open_weights
from kvferry.runtime.model.parallel import SingleRank
from kvferry.runtime.step import Row
from tests.support.golden import oracle, prompts

pytestmark = pytest.mark.golden
GEMMA = {
    "block_count": 4,
    "embedding_length": 48,
    "feed_forward_length": 80,
    "attention.head_count": 4,
    "attention.key_length": 16,
    "attention.sliding_window": 9,
    "attention.layer_norm_rms_epsilon": 1e-6,
}
METADATA: dict[str, dict[str, Any]] = {
    "gemma2": {**GEMMA, "attention.head_count_kv": 2, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0},
    "gemma3": {
        **GEMMA,
        "attention.head_count_kv": 1,
        "rope.freq_base": 1e6,
        "rope.scaling.type": "linear",
        "rope.scaling.factor": 8.0,
        "attention.sliding_window_pattern": [True, True, False, True],
    },
    "phi3": {
        "block_count": 3,
        "embedding_length": 64,
        "feed_forward_length": 80,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": 8,
        "rope.scaling.original_context_length": 512,
        "rope.scaling.attn_factor": math.sqrt(1 + math.log(4) / math.log(512)),  # as converters write it
    },
    "gpt2": {
        "block_count": 3,
        "embedding_length": 48,
        "feed_forward_length": 192,
        "attention.head_count": 4,
        "attention.layer_norm_epsilon": 1e-5,
    },
}


def one_added(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor + 1 if name.endswith("norm.weight") else tensor


def rows_first(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.t() if ".c_" in name and name.endswith("weight") else tensor


def unchanged(_name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor


CHANGED: dict[str, Callable[[str, torch.Tensor], torch.Tensor]] = {
    "gemma2": one_added,
    "gemma3": one_added,
    "phi3": unchanged,
    "gpt2": rows_first,
}
ORACLES = {"gemma2": "gemma2", "gemma3": "gemma3", "phi3": "phi3-longrope-short", "gpt2": "gpt2"}


def write(path: Path, architecture: str, model: Any) -> None:
    writer = gguf.GGUFWriter(path, architecture)
    metadata = {"context_length": 512, **METADATA[architecture]}
    for key, value in metadata.items():
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
        add[type(value)](f"{architecture}.{key}", value)
    known = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(known[architecture], metadata["block_count"])
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        writer.add_tensor(stored, CHANGED[architecture](name, tensor).contiguous().numpy())
    if architecture == "phi3":
        rope = model.config.rope_parameters
        for length in ("short", "long"):
            factors = torch.tensor(rope[f"{length}_factor"]).numpy()
            writer.add_tensor(f"rope_factors_{length}.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("architecture", METADATA)
def test_logits_equal_transformers(tmp_path: Path, architecture: str) -> None:
    """What a GGUF file leaves to its reader (scales, patterns, fused rows, a 1 in norms) is guessed wrong."""
    model = copy.deepcopy(oracle(ORACLES[architecture]))
    if architecture.startswith("gemma"):  # published sizes, but one each, scale by the head dimension
        for layer in model.model.layers:
            layer.self_attn.scaling = 16**-0.5
    write(tmp_path / "m.gguf", architecture, model)
    files = resolve_model(str(tmp_path / "m.gguf"))
    spec = load_spec(files)
    weights = open_weights(files, spec)
    ours = build_model(spec, weights, torch.float32, 0, SingleRank())
    weights.close()
    prompt = prompts()[-1]
    storage = RankStorage(one_group(spec.kv_layout(4, "float32", 1), 16), "cpu", poison=True)
    with torch.inference_mode():
        batches = make_batches([Row(prompt, 0, [BlockId(i) for i in range(10)], True)], storage)
        got = ours.forward(batches, storage)[0].float()
        expected = model(torch.tensor([prompt])).logits[:, -1]
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
