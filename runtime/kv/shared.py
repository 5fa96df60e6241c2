"""Memory that other processes of this machine can be given to read: a pool's, so that what leaves it is copied once."""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

_F_SEAL_FUTURE_WRITE = 0x10
"""linux/fcntl.h (5.1): only what is mapped already can be written."""
_MAP_NORESERVE = 0x4000
Bytes = NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class Region:
    """One memory object without a name. `descriptor` lives as long as its tensor."""

    descriptor: int
    address: int
    size: int


_regions: list[Region] = []
_lock = threading.Lock()


def shared_empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Like `torch.empty`, zeroed. Where the system has no such memory, an ordinary tensor: it is sent as any other."""
    size = int(np.prod(shape)) * dtype.itemsize
    try:
        descriptor = os.memfd_create("kvferry-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError:
        return torch.empty(*shape, dtype=dtype)
    try:
        os.ftruncate(descriptor, size)
        data = np.frombuffer(mmap.mmap(descriptor, size), dtype=np.uint8)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    except OSError:
        os.close(descriptor)
        return torch.empty(*shape, dtype=dtype)
    region = Region(descriptor, data.ctypes.data, size)
    with _lock:
        _regions.append(region)
    weakref.finalize(data, _forget, region)
    return torch.from_numpy(data).view(dtype).view(*shape)


def _forget(region: Region) -> None:
    with _lock:
        _regions.remove(region)
    os.close(region.descriptor)


def region_of(pieces: Sequence[torch.Tensor]) -> Region | None:
    """The one that all of them lie in."""
    if not pieces:
        return None
    addresses = [piece.data_ptr() for piece in pieces]
    first, last = min(addresses), max(a + piece.numel() for a, piece in zip(addresses, pieces, strict=True))
    with _lock:
        for region in _regions:
            if region.address <= first and last <= region.address + region.size:
                return region
    return None


def map_to_read(descriptor: int) -> Bytes:
    """All of another process' region, as long as somebody holds the array. A private view: writing changes a copy."""
    size = os.fstat(descriptor).st_size
    return np.frombuffer(mmap.mmap(descriptor, size, flags=mmap.MAP_PRIVATE | _MAP_NORESERVE), dtype=np.uint8)
