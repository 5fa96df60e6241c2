"""What is left out of a Ray of our own is what the installed Ray calls so."""

from __future__ import annotations

from typing import Any

import pytest
from ray._private.node import Node

from kvferry.cluster import ray_start

NAMES = {"start_api_server", "start_monitor", "start_log_monitor", "start_ray_processes", "get_gcs_client"}


def test_ray_still_has_those_names() -> None:
    """Ray renames one: a start takes seconds longer, and nobody notices."""
    assert [name for name in NAMES if not callable(getattr(Node, name, None))] == []


@pytest.mark.parametrize("with_logs", [False, True])
def test_ray_is_as_before_afterwards(monkeypatch: pytest.MonkeyPatch, with_logs: bool) -> None:
    """A program that starts a Ray of its own after ours finds it without a dashboard; or ours waits for nothing."""
    started: list[str] = []
    for name in NAMES - {"get_gcs_client"}:
        monkeypatch.setattr(Node, name, lambda _node, name=name, **_: started.append(name))
    answers: list[dict[str, Any]] = [{}, {}, {"node": {}}]
    gcs = type("Gcs", (), {"get_all_node_info": lambda _self: answers.pop(0)})()
    monkeypatch.setattr(Node, "get_gcs_client", lambda _node: gcs)
    node = object.__new__(Node)

    def start_all() -> list[str]:
        started.clear()
        node.start_api_server(include_dashboard=False, raise_on_failure=False)
        node.start_monitor()
        node.start_log_monitor()
        node.start_ray_processes()
        return started

    with ray_start._few_processes(with_logs=with_logs):
        assert start_all() == ["start_log_monitor", "start_ray_processes"][1 - with_logs :]
    assert answers == []
    assert set(start_all()) == NAMES - {"get_gcs_client"}
