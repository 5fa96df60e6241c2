"""For all integration tests: no process outlives its test. `shared_ray`: one Ray for many deployments."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.support.deployment import assert_no_new_children, children
from tests.support.tiny_model import save_tiny_model

# Before Ray is imported: it reads this once. A server in a process of its own does not get it (`tests.support.server`).
os.environ.setdefault("RAY_AUTH_MODE", "disabled")


@pytest.fixture(autouse=True)
def no_process_left() -> Iterator[None]:
    """Fault: a worker, or Ray itself, outlives the deployment."""
    before = children()
    yield
    assert_no_new_children(before)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("tiny-llama")))


@pytest.fixture(scope="session")
def shared_ray() -> Iterator[str]:
    """Address of a Ray cluster to join: saves each deployment the seconds that Ray takes to start."""
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 2, "object_store_memory": 80 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    yield cluster.address
    cluster.shutdown()
