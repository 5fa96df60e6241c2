"""What both clients (`cluster/client.py`) share: how a channel is opened, how failures are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import grpc

from kvferry.cluster.api.methods import METHODS, SERVICES
from kvferry.cluster.api.security import bearer, client_credentials
from kvferry.cluster.api.status import to_error
from kvferry.cluster.config import ClientTls
from kvferry.runtime.errors import InvalidArgument, KvferryError

INFERENCE = SERVICES[0]
UNARY_TIMEOUT_S = 60.0
"""Of calls that do not generate, unless the client has its own."""
_OPTIONS = [
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", -1),  # the server's limit is the one that counts, and its answer is clear
    ("grpc.enable_http_proxy", 0),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.use_local_subchannel_pool", 1),  # else a client made after a break may get the broken connection again
]
Caller = Callable[..., Any]


class Connection:
    """One channel to a server, made from `grpc` (sync) or `grpc.aio`, and a callable per method."""

    def __init__(self, module: Any, target: str, token: str | None, tls: ClientTls | None) -> None:
        host, _, port = target.rpartition(":")
        if not host or (port.isdigit() and int(port) > 65535):  # of such a port gRPC would take the lower 16 bits
            raise InvalidArgument("target", target, "must be HOST:PORT, the port up to 65535", "e.g. 127.0.0.1:50051")
        self.target = target
        self._metadata = () if token is None else bearer(token)
        if tls is None:
            self.channel = module.insecure_channel(target, options=_OPTIONS)
        else:
            self.channel = module.secure_channel(target, client_credentials(tls), options=_OPTIONS)
        self._callers: dict[str, Caller] = {}
        for method in METHODS.values():
            make = self.channel.unary_stream if method.streams else self.channel.unary_unary
            self._callers[method.name] = make(
                method.path,
                request_serializer=method.request.SerializeToString,
                response_deserializer=method.response.FromString,
            )

    def call(self, method: str, request: Any | None, timeout_s: float | None) -> Any:
        """A response (sync), or what to await or iterate. `request=None`: an empty one."""
        if timeout_s is not None and not 0 < timeout_s < float("inf"):
            raise InvalidArgument("timeout_s", timeout_s, "must be above 0 and finite", "None waits without limit")
        request = METHODS[method].request() if request is None else request
        try:
            return self._callers[method](request, timeout=timeout_s, metadata=self._metadata)
        except (ValueError, grpc.aio.UsageError):
            raise InvalidArgument("client", self.target, "is closed", "make a new one") from None

    def error(self, failure: Any, timeout_s: float | None, begun: bool = False) -> KvferryError:
        """What a `grpc.RpcError` means, of a call whose answer has `begun` or not."""
        trailers: Sequence[tuple[str, Any]] = tuple(failure.trailing_metadata() or ())
        return to_error(failure.code(), failure.details() or "", trailers, self.target, timeout_s, begun)
