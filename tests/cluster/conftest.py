"""Gives tests the toy cluster as the fixture `toy`: all names of `toy_engine.py` and `toy_world.py`."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest


def _load(name: str) -> ModuleType:
    # By path: a bare `tests` package may be shadowed by somebody else's in site-packages.
    spec = spec_from_file_location(f"cluster_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_ENGINE, _WORLD = _load("toy_engine"), _load("toy_world")


@pytest.fixture(scope="session")
def toy() -> SimpleNamespace:
    return SimpleNamespace(**vars(_ENGINE) | vars(_WORLD))
