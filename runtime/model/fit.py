"""What an engine's options and a model come to together, and whether they can. Knows no torch."""

from __future__ import annotations

from kvferry.runtime.config import EngineConfig
from kvferry.runtime.errors import InvalidArgument
from kvferry.runtime.kv.layout import KVLayout
from kvferry.runtime.model.spec import ModelSpec


def check_fit(config: EngineConfig, spec: ModelSpec, tp_size: int) -> None:
    """Raises the `InvalidArgument` that a rank of a group of `tp_size` would raise."""
    spec.check_tensor_parallel(tp_size)
    resolve_max_context(config, spec)
    resolve_num_blocks(config, spec.kv_layout(config.cache.block_size, resolve_kv_dtype(config, spec), tp_size))


def resolve_dtype(config: EngineConfig, spec: ModelSpec) -> str:
    return spec.dtype if config.dtype == "auto" else config.dtype


def resolve_kv_dtype(config: EngineConfig, spec: ModelSpec) -> str:
    return resolve_dtype(config, spec) if config.cache.kv_dtype == "auto" else config.cache.kv_dtype


def resolve_max_context(config: EngineConfig, spec: ModelSpec) -> int:
    """Raises `InvalidArgument` for more than the model was trained for."""
    wanted = config.scheduler.max_context
    if wanted is not None and wanted > spec.max_context:
        raise InvalidArgument("max_context", wanted, f"the model was trained for {spec.max_context} tokens")
    return wanted or spec.max_context


def resolve_num_blocks(config: EngineConfig, layout: KVLayout) -> int:
    """Raises `InvalidArgument` if not even one block fits."""
    if config.cache.num_blocks is not None:
        return config.cache.num_blocks
    count = config.cache.kv_memory_bytes // layout.block_bytes
    if count == 0:
        raise InvalidArgument(
            "kv_memory_bytes", config.cache.kv_memory_bytes, f"one block takes {layout.block_bytes} bytes"
        )
    return count
