"""Modules that are executed when somebody first asks for something in them, not when they are imported.

Python's own `LazyLoader` executes them for `__file__` as well, which `inspect` asks of every module.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

UNUSED_OF_TORCH = ("torch._meta_registrations",)
"""What operations do to tensors without memory, for compilers: a third of torch's import, and 18 MiB."""


class _LazyModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        """For what is not there yet, and by then the module is an ordinary one."""
        if name.startswith("__"):
            raise AttributeError(name)
        loader: Loader = self.__dict__.pop("_lazy_loader")
        self.__class__ = ModuleType  # type: ignore[assignment]
        loader.exec_module(self)
        return getattr(self, name)


class _LazyLoader(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _LazyModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["_lazy_loader"] = self._loader


class _LazyFinder(MetaPathFinder):
    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname in self._names else None
        if spec is not None and spec.loader is not None:
            spec.loader = _LazyLoader(spec.loader)
        return spec


@contextlib.contextmanager
def lazily(names: Sequence[str]) -> Iterator[None]:
    """Imports of these modules inside are lazy."""
    finder = _LazyFinder(names)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
