"""`kvferry serve`: options of a deployment."""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from kvferry.cluster.cli_shared import PemFile, TokenFile, shown
from kvferry.cluster.config import (
    DEFAULT_DRAIN_S,
    DEFAULT_HOST,
    DEFAULT_PORT,
    LimitOptions,
    ServeConfig,
    ServerOptions,
)
from kvferry.kernels.packing import Quantization
from kvferry.runtime.config import (
    CacheConfig,
    DType,
    EngineConfig,
    KVDType,
    SchedulerConfig,
    SpeculationConfig,
    SpeculationMethod,
    TransferConfig,
)
from kvferry.runtime.errors import InvalidArgument
from kvferry.runtime.kv.eviction import EvictionName

_ENGINE = EngineConfig()
_SERVER = ServerOptions()
_LIMITS = LimitOptions()
DEFAULT_MAX_UNREAD = f"{_LIMITS.max_unread_bytes >> 20}MiB"
DEFAULT_KV_MEMORY = f"{_ENGINE.cache.kv_memory_bytes >> 20}MiB"
_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}


def parse_bytes(field: str, text: str) -> int:
    """`384MiB`, `1.5 GB`, `4096`. Raises `InvalidArgument`."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower())
    if match is None or match[2] not in _UNITS:
        raise InvalidArgument(field, text, "must be a number of bytes, with or without a unit", "e.g. 384MiB or 2GB")
    return int(float(match[1]) * _UNITS[match[2]])


@dataclass(frozen=True, kw_only=True)
class Serve:
    """Start workers and a gRPC server for a model, and serve until Ctrl-C.

    Workers form groups; a group holds one copy of the model. By default one group prefills prompts and another one
    decodes answers, both on this machine.
    """

    model: Annotated[tyro.conf.Positional[str], shown("MODEL")]
    """A folder in Hugging Face's format, a .gguf file, the name of a model on the Hugging Face hub, or package:NAME for
    the .gguf file inside an installed Python package."""

    prefill: int = 1
    """Number of groups that read prompts."""
    decode: int = 1
    """Number of groups that write answers."""
    mixed: int = 0
    """Number of groups that do both. For a server without disaggregation: --prefill 0 --decode 0 --mixed 1."""
    prefill_tp: int = 1
    """Workers in each prefill group; they share the model's weights (tensor parallelism)."""
    decode_tp: int = 1
    """Workers in each decode group."""
    mixed_tp: int = 1
    """Workers in each mixed group."""

    disaggregate: Literal["auto", "always", "never"] = "auto"
    """Whether prompts are read by prefill groups: where that is faster (auto), whenever possible, or never."""
    fetch_prefix: Literal["auto", "always", "never"] = "auto"
    """Whether a group gets the cached beginning of a prompt from one that has it: where that is faster than to compute
    it (auto), whenever possible, or never."""

    host: str = DEFAULT_HOST
    """Address to listen on. 0.0.0.0 lets other machines in: use --token-file and TLS then."""
    port: int = DEFAULT_PORT
    """Port to listen on; 0 picks a free one."""
    token_file: TokenFile = _SERVER.token_file
    """File whose first line is a secret that clients must send, or whose lines are TENANT SECRET. Without it, anyone
    who reaches the port may call."""
    isolate_tenants: bool = _SERVER.isolate_tenants
    """Let tenants of --token-file share no cached prompts, so that none can learn what another one has asked."""
    tls_cert: PemFile = _SERVER.tls_cert
    """The server's certificate chain. Without it, connections are not encrypted."""
    tls_key: PemFile = _SERVER.tls_key
    """The private key of --tls-cert."""
    tls_client_ca: PemFile = _SERVER.tls_client_ca
    """Let in only clients whose certificates these authorities have signed."""
    max_message: Annotated[str, shown("SIZE")] = "4MiB"
    """Largest message that a client may send."""

    drain_s: float = DEFAULT_DRAIN_S
    """Seconds that running requests have to end after Ctrl-C or SIGTERM; new ones are refused. A second one kills."""

    ray_address: Annotated[str | None, shown("HOST:PORT", "start one on this machine, for as long as we serve")] = None
    """Join a running Ray cluster; "auto" finds one that runs here."""

    max_requests: int = _LIMITS.max_requests
    """Requests that may be in the server at a time; more are refused."""
    max_queue_s: float = _LIMITS.max_queue_s
    """Refuse a request that is expected to wait for so many seconds before work on it begins."""
    retry_budget: int = _LIMITS.retry_budget
    """How often an answer may begin anew on other workers after a loss, before its request fails."""
    max_unread: Annotated[str, shown("SIZE")] = DEFAULT_MAX_UNREAD
    """Ends a request whose client has left so much of its answer unread."""
    slow_reader_s: float = _SERVER.slow_reader_s
    """Seconds after which a client that reads nothing loses its request."""

    metrics_port: Annotated[int | None, shown("INT", "none")] = None
    """Port of a Prometheus endpoint, on the same address."""
    log_json: bool = False
    """Write events as JSON objects instead of lines for people."""

    dtype: DType = _ENGINE.dtype
    """Number format of weights and computation; auto is what the model's files say."""
    quantization: Quantization = _ENGINE.quantization
    """Of the weights, on CPUs: int8 for prompts and many answers, int4 for least memory and a few answers at a time."""
    threads: Annotated[int | None, shown("INT", "the cores that others leave idle")] = _ENGINE.threads
    """CPU threads of each worker."""

    block_size: int = _ENGINE.cache.block_size
    """Tokens in a KV block. Prefixes are shared in whole blocks."""
    kv_dtype: KVDType = _ENGINE.cache.kv_dtype
    """How the KV cache is stored and sent: int8 and fp8 halve it, int4 takes 27%. auto: as it is computed."""
    kv_memory: Annotated[str | None, shown("SIZE", DEFAULT_KV_MEMORY)] = None
    """Memory for the KV cache of each worker."""
    num_blocks: Annotated[int | None, shown("INT", "as many as fit --kv-memory")] = _ENGINE.cache.num_blocks
    """KV blocks of each worker, instead of --kv-memory."""
    prefix_caching: bool = _ENGINE.cache.prefix_caching
    """Keep KV blocks of past prompts and share them with later requests."""
    eviction: EvictionName = _ENGINE.cache.eviction
    """Which past blocks go first when room is needed: least recently used (lru), or those of them that nobody has come
    back to yet (reuse)."""

    max_batch_tokens: int = _ENGINE.scheduler.max_batch_tokens
    """Tokens that one step of a group may compute. More is faster for long prompts and makes others wait longer."""
    max_sequences: int = _ENGINE.scheduler.max_sequences
    """Answers that a group works on at the same time."""
    max_waiting: int = _ENGINE.scheduler.max_waiting
    """Answers that may wait in a group; more are refused."""
    max_context: Annotated[int | None, shown("INT", "what the model was trained for")] = _ENGINE.scheduler.max_context
    """Longest prompt and answer together, in tokens."""
    priority_step_s: float = _ENGINE.scheduler.priority_step_s
    """Seconds of waiting that one step of priority is worth. Who waits long enough goes first all the same."""
    max_bypass: int = _ENGINE.scheduler.max_bypass
    """How many small requests may pass a big one that waits for KV blocks, before they wait as well."""

    speculation: SpeculationMethod = _ENGINE.speculation.method
    """Guess several tokens of an answer and check them in one step: ngram repeats what followed the latest tokens
    earlier in prompt and answer, draft asks the model of --draft-model. Answers stay the same."""
    speculation_tokens: int = _ENGINE.speculation.max_tokens
    """Tokens guessed at most for one answer in one step; as many as pay by measured times."""
    draft_model: Annotated[str | None, shown("MODEL", "none")] = None
    """A small model with the same vocabulary, for --speculation draft."""

    transport: Literal["shm", "gloo", "nccl"] = "shm"
    """How KV blocks travel from group to group. shm: shared memory, on one machine. gloo: network. nccl: GPUs."""
    transfer_timeout_s: float = _ENGINE.transfer.timeout_s
    """Seconds after which KV blocks that did not arrive are computed again instead."""
    blocks_per_message: int = _ENGINE.transfer.blocks_per_message
    """KV blocks that travel in one message."""
    checksum: bool = _ENGINE.transfer.checksum
    """Check each message of KV blocks for damage."""

    def config(self) -> ServeConfig:
        """Raises `InvalidArgument`."""
        if self.num_blocks is not None and self.kv_memory is not None:
            raise InvalidArgument("num_blocks", self.num_blocks, "excludes --kv-memory", "give one of the two")
        return ServeConfig(
            model=self.model,
            prefill=self.prefill,
            decode=self.decode,
            mixed=self.mixed,
            prefill_tp=self.prefill_tp,
            decode_tp=self.decode_tp,
            mixed_tp=self.mixed_tp,
            disaggregate=self.disaggregate,
            fetch_prefix=self.fetch_prefix,
            host=self.host,
            port=self.port,
            drain_s=self.drain_s,
            ray_address=self.ray_address,
            metrics_port=self.metrics_port,
            log_json=self.log_json,
            engine=self._engine(),
            limits=LimitOptions(
                max_requests=self.max_requests,
                max_queue_s=self.max_queue_s,
                retry_budget=self.retry_budget,
                max_unread_bytes=parse_bytes("max_unread", self.max_unread),
            ),
            server=ServerOptions(
                token_file=self.token_file,
                isolate_tenants=self.isolate_tenants,
                tls_cert=self.tls_cert,
                tls_key=self.tls_key,
                tls_client_ca=self.tls_client_ca,
                max_message_bytes=parse_bytes("max_message", self.max_message),
                slow_reader_s=self.slow_reader_s,
            ),
        )

    def _engine(self) -> EngineConfig:
        return EngineConfig(
            dtype=self.dtype,
            quantization=self.quantization,
            threads=self.threads,
            cache=CacheConfig(
                block_size=self.block_size,
                kv_dtype=self.kv_dtype,
                num_blocks=self.num_blocks,
                kv_memory_bytes=parse_bytes("kv_memory", self.kv_memory or DEFAULT_KV_MEMORY),
                prefix_caching=self.prefix_caching,
                eviction=self.eviction,
            ),
            scheduler=SchedulerConfig(
                max_batch_tokens=self.max_batch_tokens,
                max_sequences=self.max_sequences,
                max_waiting=self.max_waiting,
                max_context=self.max_context,
                priority_step_s=self.priority_step_s,
                max_bypass=self.max_bypass,
            ),
            transfer=TransferConfig(
                transport=self.transport,
                timeout_s=self.transfer_timeout_s,
                blocks_per_message=self.blocks_per_message,
                checksum=self.checksum,
            ),
            speculation=SpeculationConfig(
                method=self.speculation, max_tokens=self.speculation_tokens, draft_model=self.draft_model
            ),
        )

    def run(self) -> None:
        config = self.config()
        configure_logging(config.log_json)
        importlib.import_module("kvferry.cluster.launch").serve(config)  # brings Ray and gRPC


def configure_logging(json: bool) -> None:
    from kvferry.cluster import telemetry

    telemetry.configure_logging(json=json)
