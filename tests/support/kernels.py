"""Turns the CPU kernels off, or down to an older instruction set, for a test."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

from kvferry.kernels.cpu import attention, available, operations
from kvferry.kernels.cpu.available import library


@contextlib.contextmanager
def torch_alone() -> Iterator[None]:
    """As on a machine where the kernels were not built."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(available, "library", lambda: None)
        yield


def num_levels() -> int:
    """Instruction sets that can be tried here; 1 also where there are no kernels at all."""
    found = library()
    return 1 if found is None else int(found.kvferry_levels())


@contextlib.contextmanager
def without_best(levels: int) -> Iterator[None]:
    """As on an older machine, which lacks the best `levels` instruction sets."""
    found = library()
    if found is None:
        pytest.skip("the CPU kernels are not built")
    found.kvferry_skip_levels(levels)
    try:
        yield
    finally:
        found.kvferry_skip_levels(0)


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """So many, however little there is to do."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        with pytest.MonkeyPatch.context() as patch:
            for module, name in ((operations, "_PARALLEL_ELEMENTS"), (attention, "_PARALLEL_SCORES")):
                patch.setattr(module, name, 0)
            yield
    finally:
        torch.set_num_threads(before)
