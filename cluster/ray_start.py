"""Joins a running Ray, or starts one on this machine for us alone, of which only those processes run that we need."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kvferry
from kvferry.cluster.orphans import OwnRay
from kvferry.runtime.errors import InvalidArgument, ResourceMissing

OBJECT_STORE_BYTES = 80 << 20
"""Ray's least: nothing of weight travels through its object store."""
WORKER_ENV = {"GOMP_SPINCOUNT": "2000"}
"""Of every worker, before it imports torch. Workers share cores with each other: OpenMP threads that spin at a barrier
keep the one they wait for from running."""
REGISTER_TIMEOUT_S = 30.0
REGISTER_POLL_S = 0.02


def connect(address: str | None, own: OwnRay | None, log_json: bool) -> list[float]:
    """Returns the CPUs of each node. Raises `ResourceMissing` or `InvalidArgument`."""
    root = str(Path(kvferry.__file__).absolute().parent.parent)  # not this file's folder: it is behind a symbolic link
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    python_path = os.pathsep.join([root, *(folder for folder in folders if folder and folder != root)])
    options: dict[str, Any] = {
        "log_to_driver": not log_json,  # Ray's lines are no JSON
        "logging_level": logging.ERROR,
        "configure_logging": False,
        "runtime_env": {"env_vars": WORKER_ENV | {"PYTHONPATH": python_path}},
    }
    if address is None:  # of our own, seen by nobody else
        os.environ["PYTHONPATH"] = python_path
        for name, value in WORKER_ENV.items():
            os.environ.setdefault(name, value)
        os.environ.setdefault("RAY_AUTH_MODE", "token")  # its ports are open on all interfaces
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 would put the engine behind everything else here
        del options["runtime_env"]
        options |= {"address": "local", "include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
    else:
        options["address"] = address
    import ray

    logging.getLogger("ray").setLevel(logging.ERROR)  # it warns that it is not in the main thread
    try:
        with contextlib.ExitStack() as stack:
            if own is not None:
                stack.enter_context(own.starting())
                stack.enter_context(_few_processes(with_logs=not log_json))
            ray.init(**options)
    except Exception as error:  # plain ones, too: "The current node timed out during startup"
        if own is not None:
            own.kill()  # Ray forgets the processes of a start that failed halfway
            raise ResourceMissing(f"Ray did not start on this machine: {error}") from error
        raise InvalidArgument(
            "ray_address", address, f"cannot be joined: {error}", "see `ray status` there, or leave the option out"
        ) from error
    return [float(node["Resources"].get("CPU", 0.0)) for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]


def disconnect() -> None:
    ray = sys.modules.get("ray")
    if ray is not None:
        ray.shutdown()


@contextlib.contextmanager
def _few_processes(*, with_logs: bool) -> Iterator[None]:
    """A Ray that is started inside has no dashboard, no autoscaler and, unless asked for, nobody who reads its logs.

    Ray has no options for that: without a dashboard it still starts the dashboard's process, and waits for it. Then it
    asks once a second whether its node is there; here it asks when it is. Names are private ones of Ray; what another
    version lacks stays as it is there.
    """
    from ray._private.node import Node

    start: Any = getattr(Node, "start_ray_processes", None)

    def start_and_wait(node: Any) -> None:
        start(node)
        _wait_registered(node)

    changed: dict[str, Any] = {} if start is None else {"start_ray_processes": start_and_wait}
    for name in ("start_api_server", "start_monitor", *(() if with_logs else ("start_log_monitor",))):
        if hasattr(Node, name):
            changed[name] = _start_nothing
    before = {name: getattr(Node, name) for name in changed}
    for name, method in changed.items():
        setattr(Node, name, method)
    try:
        yield
    finally:
        for name, method in before.items():
            setattr(Node, name, method)


def _start_nothing(_node: Any, **_options: Any) -> None:
    """In a process's place."""


def _wait_registered(node: Any) -> None:
    until = time.monotonic() + REGISTER_TIMEOUT_S
    with contextlib.suppress(AttributeError):
        while not node.get_gcs_client().get_all_node_info() and time.monotonic() < until:
            time.sleep(REGISTER_POLL_S)
