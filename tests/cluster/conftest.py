"""Gives tests the toy cluster as the fixture `toy`: all names of `cluster_groups.py` and `cluster_world.py`."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.support import cluster_groups, cluster_world


@pytest.fixture(scope="session")
def toy() -> SimpleNamespace:
    return SimpleNamespace(**vars(cluster_groups) | vars(cluster_world))
