"""Options of a deployment: groups, doors, security. Frozen, checked on construction, built once at the edge."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from kvferry.runtime.config import EngineConfig, check_range
from kvferry.runtime.errors import InvalidArgument
from kvferry.runtime.ids import GroupId

Role = Literal["prefill", "decode", "mixed"]
DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 50051
DEFAULT_DRAIN_S = 30.0
MAX_GROUPS = 4096


class ServerOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the gRPC server guards its door. Files are read when the server is made."""

    token_file: Path | None = None
    """Its first line is the bearer token that every call must carry, or each line is TENANT TOKEN; `None`: no token."""
    isolate_tenants: bool = False
    """Tenants share no KV blocks: their names are part of the blocks'."""
    tls_cert: Path | None = None
    """PEM certificate chain; `None`: no TLS."""
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    """PEM certificates; clients must present one that these have signed."""
    max_message_bytes: int = 4 << 20
    """Larger messages of clients are refused."""
    slow_reader_s: float = 60.0
    """How long one message of an answer may wait for its client to read on."""

    def __post_init__(self) -> None:
        check_range("slow_reader_s", self.slow_reader_s, 0.01, 86400.0)
        check_range("max_message_bytes", self.max_message_bytes, 1 << 10, 1 << 30)
        if (self.tls_cert is None) != (self.tls_key is None):
            field = "tls_key" if self.tls_key is None else "tls_cert"
            raise InvalidArgument(field, None, "tls_cert and tls_key go together", "give both or none")
        if self.isolate_tenants and self.token_file is None:
            raise InvalidArgument(
                "isolate_tenants", True, "needs to know the tenants", "give --token-file with lines TENANT TOKEN"
            )
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise InvalidArgument("tls_client_ca", str(self.tls_client_ca), "needs tls_cert and tls_key too")


class LimitOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a gateway takes in, and how long it holds on to it."""

    max_requests: int = 1024
    """In flight; one more is refused."""
    max_queue_s: float = 120.0
    """A request is refused that is expected to wait longer before its prompt is computed."""
    retry_budget: int = 3
    """How often each sequence may be placed again after a loss or a refusal."""
    max_unread_bytes: int = 2 << 20
    """Of one request's answer, held for a client that does not read; beyond that the request ends."""

    def __post_init__(self) -> None:
        check_range("max_requests", self.max_requests, 1, 1 << 20)
        check_range("max_queue_s", self.max_queue_s, 0.001, 86400.0)
        check_range("retry_budget", self.retry_budget, 0, 1000)
        check_range("max_unread_bytes", self.max_unread_bytes, 1 << 10, 1 << 40)


class ClientTls(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a client trusts and shows itself. All paths are PEM files."""

    ca: Path | None = None
    """Who may have signed the server's certificate; `None`: the authorities that gRPC ships with."""
    cert: Path | None = None
    """The client's own certificate, for servers that ask for one."""
    key: Path | None = None

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            field = "key" if self.key is None else "cert"
            raise InvalidArgument(field, None, "cert and key go together", "give both or none")


class GroupSpec(msgspec.Struct, frozen=True):
    """A place in the deployment."""

    group: GroupId
    role: Role
    tp_size: int


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that `kvferry serve` starts."""

    model: str
    """A folder, a .gguf file, or a Hugging Face hub id."""
    prefill: int = 1
    """Groups of each role. Every group can do both phases: without one of the roles the others do its work."""
    decode: int = 1
    mixed: int = 0
    prefill_tp: int = 1
    """Tensor-parallel workers in each group of a role."""
    decode_tp: int = 1
    mixed_tp: int = 1
    disaggregate: Literal["auto", "always", "never"] = "auto"
    """`auto`: where the router expects it to cost fewer seconds."""
    fetch_prefix: Literal["auto", "always", "never"] = "auto"
    """From a group that holds more of it than the chosen one. `auto`: where the router expects it to cost fewer seconds
    than computing it."""
    host: str = DEFAULT_HOST
    port: int = DEFAULT_PORT
    """0: one that is free."""
    drain_s: float = DEFAULT_DRAIN_S
    """For running requests to end after SIGTERM or SIGINT; new ones are refused meanwhile."""
    ray_address: str | None = None
    """Of a running cluster; `None`: start one on this machine."""
    metrics_port: int | None = None
    """Of a Prometheus endpoint on `host`; `None`: none."""
    log_json: bool = False
    """One JSON object per event instead of a line for people."""
    engine: EngineConfig = EngineConfig()
    limits: LimitOptions = LimitOptions()
    server: ServerOptions = ServerOptions()

    def __post_init__(self) -> None:
        if not self.model:
            raise InvalidArgument("model", self.model, "must not be empty", "give a folder, a .gguf file or a hub id")
        for role in ("prefill", "decode", "mixed"):
            check_range(role, getattr(self, role), 0, MAX_GROUPS)
            check_range(f"{role}_tp", getattr(self, f"{role}_tp"), 1, 1024)
        if not self.groups():
            raise InvalidArgument(
                "prefill + decode + mixed", 0, "must be at least 1 group", "e.g. --prefill 1 --decode 1, or --mixed 1"
            )
        check_range("port", self.port, 0, 65535)
        check_range("drain_s", self.drain_s, 0.0, 86400.0)
        if self.metrics_port is not None:
            check_range("metrics_port", self.metrics_port, 1, 65535)

    def groups(self) -> list[GroupSpec]:
        """All places to fill, named `role-number`."""
        sizes: list[tuple[Role, int, int]] = [
            ("prefill", self.prefill, self.prefill_tp),
            ("decode", self.decode, self.decode_tp),
            ("mixed", self.mixed, self.mixed_tp),
        ]
        return [GroupSpec(GroupId(f"{role}-{i}"), role, tp) for role, num, tp in sizes for i in range(num)]
