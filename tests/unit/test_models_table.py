"""docs/models.md says what the code supports."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from kvferry.runtime.model.families import FAMILIES
from kvferry.runtime.model.gguf_model import ARCHITECTURES
from kvferry.runtime.model.spec import RopeKind

pytestmark = pytest.mark.core
PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text()


def test_table_names_every_family() -> None:
    """A family that nobody finds, or one that was promised."""
    rows = [line.split("|")[1:-1] for line in PAGE.splitlines() if line.startswith("|")][2:]
    assert sorted(name for row in rows for name in re.findall(r"`(\w+)`", row[1])) == sorted(FAMILIES)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row[2])} == set(ARCHITECTURES)


def test_page_names_every_rope() -> None:
    line = next(line for line in PAGE.splitlines() if "Rope:" in line)
    assert set(get_args(RopeKind)) == set(re.findall(r"`(\w+)`", line.split("Rope:")[1]))
