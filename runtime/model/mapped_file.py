"""A safetensors file's tensors as views of the mapped file."""

from __future__ import annotations

import mmap
from pathlib import Path

import torch

from kvferry.runtime.model.stored import StoredTensor

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class MappedFile:
    """Stays mapped for as long as a view of it lives."""

    def __init__(self, path: str) -> None:
        with Path(path).open("rb") as file:
            # Private, so that torch, which knows no read-only tensors, cannot write into the file.
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def tensor(self, stored: StoredTensor) -> torch.Tensor:
        """A view. `stored` is of this file and of one of its float types."""
        data = torch.frombuffer(self._map, dtype=torch.uint8, count=stored.num_bytes, offset=stored.offset)
        dtype = _DTYPES[stored.dtype]
        if stored.offset % dtype.itemsize:  # a header of odd length
            data = data.clone()
        return data.view(dtype).view(stored.shape)

    def release(self) -> None:
        """Gives back the pages read so far, which count as this process's memory; they are read again when needed."""
        self._map.madvise(mmap.MADV_DONTNEED)
