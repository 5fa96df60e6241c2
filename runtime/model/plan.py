"""Where the memory of one rank goes, from a model's description alone. Knows no torch.

    device memory = weights + activations of one step + KV blocks + what is left (less than a block)

How many bytes a token's KV takes is `KVLayout`'s business; how big the weights are follows from `parts.py` and from how
`decoder.py` cuts them. Not counted: what the process itself takes (interpreter, libraries, allocator, communication).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

import msgspec

from kvferry.kernels.packing import Quantization, fits, packed_bytes
from kvferry.runtime.config import CacheConfig, EngineConfig, SchedulerConfig, check_range
from kvferry.runtime.errors import InvalidArgument
from kvferry.runtime.kv.groups import KVGroups
from kvferry.runtime.kv.layout import FORMATS, KVLayout
from kvferry.runtime.model.fit import resolve_kv
from kvferry.runtime.model.parts import Shape, part_shapes
from kvferry.runtime.model.spec import AttentionSpec, LatentSpec, ModelSpec, MoESpec

Device = Literal["gpu", "cpu"]
_CUT_ROWS = ("q", "q_up", "kv_up", "gate", "up", "head")
_CUT_COLUMNS = ("o", "down")
_KV_ROWS = ("k", "v")
"""Experts are cut like the MLP that they are."""


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """What the plan is asked for."""

    device_memory_bytes: int
    """Of one rank, for all that is counted here."""
    context: int
    """Tokens of every sequence, prompt and answer together."""
    link_bytes_per_s: float
    """Between two groups, all ranks together."""
    device: Device = "gpu"
    quantization: Quantization = "none"
    """Of the weights."""
    kv_memory_bytes: int | None = None
    """Of one rank; `None`: all that weights and activations leave."""
    max_batch_tokens: int = 256
    max_sequences: int = 64

    def __post_init__(self) -> None:
        if self.quantization != "none" and self.device == "gpu":
            raise InvalidArgument("quantization", self.quantization, "exists on CPUs", "add --device cpu")
        check_range("device_memory", self.device_memory_bytes, 1, 1 << 50)
        check_range("context", self.context, 1, 1 << 30)
        check_range("link", self.link_bytes_per_s, 1.0, 1e15)
        check_range("max_batch_tokens", self.max_batch_tokens, 1, 1 << 20)
        check_range("max_sequences", self.max_sequences, 1, 1 << 16)
        if self.kv_memory_bytes is not None:
            check_range("kv_memory", self.kv_memory_bytes, 1, 1 << 50)


class MemoryPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes are of one rank unless their name says otherwise; the first rank, which has the most."""

    tp_size: int
    dtype: str
    quantization: str
    kv_format: str
    block_size: int
    context: int
    bytes_per_token: int
    all_ranks_bytes_per_token: int
    ferried_bytes_per_token: int
    """What a transfer carries: KV heads that several ranks hold travel once."""
    sequence_bytes: int
    """KV of one sequence of `context` tokens, in whole blocks; of layers with a window what that shows."""
    device_memory_bytes: int
    weight_bytes: int
    activation_bytes: int
    kv_bytes: int
    left_bytes: int
    block_bytes: int
    num_blocks: int
    """Of layers without a window, in a model that mixes both kinds."""
    num_sequences: int
    """Of `context` tokens at the same time, if they share nothing."""
    transfer_s: float
    """For a prompt of `context` tokens to reach another group."""


def plan_memory(spec: ModelSpec, layout: KVLayout, dtype: str, workload: Workload) -> MemoryPlan:
    """`layout`: of the group's KV; `dtype`: of the weights. Raises `InvalidArgument` when not even a block fits."""
    spec.check_tensor_parallel(layout.tp_size)
    if workload.context > spec.max_context:
        raise InvalidArgument("context", workload.context, f"the model was trained for {spec.max_context} tokens")
    total = workload.device_memory_bytes
    weights = weight_bytes(spec, dtype, layout, workload.device, workload.quantization)
    activations = activation_bytes(spec, dtype, layout, workload)
    free = total - weights - activations
    wanted = free if workload.kv_memory_bytes is None else workload.kv_memory_bytes
    num_blocks = wanted // layout.block_bytes
    if num_blocks < 1 or wanted > free:
        needed = weights + activations + max(layout.block_bytes, workload.kv_memory_bytes or 0)
        raise InvalidArgument(
            "device_memory",
            total,
            f"of each rank, weights take {weights} bytes, activations {activations} and a block {layout.block_bytes}",
            f"give at least {needed}, a larger tensor parallel size, or a smaller batch or KV memory",
        )
    kv, whole = _block_groups(spec, layout, wanted, workload.context), msgspec.structs.replace(layout, tp_size=1)
    ferried = _block_groups(spec, whole, wanted * layout.tp_size, workload.context).held_bytes(workload.context)
    return MemoryPlan(
        tp_size=layout.tp_size,
        dtype=dtype,
        quantization=workload.quantization,
        kv_format=layout.dtype,
        block_size=layout.block_size,
        context=workload.context,
        bytes_per_token=layout.bytes_per_token,
        all_ranks_bytes_per_token=layout.bytes_per_token * layout.tp_size,
        ferried_bytes_per_token=whole.bytes_per_token,
        sequence_bytes=kv.held_bytes(workload.context),
        device_memory_bytes=total,
        weight_bytes=weights,
        activation_bytes=activations,
        kv_bytes=kv.num_bytes,
        left_bytes=free - kv.num_bytes,
        block_bytes=kv.main.layout.block_bytes,
        num_blocks=kv.num_blocks,
        num_sequences=min(
            group.num_blocks * group.layout.block_bytes // group.held_bytes(workload.context) for group in kv.groups
        ),
        transfer_s=ferried / workload.link_bytes_per_s,
    )


