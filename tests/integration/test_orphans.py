"""The launcher or a part of its Ray is killed: nothing stays. And nobody without the secret talks to what runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.server import SMALL, Server

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]
END_TIMEOUT_S = 10
JOIN_TIMEOUT_S = 60
JOIN = "import ray; ray.init(address='{}', logging_level='ERROR'); print('joined')"


@pytest.fixture
def server(tmp_path: Path, tiny_model: str) -> Iterator[Server]:
    server = Server(tmp_path / "log", tiny_model, *SMALL, "--dtype", "float32")
    server.wait_for("serving")
    yield server
    server.end()


def find(family: list[psutil.Process], name: str) -> psutil.Process:
    return next(process for process in family if process.name() == name)


@pytest.mark.parametrize("victim", ["launcher", "raylet", "gcs_server"])
def test_nothing_stays_when_one_is_killed(server: Server, victim: str) -> None:
    """Fault 32: workers, which hold devices, or Ray's daemons outlive whoever would have ended them."""
    family = server.family()
    process = family[0] if victim == "launcher" else find(family, victim)
    assert len(family) >= 8, family
    assert not [p for p in family if "dashboard.py" in " ".join(p.cmdline()) or "monitor.py" in " ".join(p.cmdline())]
    begin = time.monotonic()
    process.send_signal(signal.SIGKILL)
    code = server.process.wait(END_TIMEOUT_S)
    left = psutil.wait_procs(family, timeout=max(0.0, begin + END_TIMEOUT_S - time.monotonic()))[1]
    assert not left, f"still there after {END_TIMEOUT_S} s: {left}"
    assert code == (-signal.SIGKILL if victim == "launcher" else 1)
    if victim != "launcher":
        assert server.wait_for_end("ray_died")


def test_strangers_do_not_get_in(server: Server) -> None:
    """Fault 40: a port of our own on all interfaces; or Ray's, which run what they are sent, open to everybody."""
    family = server.family()
    for process in family:
        if process.pid == server.process.pid or process.name().startswith("ray::Worker"):
            listening = [c.laddr for c in process.net_connections() if c.status == psutil.CONN_LISTEN]
            assert any("127.0.0.1" in a.ip for a in listening), process
            # One is its end of Ray's own channel, which Ray opens to all.
            assert len([a for a in listening if "127.0.0.1" not in a.ip]) <= 1, (process, listening)
    gcs = find(family, "gcs_server")
    port = next(c.laddr.port for c in gcs.net_connections() if c.status == psutil.CONN_LISTEN)
    for token in ("", "wrong" * 8):
        env = os.environ | {"RAY_AUTH_MODE": "token" if token else "disabled", "RAY_AUTH_TOKEN": token}
        command = [sys.executable, "-c", JOIN.format(f"127.0.0.1:{port}")]
        result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=JOIN_TIMEOUT_S)
        assert result.returncode != 0
        assert "joined" not in result.stdout
        assert "uthentication" in result.stderr or "token" in result.stderr, result.stderr[-2000:]
    assert server.process.poll() is None
