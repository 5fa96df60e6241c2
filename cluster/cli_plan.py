"""`kvferry plan`: how far a device's memory reaches, before anything is loaded."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import tyro

from kvferry.cluster.cli_serve import parse_bytes
from kvferry.cluster.cli_shared import shown
from kvferry.kernels.packing import Quantization
from kvferry.runtime.config import CacheConfig, DType, EngineConfig, KVDType, SchedulerConfig, check_range
from kvferry.runtime.errors import InvalidArgument

if TYPE_CHECKING:
    from rich.table import Table

    from kvferry.runtime.model.plan import MemoryPlan

_ENGINE = EngineConfig()
_RATE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kMGT]?)(i?)(B|bit)/s\s*")
_POWER = {"": 0, "k": 1, "M": 2, "G": 3, "T": 4}


def parse_rate(field: str, text: str) -> float:
    """`50GB/s`, `400Gbit/s`: bytes a second. Raises `InvalidArgument`; `Gb/s` is refused, for it is read both ways."""
    match = _RATE.fullmatch(text)
    if match is None:
        raise InvalidArgument(field, text, "must be a number with GB/s, GiB/s or Gbit/s behind it", "e.g. 50GB/s")
    number, prefix, binary, unit = match.groups()
    base: float = (1024 if binary else 1000) ** _POWER[prefix]
    return float(number) * base / (8 if unit == "bit" else 1)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Show where the memory of each worker would go: weights, activations, KV cache. Nothing is loaded."""

    model: Annotated[tyro.conf.Positional[str], shown("MODEL")]
    """What `kvferry serve` takes; or a config.json, or a folder with nothing but that."""

    device_memory: Annotated[str, shown("SIZE")] = "80GiB"
    """Memory of each worker's device, for all that is counted here."""
    device: Literal["gpu", "cpu"] = "gpu"
    """What computes. On a CPU, a head that is tied to the embedding is a copy of it."""
    tp: int = 1
    """Workers in a group; they share the model's weights (tensor parallelism)."""
    context: Annotated[int | None, shown("INT", "what the model was trained for")] = None
    """Tokens of each sequence, prompt and answer together."""
    link: Annotated[str, shown("RATE")] = "50GB/s"
    """Speed of the network between two groups, in bytes (GB/s) or bits (Gbit/s) a second."""

    dtype: DType = _ENGINE.dtype
    """Number format of weights and computation; auto is what the model's files say."""
    kv: Annotated[KVDType, tyro.conf.arg(aliases=("--kv-dtype",))] = _ENGINE.cache.kv_dtype
    """How keys and values are stored and shipped; auto is as computed."""
    quantization: Quantization = _ENGINE.quantization
    """Of the weights, on CPUs."""
    block_size: int = _ENGINE.cache.block_size
    """Tokens in a KV block."""
    kv_memory: Annotated[str | None, shown("SIZE", "all that is left")] = None
    """Memory for the KV cache of each worker."""
    max_batch_tokens: int = _ENGINE.scheduler.max_batch_tokens
    """Tokens that one step of a group may compute."""
    max_sequences: int = _ENGINE.scheduler.max_sequences
    """Answers that a group works on at the same time."""

    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print one JSON object instead of a table. Sizes are bytes."""

    def plan(self) -> MemoryPlan:
        """Raises `InvalidArgument`, `UnsupportedModel`, `CorruptModel`, `NotFound`."""
        from kvferry.runtime.model.files import describe
        from kvferry.runtime.model.fit import check_quantization, resolve_dtype, resolve_kv_dtype
        from kvferry.runtime.model.plan import Workload, plan_memory

        engine = EngineConfig(
            dtype=self.dtype,
            quantization=self.quantization,
            cache=CacheConfig(block_size=self.block_size, kv_dtype=self.kv),
            scheduler=SchedulerConfig(max_batch_tokens=self.max_batch_tokens, max_sequences=self.max_sequences),
        )
        check_range("tp", self.tp, 1, 1024)
        device_memory = parse_bytes("device_memory", self.device_memory)
        kv_memory = None if self.kv_memory is None else parse_bytes("kv_memory", self.kv_memory)
        link = parse_rate("link", self.link)
        spec = describe(self.model)
        dtype = resolve_dtype(engine, spec)
        workload = Workload(
            device_memory_bytes=device_memory,
            context=spec.max_context if self.context is None else self.context,
            link_bytes_per_s=link,
            device=self.device,
            quantization=engine.quantization,
            kv_memory_bytes=kv_memory,
            max_batch_tokens=engine.scheduler.max_batch_tokens,
            max_sequences=engine.scheduler.max_sequences,
        )
        spec.check_tensor_parallel(self.tp)
        check_quantization(engine, spec)
        layout = spec.kv_layout(engine.cache.block_size, resolve_kv_dtype(engine, spec), self.tp)
        return plan_memory(spec, layout, dtype, workload)

    def run(self) -> None:
        plan = self.plan()
        if self.json:
            sys.stdout.write(msgspec.json.encode(plan).decode() + "\n")
        else:
            _show(self.model, plan)


def _show(model: str, plan: MemoryPlan) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    weights = plan.dtype if plan.quantization == "none" else f"{plan.quantization} ({plan.dtype})"
    console.print(f"{model}: {weights} weights, {plan.kv_format} KV, tensor parallel {plan.tp_size}", markup=False)
    console.print(_memory(plan))
    console.print(_cache(plan))


def _memory(plan: MemoryPlan) -> Table:
    table = _table("memory of each rank", "size", "share")
    for name, size in (
        ("weights", plan.weight_bytes),
        ("activations, at most", plan.activation_bytes),
        (f"KV cache, {plan.num_blocks} blocks", plan.kv_bytes),
        ("left", plan.left_bytes),
        ("device", plan.device_memory_bytes),
    ):
        table.add_row(name, _size(size), f"{size / plan.device_memory_bytes:.1%}")
    return table


def _cache(plan: MemoryPlan) -> Table:
    table = _table("KV cache", "")
    table.add_row("a token, on each rank", _size(plan.bytes_per_token))
    table.add_row("a token, on all ranks", _size(plan.all_ranks_bytes_per_token))
    table.add_row("a token, to another group", _size(plan.ferried_bytes_per_token))
    table.add_row(f"a block of {plan.block_size} tokens, on each rank", _size(plan.block_bytes))
    table.add_row(f"{plan.context} tokens, on each rank", _size(plan.sequence_bytes))
    table.add_row(f"sequences of {plan.context} tokens at a time", str(plan.num_sequences))
    table.add_row(f"to another group, {plan.context} tokens", _duration(plan.transfer_s))
    return table


def _table(*columns: str) -> Table:
    from rich.table import Table

    table = Table()
    for column in columns:
        table.add_column(column, justify="left" if column == columns[0] else "right")
    return table


def _size(num_bytes: int) -> str:
    """The largest unit of which there is at least one: `2.5 GiB`."""
    size, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.4g} {unit}"


def _duration(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
