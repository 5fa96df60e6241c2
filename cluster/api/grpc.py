"""The gRPC server over a `Service`: every call is decoded, checked, answered or refused here.

    bytes ─▶ decode (malformed: refused) ─▶ check ─▶ Service ─▶ events, one at a time ─▶ context.write

`write` waits for the connection's flow control, so a slow client holds back its own stream and nothing else; one that
takes nothing for `slow_reader_s` loses its request, and learns of it when it reads on.
A client that cancels, or whose deadline passes, cancels the handler; that closes the service's generator.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, cast

import grpc
import msgspec
import structlog
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvferry.cluster.api import convert
from kvferry.cluster.api.health import Health
from kvferry.cluster.api.methods import METHODS, SERVICES, Method
from kvferry.cluster.api.security import TokenInterceptor, Tokens, read_tokens, server_credentials
from kvferry.cluster.api.status import WireStatus, internal_status, to_status
from kvferry.cluster.config import ServerOptions
from kvferry.cluster.service import Service, StreamEvent
from kvferry.proto import kvferry_pb2 as pb
from kvferry.runtime.errors import ClientTooSlow, InvalidArgument, KvferryError
from kvferry.runtime.kv.hashing import tenant_salt

log = structlog.get_logger()
Context = Any
"""`grpc.aio.ServicerContext`; grpc has no types."""
_NO_DEADLINE_S = 10 * 365 * 86400.0
HEALTH_SERVICE = "grpc.health.v1.Health"
MAX_CALLS = 4096
"""At a time, of all kinds; one more is refused with RESOURCE_EXHAUSTED. Bounds what clients that never read hold."""


class Malformed(msgspec.Struct, frozen=True):
    """Stands for a message that could not be decoded; raising in the decoder would end in a status without a reason."""

    reason: str


class Calls:
    """One method per method of the wire contract, named alike. Raises `KvferryError`s only, unless there is a bug."""

    def __init__(self, service: Service, slow_reader_s: float, isolate: Tokens | None = None) -> None:
        """`isolate`: whose tenants share no KV blocks."""
        self._service = service
        self._slow_reader_s = slow_reader_s
        self._isolate = isolate

    async def generate(self, request: pb.GenerateRequest, context: Context) -> None:
        call = convert.to_call(request, remaining_s(context))
        if self._isolate is not None:
            tenant = self._isolate.tenant(context.invocation_metadata())
            assert tenant, "the interceptor lets nobody in without a tenant's token"
            call = msgspec.structs.replace(call, cache_salt=tenant_salt(tenant, call.cache_salt))
        events = cast("AsyncGenerator[StreamEvent, None]", self._service.generate(call))
        async with contextlib.aclosing(events):
            async for event in events:
                await self._write(context, convert.from_event(event))

    async def _write(self, context: Context, message: pb.GenerateResponse) -> None:
        """Raises `ClientTooSlow`."""
        try:
            async with asyncio.timeout(self._slow_reader_s):
                await context.write(message)
        except TimeoutError:
            raise ClientTooSlow(
                f"the client has taken nothing for {self._slow_reader_s:g} s (--slow-reader-s); read faster"
            ) from None

    async def tokenize(self, request: pb.TokenizeRequest, _context: Context) -> pb.TokenizeResponse:
        # In threads: other streams' tokens go on meanwhile.
        if convert.check_tokenize(request) == "chat":
            messages = convert.to_messages(request.chat)
            return pb.TokenizeResponse(token_ids=await asyncio.to_thread(self._service.tokenize_chat, messages))
        special = request.add_special_tokens if request.HasField("add_special_tokens") else True
        token_ids = await asyncio.to_thread(self._service.tokenize, request.text, special)
        return pb.TokenizeResponse(token_ids=token_ids)

    async def detokenize(self, request: pb.DetokenizeRequest, _context: Context) -> pb.DetokenizeResponse:
        convert.check_known(request)
        skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
        text = await asyncio.to_thread(self._service.detokenize, list(request.token_ids), skip)
        return pb.DetokenizeResponse(text=text)

    async def get_model(self, request: pb.GetModelRequest, _context: Context) -> pb.Model:
        convert.check_known(request)
        return convert.from_model(self._service.model())

    async def get_cluster(self, request: pb.GetClusterRequest, _context: Context) -> pb.Cluster:
        convert.check_known(request)
        return convert.from_cluster(await self._service.cluster())

    async def audit(self, request: pb.AuditRequest, _context: Context) -> pb.AuditResponse:
        convert.check_known(request)
        return pb.AuditResponse(findings=await self._service.audit())

    async def operate(self, request: Any, _context: Context) -> pb.OperationResult:
        return convert.from_operation_view(await self._service.operate(convert.to_operation(request)))

    def handlers(self) -> dict[str, Callable[[Any, Context], Awaitable[Any]]]:
        return {
            "Generate": self.generate,
            "Tokenize": self.tokenize,
            "Detokenize": self.detokenize,
            "GetModel": self.get_model,
            "GetCluster": self.get_cluster,
            "Audit": self.audit,
            "Drain": self.operate,
            "Scale": self.operate,
            "SetRole": self.operate,
            "Restart": self.operate,
        }


def remaining_s(context: Context) -> float | None:
    """What is left of the call's deadline; `None` without one."""
    remaining = context.time_remaining()
    return None if remaining is None or remaining > _NO_DEADLINE_S else float(remaining)


