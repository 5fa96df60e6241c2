"""Tokens and TLS."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

import kvferry
from kvferry.cluster.api.grpc import make_server
from kvferry.cluster.config import ClientTls, ServerOptions
from kvferry.runtime import errors

pytestmark = pytest.mark.integration


@asynccontextmanager
async def serving(service: Any, **options: Any) -> AsyncIterator[str]:
    server = make_server(service, "127.0.0.1", 0, ServerOptions(**options))
    await server.start()
    server.set_ready(True)
    try:
        yield f"127.0.0.1:{server.port}"
    finally:
        await server.stop(0)


async def test_token(service: Any, tmp_path: Path) -> None:
    """A call without the token, or a look at the API, gets through; or probes need the token."""
    (tmp_path / "token").write_text("open sesame\n")

    def reflect(target: str) -> None:
        with grpc.insecure_channel(target) as channel:
            ProtoReflectionDescriptorDatabase(channel).get_services()

    async with serving(service, token_file=tmp_path / "token") as target:
        async with kvferry.AsyncClient(target, token="open sesame") as client:
            assert (await client.generate("x")).outputs[0].text == "x"
        for token in (None, "wrong", "open sesame2"):
            async with kvferry.AsyncClient(target, token=token) as client:
                await client.wait_ready(5)
                for call in (client.generate("x"), client.audit()):
                    with pytest.raises(errors.Unauthenticated, match="token"):
                        await call
        with pytest.raises(grpc.RpcError):
            await asyncio.to_thread(reflect, target)
    assert len(service.calls) == 1


@pytest.mark.parametrize("content", ["", "\nsecond line", "tök", None])
async def test_bad_token_file(service: Any, tmp_path: Path, content: str | None) -> None:
    """An empty file switches the check off, or makes the empty token valid."""
    path = tmp_path / "token"
    if content is not None:
        path.write_text(content)
    with pytest.raises(errors.InvalidArgument, match="token_file"):
        make_server(service, "127.0.0.1", 0, ServerOptions(token_file=path))


async def test_tenants(service: Any, tmp_path: Path) -> None:
    """A tenant's token is refused, lets in as somebody else, or a tenant's own salt reaches another one's blocks."""
    path = tmp_path / "token"
    path.write_text("ann a-secret\n\nbob b-secret\nbob b-new-secret\n")

    async def salt(target: str, token: str, cache_salt: str) -> str:
        async with kvferry.AsyncClient(target, token=token) as client:
            await client.generate("x", cache_salt=cache_salt)
        return str(service.calls[-1].cache_salt)

    async with serving(service, token_file=path, isolate_tenants=True) as target:
        salts = [await salt(target, "a-secret", given) for given in ("", "s", "bob\0s")]
        salts += [await salt(target, "b-secret", given) for given in ("", "s")]
        assert len(set(salts)) == 5
        assert await salt(target, "b-new-secret", "s") == salts[4]
        for token in ("ann a-secret", "ann", "secret"):
            async with kvferry.AsyncClient(target, token=token) as client:
                with pytest.raises(errors.Unauthenticated):
                    await client.generate("x")
    async with serving(service, token_file=path) as target:
        assert await salt(target, "a-secret", "s") == await salt(target, "b-secret", "s") == "s"


@pytest.mark.parametrize(
    ("content", "isolate", "what"),
    [
        ("only-a-token", True, "isolate_tenants needs .* TENANT TOKEN; line 1"),
        ("ann secret\nonly-a-token", False, "several tokens need .*line 2"),
        ("ann secret\nbob secret", True, "line 2 has the same token"),
        ("\n", True, "no line"),
    ],
)
async def test_bad_tenants(service: Any, tmp_path: Path, content: str, isolate: bool, what: str) -> None:
    """All callers share one name though they were to be kept apart."""
    path = tmp_path / "token"
    path.write_text(content)
    with pytest.raises(errors.InvalidArgument, match=what):
        make_server(service, "127.0.0.1", 0, ServerOptions(token_file=path, isolate_tenants=isolate))
    with pytest.raises(errors.InvalidArgument, match="isolate_tenants"):
        ServerOptions(isolate_tenants=True)