def _block_groups(spec: ModelSpec, layout: KVLayout, num_bytes: int, context: int) -> KVGroups:
    """As an engine would share out so many bytes of each rank for sequences of that length."""
    cache = CacheConfig(block_size=layout.block_size, kv_dtype=layout.dtype, kv_memory_bytes=num_bytes)  # type: ignore[arg-type]
    config = EngineConfig(cache=cache, scheduler=SchedulerConfig(max_context=max(2, context)))
    return resolve_kv(config, spec, layout.tp_size)


def rank_shapes(spec: ModelSpec, layout: KVLayout) -> Iterator[tuple[str, Shape]]:
    """Each part as rank 0 holds it. Embeddings, norms and routers are whole on every rank."""
    tp_size = layout.tp_size
    for part, (rows, *rest) in part_shapes(spec).items():
        name = part.split(".")[-2]  # of `layers.3.attention.q.weight`: q
        if name in _CUT_ROWS:
            rows = -(-rows // tp_size)
        elif name in _KV_ROWS:
            rows = rows * layout.rank_heads // layout.num_kv_heads
        elif name in _CUT_COLUMNS and rest:
            rest = [rest[0] // tp_size]
        yield part, (rows, *rest)


def weight_bytes(
    spec: ModelSpec, dtype: str, layout: KVLayout, device: Device, quantization: Quantization = "none"
) -> int:
    """Of rank 0. On a CPU a tied head that is quantised or cut is a copy."""
    size, total = FORMATS[dtype].slot_bytes(1), 0
    parts = [*rank_shapes(spec, layout)]
    own = layout.tp_size > 1 or (quantization != "none" and fits(quantization, spec.hidden_size))
    if spec.tied_embeddings and device == "cpu" and own and (dtype != "float16" or quantization != "none"):
        parts.append(("head.weight", (-(-spec.vocab_size // layout.tp_size), spec.hidden_size)))
    for part, shape in parts:
        linear = len(shape) == 2 and part.split(".")[-2] in (*_CUT_ROWS, *_KV_ROWS, *_CUT_COLUMNS)
        total += packed_bytes(quantization, shape[0], shape[1], size) if linear else math.prod(shape) * size
    return total


def activation_bytes(spec: ModelSpec, dtype: str, layout: KVLayout, workload: Workload) -> int:
    """A bound: of every token the residual, its norm and all that the widest half of a layer makes of them; of every
    row that draws a token its logits, as the head gives them and twice in float32 (what is reported, what is drawn).
    Quantised linears have their inputs as bytes besides. Of a mixture, as many experts as a token has, with a copy of
    it for each; of latent attention, a whole context's keys and values, made for one row at a time.
    """
    tp_size, size = layout.tp_size, FORMATS[dtype].slot_bytes(1)
    per_input = size if workload.quantization == "none" else size + 1.25  # int4: 8 more for each group of 32
    outputs: dict[tuple[str, str], int] = {}
    inputs: dict[tuple[str, str], int] = {}
    for part, shape in rank_shapes(spec, layout):
        _, *path = part.split(".")
        if len(shape) == 2 and len(path) > 2 and not _is_idle(spec, path):
            half = path[0], path[1]
            if path[2] == "experts" and path[-2] == "gate":
                outputs[half] = outputs.get(half, 0) + shape[1]
            outputs[half] = outputs.get(half, 0) + shape[0]
            inputs[half] = max(inputs.get(half, 0), shape[1])
    width = size * 2 * spec.hidden_size + max(
        outputs[half] * size + int(inputs[half] * per_input) + 4 for half in outputs
    )
    own, whole = -(-spec.vocab_size // tp_size), spec.vocab_size if tp_size > 1 else 0
    rows = min(workload.max_batch_tokens, workload.max_sequences)
    logits = (own + whole) * size + 2 * spec.vocab_size * 4
    expanded = max(_expanded(layer.attention) for layer in spec.layers) // tp_size * workload.context * size
    return expanded + workload.max_batch_tokens * width + rows * logits


def _is_idle(spec: ModelSpec, path: list[str]) -> bool:
    """Whether the part is an expert's beyond those that one token has."""
    mlp = spec.layers[int(path[0])].mlp
    return isinstance(mlp, MoESpec) and path[2] == "experts" and int(path[3]) >= mlp.num_active


def _expanded(attention: AttentionSpec | LatentSpec) -> int:
    """Keys and values of all heads for one position, computed from its latent: as they come, and by head."""
    if isinstance(attention, AttentionSpec):
        return 0
    return attention.num_heads * (2 * attention.key_dim + attention.rope_dim + 2 * attention.value_dim)