def _decoder(message: Any) -> Callable[[bytes], Any]:
    def decode(raw: bytes) -> Any:
        try:
            return message.FromString(raw)
        except DecodeError as error:
            return Malformed(str(error))

    return decode


def _guard(
    method: Method, answer: Callable[[Any, Context], Awaitable[Any]]
) -> Callable[[Any, Context], Awaitable[Any]]:
    """Turns what `answer` raises into a status. Nothing but `KvferryError`s is told to clients."""

    async def guarded(request: Any, context: Context) -> Any:
        try:
            if isinstance(request, Malformed):
                raise InvalidArgument(
                    method.request.DESCRIPTOR.name,
                    request.reason,
                    "must be a valid protobuf message with valid UTF-8 in its strings",
                )
            return await answer(request, context)
        except KvferryError as error:
            status = to_status(error)
        except Exception as error:
            if context.done():  # the client left while we wrote; there is nobody to answer
                return None
            log.error("call_failed", method=method.path, error=type(error).__name__, exc_info=True)
            status = internal_status()
        await _abort(context, status)
        return None

    return guarded


async def _abort(context: Context, status: WireStatus) -> None:
    await context.abort(status.code, status.message, status.trailers)


def _register(server: Any, calls: Calls) -> None:
    answers = calls.handlers()
    by_service: dict[str, dict[str, Any]] = {name: {} for name in SERVICES}
    for method in METHODS.values():
        make = grpc.unary_stream_rpc_method_handler if method.streams else grpc.unary_unary_rpc_method_handler
        by_service[method.service][method.name] = make(
            _guard(method, answers[method.name]),
            request_deserializer=_decoder(method.request),
            response_serializer=method.response.SerializeToString,
        )
    for name, handlers in by_service.items():
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))


class ApiServer:
    """A bound server. Answers health checks with NOT_SERVING until `set_ready(True)`."""

    def __init__(self, server: Any, health: Health, port: int) -> None:
        self._server = server
        self._health = health
        self.port = port

    async def start(self) -> None:
        await self._server.start()

    def set_ready(self, ready: bool) -> None:
        """What health checks say of every service; calls are taken either way."""
        self._health.set_serving(ready)

    async def stop(self, grace_s: float) -> None:
        """Refuses new calls at once, cancels those still running after `grace_s`."""
        self._health.set_serving(False)
        await self._server.stop(grace_s)


def make_server(service: Service, host: str, port: int, options: ServerOptions | None = None) -> ApiServer:
    """Binds `host:port` (0: a free port, see `ApiServer.port`). Call in the event loop that will serve.

    Raises `InvalidArgument` for an address that cannot be bound and for bad token or TLS files.
    """
    options = options or ServerOptions()
    tokens = None if options.token_file is None else read_tokens(options.token_file, options.isolate_tenants)
    interceptors = [] if tokens is None else [TokenInterceptor(tokens)]
    credentials = server_credentials(options)
    address = _probe(host, port)
    if not (ipaddress.ip_address(address).is_loopback or interceptors or options.tls_client_ca):
        log.warning("open_door", host=host, meaning="anyone who reaches the port may call; set a token or a client CA")
    server = grpc.aio.server(
        interceptors=interceptors,
        maximum_concurrent_rpcs=MAX_CALLS,
        options=[
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", options.max_message_bytes),
            ("grpc.max_send_message_length", -1),
            # Else calls that came before the event loop looked are cancelled at random, from the 1 000th on.
            ("grpc.server.max_pending_requests", MAX_CALLS),
            ("grpc.server.max_pending_requests_hard_limit", MAX_CALLS),
            # A client whose machine vanished is noticed and gives back what it held.
            ("grpc.keepalive_time_ms", 30_000),
            ("grpc.keepalive_timeout_ms", 10_000),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
        ],
    )
    _register(server, Calls(service, options.slow_reader_s, tokens if options.isolate_tenants else None))
    health = Health(SERVICES)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    reflection.enable_server_reflection((*SERVICES, HEALTH_SERVICE, reflection.SERVICE_NAME), server)
    place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        bound = server.add_secure_port(place, credentials) if credentials else server.add_insecure_port(place)
    except RuntimeError as error:  # between the probe and here
        raise InvalidArgument("port", port, f"cannot be bound on {host}: {error}", "choose another --port") from None
    return ApiServer(server, health, bound)


def _probe(host: str, port: int) -> str:
    """Binds once with a plain socket, as gRPC's own failure names no reason. Returns the host's IP address.

    Raises `InvalidArgument`.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (socket.gaierror, UnicodeError) as error:
        raise InvalidArgument("host", host, f"cannot be resolved: {error}") from None
    with socket.socket(family, kind, proto) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise InvalidArgument("port", port, f"is in use on {host}", "choose another --port, or 0") from None
            if error.errno == errno.EACCES:
                raise InvalidArgument("port", port, "needs privileges", "choose one from 1024 up") from None
            raise InvalidArgument("host", host, f"is no address of this machine: {error.strerror}") from None
    return str(address[0])
