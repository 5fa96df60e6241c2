"""Sums and concatenations over the ranks of a tensor-parallel group.

Sums are made in rank order on every rank, in float32 for the half-width types: all ranks get the same bits, whatever
carries the data. All ranks must make the same calls with the same shapes. A rank that waits longer than the timeout
raises `DeviceError`: a group whose ranks have lost each other is replaced, never repaired.

    SingleRank      one rank
    LocalParallel   threads of one process (tests)
    ShmParallel     processes of one machine (`shm_parallel.py`)
    GlooParallel    any processes that share a `torch.distributed` store
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from kvferry.runtime.errors import DeviceError, InvalidArgument
from kvferry.runtime.model.shm_parallel import ShmExchange

ParallelKind = Literal["single", "shm", "gloo"]
DEFAULT_TIMEOUT_S = 60.0


class TensorParallel(Protocol):
    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce_(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks. Mutates the contiguous `x` and returns it."""

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """All ranks' `x` side by side along the last dimension, in rank order. May return `x` itself."""

    def close(self) -> None:
        """Frees what the group holds. Safe more than once."""


class SingleRank:
    """A group of one: nothing to exchange."""

    rank = 0
    size = 1

    def all_reduce_(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def close(self) -> None:
        """Nothing to free."""


class Exchange(Protocol):
    """Hands every rank the flat contribution of each rank; all that a kind of group has to provide."""

    def swap(self, flat: torch.Tensor) -> Sequence[torch.Tensor]:
        """`flat`: 1-d contiguous, at most `max_bytes`. The parts, in rank order, are valid until the next call."""

    def max_bytes(self) -> int: ...

    def close(self) -> None: ...


class Ranks:
    """A group of several ranks over an `Exchange`; large tensors pass in pieces."""

    def __init__(self, rank: int, size: int, exchange: Exchange) -> None:
        self.rank = rank
        self.size = size
        self.exchange = exchange

    def all_reduce_(self, x: torch.Tensor) -> torch.Tensor:
        for piece in self._pieces(x.view(-1)):
            _sum_into(piece, self.exchange.swap(piece))
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1)
        out = x.new_empty((self.size, flat.numel()))
        done = 0
        for piece in self._pieces(flat):
            for rank, part in enumerate(self.exchange.swap(piece)):
                out[rank, done : done + piece.numel()].copy_(part)
            done += piece.numel()
        return torch.cat(out.view(self.size, *x.shape).unbind(0), dim=-1)

    def close(self) -> None:
        self.exchange.close()

    def _pieces(self, flat: torch.Tensor) -> Iterator[torch.Tensor]:
        step = self.exchange.max_bytes() // flat.element_size()
        for start in range(0, flat.numel(), step):
            yield flat[start : start + step]


def _sum_into(out: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """Adds the parts in rank order. `out` is none of them."""
    if len(parts) == 2:  # one rounding at the end either way
        torch.add(parts[0], parts[1], out=out)
        return
    total = parts[0].to(torch.promote_types(out.dtype, torch.float32), copy=True)
    for part in parts[1:]:
        total += part
    out.copy_(total)


class LocalGroup:
    """What the threads of a `LocalParallel` group share."""

    def __init__(self, size: int, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        self.barrier = threading.Barrier(size, timeout=timeout_s)
        self.parts: list[torch.Tensor] = [torch.empty(0)] * size


class _LocalExchange:
    def __init__(self, rank: int, group: LocalGroup) -> None:
        self._rank, self._group = rank, group

    def max_bytes(self) -> int:
        return 1 << 30

    def swap(self, flat: torch.Tensor) -> list[torch.Tensor]:
        try:
            self._group.barrier.wait()  # nobody reads the last call's parts any more
            self._group.parts[self._rank] = flat.clone()
            self._group.barrier.wait()
        except threading.BrokenBarrierError as error:
            raise DeviceError("a thread of the tensor-parallel group is gone or late") from error
        return list(self._group.parts)

    def close(self) -> None:
        self._group.barrier.abort()


def LocalParallel(rank: int, group: LocalGroup) -> Ranks:  # noqa: N802  (one name per kind of group)
    """One thread's place in `group`."""
    return Ranks(rank, group.barrier.parties, _LocalExchange(rank, group))


def ShmParallel(rank: int, size: int, name: str, timeout_s: float = DEFAULT_TIMEOUT_S) -> Ranks:  # noqa: N802
    """Processes of one machine; returns once all have come. `name` must never have been used on this machine before."""
    return Ranks(rank, size, ShmExchange(rank, size, name, timeout_s))


class _GlooExchange:
    def __init__(self, rank: int, size: int, store: Store, timeout_s: float, host: str) -> None:
        gloo: Any = dist.ProcessGroupGloo  # torch's stubs know little of it
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=host)]
        options._timeout = timedelta(seconds=timeout_s)
        try:
            self._group = gloo(store, rank, size, options)
        except RuntimeError as error:
            raise DeviceError(f"the tensor-parallel group of {size} ranks did not come together: {error}") from error
        self._size = size

    def max_bytes(self) -> int:
        return 64 << 20

    def swap(self, flat: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(flat) for _ in range(self._size)]
        try:
            self._group.allgather([parts], [flat]).wait()
        except RuntimeError as error:
            raise DeviceError(f"a rank of the tensor-parallel group is gone or late: {error}") from error
        return parts

    def close(self) -> None:
        """The connections go with the object."""


def GlooParallel(  # noqa: N802
    rank: int, size: int, store: Store, timeout_s: float = DEFAULT_TIMEOUT_S, host: str = "127.0.0.1"
) -> Ranks:
    """Processes that share `store` (under a prefix of their own). `host`: this rank's address as others reach it."""
    return Ranks(rank, size, _GlooExchange(rank, size, store, timeout_s, host))


def make_parallel(
    kind: ParallelKind,
    rank: int,
    size: int,
    *,
    name: str = "",
    store: Store | None = None,
    host: str = "127.0.0.1",
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> TensorParallel:
    """One rank's place in a group; blocks until all ranks have come.

    `shm` needs `name`; `gloo` needs `store` and `host`. Raises `DeviceError` when ranks are missing at the deadline.
    """
    if size == 1:
        return SingleRank()
    if kind == "shm" and name:
        return ShmParallel(rank, size, name, timeout_s)
    if kind == "gloo" and store is not None:
        return GlooParallel(rank, size, store, timeout_s, host)
    raise InvalidArgument("parallel", kind, f"must be 'shm' with a name or 'gloo' with a store for {size} ranks")