@pytest.mark.parametrize(("host", "open_door"), [("0.0.0.0", True), ("127.0.0.1", False), ("localhost", False)])
async def test_open_door_is_reported(service: Any, tmp_path: Path, host: str, open_door: bool) -> None:
    """Somebody serves the world without a token and nothing says so."""
    (tmp_path / "token").write_text("secret")
    with structlog.testing.capture_logs() as logs:
        make_server(service, host, 0)
        make_server(service, host, 0, ServerOptions(token_file=tmp_path / "token"))
    assert [entry["event"] for entry in logs] == ["open_door"] * open_door


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`server` and `client`, each its own authority, as NAME.pem and NAME.key."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command to make certificates")
    folder = tmp_path_factory.mktemp("certificates")
    for name in ("server", "client"):
        files = f"-keyout {folder}/{name}.key -out {folder}/{name}.pem"
        name_of_it = f"-subj /CN={name} -addext subjectAltName=IP:127.0.0.1"
        kind = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
        command = f"openssl req -x509 {kind} {name_of_it} {files}"
        subprocess.run(command.split(), check=True, capture_output=True)
    return folder


async def test_tls(service: Any, certificates: Path) -> None:
    """Traffic is in the clear, or a stranger's certificate is taken."""
    server, stranger = certificates / "server.pem", certificates / "client.pem"
    async with serving(service, tls_cert=server, tls_key=certificates / "server.key") as target:
        async with kvferry.AsyncClient(target, tls=ClientTls(ca=server)) as client:
            assert (await client.generate("x")).outputs[0].text == "x"
        for tls in (None, ClientTls(ca=stranger)):
            async with kvferry.AsyncClient(target, tls=tls) as client:
                with pytest.raises(errors.GroupUnavailable, match="TLS"):
                    await client.generate("x", timeout_s=10)


async def test_mutual_tls(service: Any, certificates: Path) -> None:
    """A client without a certificate gets in."""
    server, client_cert = certificates / "server.pem", certificates / "client.pem"
    options = {"tls_cert": server, "tls_key": certificates / "server.key", "tls_client_ca": client_cert}
    async with serving(service, **options) as target:
        known = ClientTls(ca=server, cert=client_cert, key=certificates / "client.key")
        async with kvferry.AsyncClient(target, tls=known) as client:
            assert (await client.generate("x")).outputs[0].text == "x"
        async with kvferry.AsyncClient(target, tls=ClientTls(ca=server)) as client:
            with pytest.raises(errors.GroupUnavailable):
                await client.generate("x", timeout_s=10)


async def test_bad_tls_files(service: Any, certificates: Path, tmp_path: Path) -> None:
    """A key that does not fit is found only when the first client fails."""
    (tmp_path / "junk.pem").write_text("junk")
    server, key, other = (certificates / name for name in ("server.pem", "server.key", "client.key"))
    for options, field in (
        ({"tls_cert": server, "tls_key": other}, "tls_cert"),
        ({"tls_cert": tmp_path / "junk.pem", "tls_key": key}, "tls_cert"),
        ({"tls_cert": tmp_path / "none.pem", "tls_key": key}, "tls_cert"),
        ({"tls_cert": server, "tls_key": tmp_path / "none.key"}, "tls_key"),
        ({"tls_cert": server}, "tls_key"),
        ({"tls_client_ca": server}, "tls_client_ca"),
        ({"tls_cert": server, "tls_key": key, "tls_client_ca": tmp_path / "junk.pem"}, "tls_client_ca"),
    ):
        with pytest.raises(errors.InvalidArgument) as caught:
            make_server(service, "127.0.0.1", 0, ServerOptions(**options))  # type: ignore[arg-type]
        assert caught.value.field == field
