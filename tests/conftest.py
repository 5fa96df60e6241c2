"""For all tests. Torch is imported after this: its threads must not spin on cores that processes share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`-m core…` does not import what it will not run: torch, Ray and transformers take seconds."""
    if not config.option.markexpr.startswith("core") or not collection_path.name.startswith("test_"):
        return None
    return "mark.core" not in collection_path.read_text() or None
