"""Memory for weights: what is given out does not overlap, and goes back."""

from __future__ import annotations

import gc
import mmap
import weakref
from typing import Any

import pytest
import torch

from kvferry.kernels.cpu import memory
from kvferry.kernels.cpu.memory import WeightMemory

KIB = 1 << 10


def test_tensors_do_not_overlap_and_begin_on_cache_lines() -> None:
    """Fault: the end of one weight is the beginning of the next."""
    given = WeightMemory()
    sizes = [100 * KIB + 1, 64 * KIB, 3, 40 << 20, 65 * KIB, 30 << 20, 70 << 20, 64 * KIB]  # more than one chunk
    tensors = [given.empty(size) for size in sizes]
    for i, tensor in enumerate(tensors):
        tensor[0] = tensor[-1] = i
    for i, (tensor, size) in enumerate(zip(tensors, sizes, strict=True)):
        assert (len(tensor), tensor.data_ptr() % 64) == (size, 0)
        assert tensor[0] == tensor[-1] == i


def test_chunks_begin_on_huge_pages() -> None:
    """Fault: a chunk's first and last pages are small ones."""
    given = WeightMemory()
    assert given.empty(64 * KIB).data_ptr() % (2 << 20) == 0


def test_a_chunk_goes_with_its_last_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a process that loads models one after the other keeps all of them."""
    made: list[weakref.ref[mmap.mmap]] = []
    open_chunk = WeightMemory._open

    def noted(self: WeightMemory, size: int) -> mmap.mmap:
        chunk = open_chunk(self, size)
        made.append(weakref.ref(chunk))
        return chunk

    monkeypatch.setattr(WeightMemory, "_open", noted)
    given = WeightMemory()
    one, two = given.empty(64 * KIB), given.empty(64 * KIB)
    del one
    gc.collect()
    assert made[0]() is not None
    del two
    gc.collect()
    assert made[0]() is None
    assert given.empty(64 * KIB) is not None
    assert len(made) == 2


def test_a_system_without_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a kernel built without them refuses the advice, and no model loads."""

    class Plain(mmap.mmap):
        def madvise(self, *_: Any) -> None:
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(memory.mmap, "mmap", Plain)
    assert torch.equal(WeightMemory().empty(64 * KIB), torch.zeros(64 * KIB, dtype=torch.uint8))
