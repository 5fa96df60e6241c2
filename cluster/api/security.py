"""Who may come in: bearer tokens and TLS. Files are read and checked here: faults show at start, not at calls."""

from __future__ import annotations

import hmac
import ssl
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import grpc

from kvferry.cluster.api.status import to_status
from kvferry.cluster.config import ClientTls, ServerOptions
from kvferry.runtime.errors import InvalidArgument, Unauthenticated

AUTHORIZATION = "authorization"
HEALTH_PATHS = "/grpc.health.v1.Health/"


def read_token(path: Path) -> str:
    """The file's first line. Raises `InvalidArgument`."""
    token = _read("token_file", path).decode("utf-8", "replace").partition("\n")[0].strip()
    if not token or not token.isascii() or not token.isprintable():
        raise InvalidArgument("token_file", str(path), "its first line must be a token of printable ASCII characters")
    return token


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    """The metadata of a call."""
    if not token or not token.isascii() or not token.isprintable():
        raise InvalidArgument("token", "...", "must be of printable ASCII characters")
    return ((AUTHORIZATION, f"Bearer {token}"),)


class Tokens:
    """Who may call: each token with its tenant's name, which is empty for the only token of a file without names."""

    def __init__(self, tenants: Mapping[str, str]) -> None:
        """`tenants`: by token."""
        self._tenants = [(bearer(token)[0][1].encode(), tenant) for token, tenant in tenants.items()]

    def tenant(self, metadata: Iterable[tuple[str, Any]] | None) -> str | None:
        """Whose token a call has; `None`: nobody's. Takes as long for a wrong token as for any right one."""
        given = [str(value).encode() for key, value in metadata or () if key == AUTHORIZATION]
        if len(given) != 1:
            return None
        found = [tenant for expected, tenant in self._tenants if hmac.compare_digest(given[0], expected)]
        return found[0] if found else None


def read_tokens(path: Path, isolate: bool) -> Tokens:
    """Of a file with one token in its first line, or with lines `TENANT TOKEN`. Raises `InvalidArgument`.

    `isolate`: tenants must have names.
    """
    lines = [line.strip() for line in _read("token_file", path).decode("utf-8", "replace").splitlines()]
    if not isolate and sum(map(bool, lines)) < 2:
        return Tokens({read_token(path): ""})
    tenants: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        tenant, _, token = line.partition(" ")
        if not line:
            continue
        if not token or not line.isascii() or not line.isprintable():
            why = "isolate_tenants needs" if isolate else "several tokens need"
            raise InvalidArgument(
                "token_file", str(path), f"{why} lines of the form TENANT TOKEN; line {number} is not one"
            )
        if token.strip() in tenants:
            raise InvalidArgument("token_file", str(path), f"line {number} has the same token as another one")
        tenants[token.strip()] = tenant
    if not tenants:
        raise InvalidArgument("token_file", str(path), "has no line of the form TENANT TOKEN")
    return Tokens(tenants)


class TokenInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Ends calls without a right token as UNAUTHENTICATED, before their message is read. Health checks are free."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self._refusal = grpc.stream_stream_rpc_method_handler(self._refuse)

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], call_details: Any) -> Any:
        if call_details.method.startswith(HEALTH_PATHS):
            return await continuation(call_details)
        if self._tokens.tenant(call_details.invocation_metadata) is not None:
            return await continuation(call_details)
        return self._refusal

    @staticmethod
    async def _refuse(_requests: Any, context: Any) -> None:
        status = to_status(Unauthenticated("wrong or missing token; send the metadata `authorization: Bearer TOKEN`"))
        await context.abort(status.code, status.message, status.trailers)


def server_credentials(options: ServerOptions) -> Any | None:
    """`None`: no TLS. Raises `InvalidArgument` for files that are missing or do not fit together."""
    cert, key, ca = options.tls_cert, options.tls_key, options.tls_client_ca
    if cert is None or key is None:
        return None
    chain = _pair("tls_cert", cert, key)
    clients = None if ca is None else _authorities("tls_client_ca", ca)
    return grpc.ssl_server_credentials([chain], root_certificates=clients, require_client_auth=ca is not None)


def client_credentials(tls: ClientTls) -> Any:
    """Raises `InvalidArgument` as `server_credentials` does."""
    roots = None if tls.ca is None else _authorities("ca", tls.ca)
    if tls.cert is None or tls.key is None:
        return grpc.ssl_channel_credentials(roots)
    key, cert = _pair("cert", tls.cert, tls.key)
    return grpc.ssl_channel_credentials(roots, key, cert)


def _pair(field: str, cert: Path, key: Path) -> tuple[bytes, bytes]:
    """(private key, certificate chain), known to fit together: gRPC itself would only fail at the first handshake."""
    contents = _read(field.replace("cert", "key"), key), _read(field, cert)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key)
    except (ssl.SSLError, OSError) as error:
        raise InvalidArgument(
            field, str(cert), f"must be a PEM certificate that fits the key {key}: {error}", "check both files"
        ) from None
    return contents


def _authorities(field: str, path: Path) -> bytes:
    content = _read(field, path)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except (ssl.SSLError, OSError) as error:
        raise InvalidArgument(field, str(path), f"must hold PEM certificates: {error}") from None
    return content


def _read(field: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidArgument(field, str(path), f"cannot be read: {error.strerror}") from None
