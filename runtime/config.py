"""Options of one engine. Frozen, checked on construction, built once at the edge; the CLI is made from them."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from kvferry.kernels.packing import Quantization
from kvferry.runtime.errors import InvalidArgument
from kvferry.runtime.kv.eviction import EvictionName

DType = Literal["auto", "float32", "bfloat16", "float16"]
SpeculationMethod = Literal["none", "ngram", "draft"]
KVDType = Literal["auto", "float32", "bfloat16", "float16", "int8", "int4", "fp8"]
TransportName = Literal["shm", "gloo", "nccl", "local"]


def check_range(field: str, value: float, low: float, high: float, hint: str = "") -> None:
    """Raises `InvalidArgument` unless `low <= value <= high`."""
    if not low <= value <= high:
        raise InvalidArgument(field, value, f"must be in [{low}, {high}]", hint)


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The block pool of one rank."""

    block_size: int = 16
    """Tokens in a block."""
    kv_dtype: KVDType = "auto"
    """How keys and values are stored and shipped; `auto`: as they are computed."""
    num_blocks: int | None = None
    """Blocks in the pool; `None`: as many as fit `kv_memory_bytes`."""
    kv_memory_bytes: int = 320 << 20
    """Bytes of KV of one rank."""
    prefix_caching: bool = True
    eviction: EvictionName = "reuse"
    """Which cached blocks go first when room is needed; see `kv/eviction.py`."""

    def __post_init__(self) -> None:
        check_range("block_size", self.block_size, 1, 1024)
        if self.num_blocks is not None:
            check_range("num_blocks", self.num_blocks, 1, 1 << 31)
        check_range("kv_memory_bytes", self.kv_memory_bytes, 1, 1 << 50)


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one step may hold."""

    max_batch_tokens: int = 256
    """Tokens computed in one step: decodes first, prefill chunks with what is left."""
    max_sequences: int = 64
    """Sequences that hold blocks at the same time."""
    max_waiting: int = 4096
    """Sequences that may wait; one more is refused with `QueueFull`, unless it has begun elsewhere."""
    max_context: int | None = None
    """Prompt + output tokens of a sequence; `None`: what the model was trained for."""
    priority_step_s: float = 10.0
    """What one step of priority is worth: who has waited so much longer goes first all the same, so nobody starves."""
    max_bypass: int = 16
    """How many may be admitted past a waiting sequence that lacks blocks; then all that becomes free is kept for it."""

    def __post_init__(self) -> None:
        check_range("priority_step_s", self.priority_step_s, 0.0, 86400.0)
        check_range("max_bypass", self.max_bypass, 0, 1 << 16)
        check_range("max_batch_tokens", self.max_batch_tokens, 1, 1 << 20)
        check_range("max_sequences", self.max_sequences, 1, 1 << 16)
        check_range("max_waiting", self.max_waiting, 1, 1 << 20)
        if self.max_context is not None:
            check_range("max_context", self.max_context, 2, 1 << 30)


class TransferConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How blocks travel between groups."""

    transport: TransportName = "shm"
    timeout_s: float = 20.0
    """A transfer that is not complete by then has failed; its missing blocks are recomputed."""
    blocks_per_message: int = 64
    """At most; fewer where blocks are large."""
    checksum: bool = False
    """A CRC-32 over every message's payload."""

    def __post_init__(self) -> None:
        check_range("timeout_s", self.timeout_s, 0.01, 3600)
        check_range("blocks_per_message", self.blocks_per_message, 1, 256)


class SpeculationConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Guessing several tokens of an answer and checking them in one step. Never changes an answer."""

    method: SpeculationMethod = "none"
    """`ngram`: looks up what followed the latest tokens earlier in prompt and answer. `draft`: asks a smaller model."""
    max_tokens: int = 6
    """Guessed at most for one sequence in one step; as many as pay, by measured times and acceptance."""
    draft_model: str | None = None
    """Like `model`; must have the same vocabulary."""

    def __post_init__(self) -> None:
        check_range("speculation_tokens", self.max_tokens, 1, 64)
        if (self.method == "draft") != (self.draft_model is not None):
            raise InvalidArgument(
                "draft_model", self.draft_model, f"does not go with speculation {self.method!r}", "give both or none"
            )


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything one engine needs to know besides the model."""

    dtype: DType = "auto"
    """`auto`: what the model's files say (bfloat16 for a GGUF file)."""
    quantization: Quantization = "none"
    """Of the weights, on a CPU: `int8` (inputs too, row by row) or `int4` (groups of 32). The embedding stays."""
    threads: int | None = None
    """CPU threads of one rank; `None`: the machine's cores, divided among the ranks that compute at the moment."""
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    transfer: TransferConfig = TransferConfig()
    speculation: SpeculationConfig = SpeculationConfig()

    def __post_init__(self) -> None:
        if self.quantization not in get_args(Quantization):
            raise InvalidArgument("quantization", self.quantization, "must be none, int8 or int4")
        if self.threads is not None:
            check_range("threads", self.threads, 1, 1024)
