"""Modules that nobody uses are not executed; those that somebody uses are like any other."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from kvferry.cluster.lazy_modules import lazily

LATER = "kvferry_test_family.later"


@pytest.fixture
def family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A package whose module `later` counts on the package how often it was executed."""
    folder = tmp_path / "kvferry_test_family"
    folder.mkdir()
    (folder / "__init__.py").write_text("executed = 0\n")
    (folder / "later.py").write_text("import kvferry_test_family\nkvferry_test_family.executed += 1\nanswer = 42\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("kvferry_test_family")
    for name in ("kvferry_test_family", LATER):
        sys.modules.pop(name, None)


def test_it_is_executed_once_when_it_is_used(family: ModuleType) -> None:
    """A module that never comes to be, or comes to be twice: everything that it registers then exists twice."""
    with lazily([LATER]):
        module = importlib.import_module(LATER)
    inspect.getmodule(test_it_is_executed_once_when_it_is_used)  # looks at every module's file
    assert family.executed == 0
    assert module.answer == 42
    assert importlib.import_module(LATER) is module
    with pytest.raises(AttributeError):
        _ = module.question
    assert family.executed == 1


def test_others_and_later_imports_are_as_ever(family: ModuleType) -> None:
    """The rest of the process imports lazily, too, and fails where nobody expects it."""
    with lazily(["kvferry_test_family.another"]):
        importlib.import_module(LATER)
    assert family.executed == 1
    del sys.modules[LATER]
    with lazily([LATER]):
        pass
    importlib.import_module(LATER)
    assert family.executed == 2


def test_torch_without_what_compilers_need() -> None:
    """Another version of torch uses it while it is imported, which then saves nothing; or it is lost for good."""
    check = (
        "import sys\n"
        "from kvferry.cluster.lazy_modules import UNUSED_OF_TORCH, lazily\n"
        "with lazily(UNUSED_OF_TORCH):\n"
        "    import torch\n"
        "import kvferry.runtime.rank, kvferry.runtime.engine\n"
        "torch.ones(2, 3).bfloat16() @ torch.ones(3, 2).bfloat16()\n"
        "lazy = [sys.modules[name] for name in UNUSED_OF_TORCH]\n"
        "assert all('_lazy_loader' in vars(module) for module in lazy), lazy\n"
        "assert callable(torch._meta_registrations.meta_mm)\n"
    )
    subprocess.run([sys.executable, "-c", check], check=True, timeout=60)
