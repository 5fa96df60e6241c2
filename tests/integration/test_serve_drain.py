"""A signal to `kvferry serve` lets running requests end; a second one does not wait for them."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import kvferry
from kvferry.cluster.service import Completed, Delta
from kvferry.runtime.errors import KvferryError
from tests.integration.test_serve import SMALL, Server

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]
NUM_TOKENS = 1500
END_TIMEOUT_S = 10.0


@pytest.fixture
def server(tmp_path: Path, tiny_model: str) -> Iterator[Server]:
    server = Server(tmp_path / "log", tiny_model, *SMALL, "--drain-s", "60")
    yield server
    server.end()


class Reading:
    """A stream read by a thread."""

    def __init__(self, client: kvferry.Client) -> None:
        self._client = client
        self.num_tokens = 0
        self.completed = False
        self.error: KvferryError | None = None
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        events = self._client.stream("The ferry", max_tokens=NUM_TOKENS, ignore_eos=True, temperature=0.0)
        try:
            for event in events:
                self.num_tokens += len(event.token_ids) if isinstance(event, Delta) else 0
                self.completed |= isinstance(event, Completed)
        except KvferryError as error:
            self.error = error

    def begun(self) -> None:
        deadline = time.monotonic() + 60
        while self.num_tokens < 5:
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def join(self) -> None:
        self._thread.join(120)
        assert not self._thread.is_alive()


def test_running_requests_end_and_new_ones_are_refused(server: Server) -> None:
    """Fault: a planned stop drops what runs, or lets more in; or a balancer is not told to look elsewhere."""
    target = server.wait_for("serving")["target"]
    family = server.family()
    with kvferry.Client(target) as client, grpc.insecure_channel(target) as channel:
        reading = Reading(client)
        reading.begun()
        server.process.send_signal(signal.SIGTERM)
        server.wait_for("stopping")
        refused: KvferryError | None = None
        while refused is None:  # the signal's handler runs a moment later
            try:
                client.generate("hello", max_tokens=1)
            except KvferryError as error:
                refused = error
        assert (refused.label, "shutting down" in str(refused)) == ("group_unavailable", True)
        health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert health.status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert not reading.completed, "the stream has ended before the test looked"
        reading.join()
        assert (reading.error, reading.completed, reading.num_tokens) == (None, True, NUM_TOKENS)
    assert server.process.wait(END_TIMEOUT_S) == 0
    assert not psutil.wait_procs(family, timeout=END_TIMEOUT_S)[1]


def test_second_signal_ends_at_once(server: Server) -> None:
    """Fault: a person who is in a hurry waits for the longest answer."""
    target = server.wait_for("serving")["target"]
    family = server.family()
    with kvferry.Client(target) as client:
        reading = Reading(client)
        reading.begun()
        server.process.send_signal(signal.SIGINT)
        server.wait_for("stopping")
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(END_TIMEOUT_S) == 130
        reading.join()
        assert reading.error is not None
    assert not psutil.wait_procs(family, timeout=END_TIMEOUT_S)[1]
