"""One suite for every way in which the ranks of a group are joined. Run as a script, this file is one rank."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from hashlib import blake2b
from pathlib import Path
from uuid import uuid4

import pytest
import torch
import torch.distributed as dist

from kvferry.runtime.errors import DeviceError, InvalidArgument
from kvferry.runtime.model.parallel import (
    GlooParallel,
    LocalGroup,
    LocalParallel,
    ShmParallel,
    SingleRank,
    TensorParallel,
    make_parallel,
)

SHAPES = [(1, 8), (3, 64), (700, 601)]  # the last is larger than one shared-memory buffer in float32
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def contribution(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + shape[0])
    return (torch.randn(shape, generator=generator) * 10 ** (rank - 1)).to(dtype)


def exercise(parallel: TensorParallel) -> str:
    """What a rank sees must be what all contributed. Returns a digest of every bit it got."""
    digest = blake2b()
    for shape in SHAPES:
        for dtype in DTYPES:
            parts = [contribution(rank, shape, dtype) for rank in range(parallel.size)]
            mine = parts[parallel.rank].clone()
            total = parallel.all_reduce_(mine)
            assert total.data_ptr() == mine.data_ptr()
            expected = parts[0].float()
            for part in parts[1:]:
                expected = expected + part.float()
            assert torch.equal(total, expected.to(dtype)), (shape, dtype)
            beside = parallel.all_gather(parts[parallel.rank])
            assert torch.equal(beside, torch.cat(parts, dim=-1)), (shape, dtype)
            digest.update(total.float().numpy().tobytes() + beside.float().numpy().tobytes())
    for i in range(300):  # buffers in turn: a rank that runs ahead must not overwrite what others still read
        x = torch.full((5,), float(i * (parallel.rank + 1)))
        assert parallel.all_reduce_(x)[0] == i * sum(range(1, parallel.size + 1))
    return digest.hexdigest()


def run_threads(make: Callable[[int], TensorParallel], size: int) -> list[str]:
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: exercise(make(rank)), range(size)))


def start_ranks(kind: str, size: int, name: str, port: int = 0, skip: tuple[int, ...] = ()) -> list[subprocess.Popen]:
    root = Path(__file__).resolve().parents[2]
    env = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            [sys.executable, __file__, kind, str(rank), str(size), name, str(port)],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
        if rank not in skip
    ]


def collect(ranks: list[subprocess.Popen]) -> list[str]:
    outputs = [rank.communicate(timeout=60) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * len(ranks), outputs
    assert [err for _, err in outputs] == [""] * len(ranks)  # no resource tracker's complaints either
    return [out for out, _ in outputs]


def test_threads() -> None:
    group = LocalGroup(3, timeout_s=20)
    assert len(set(run_threads(lambda rank: LocalParallel(rank, group), 3))) == 1


def test_single_rank() -> None:
    exercise(SingleRank())


def test_shm_processes_leave_nothing_behind() -> None:
    name = uuid4().hex
    assert len(set(collect(start_ranks("shm", 3, name)))) == 1
    assert not list(Path("/dev/shm").glob(f"*{name}*"))


def test_gloo_processes() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
    assert len(set(collect(start_ranks("gloo", 2, uuid4().hex, store.port)))) == 1


def test_all_kinds_give_the_same_bits() -> None:
    """A group that is moved to another kind must not change a token."""
    store, group, name = dist.HashStore(), LocalGroup(3, timeout_s=20), uuid4().hex
    makers: list[Callable[[int], TensorParallel]] = [
        lambda rank: LocalParallel(rank, group),
        lambda rank: ShmParallel(rank, 3, name, timeout_s=20),
        lambda rank: GlooParallel(rank, 3, store, timeout_s=20),
    ]
    assert len({digest for make in makers for digest in run_threads(make, 3)}) == 1


def test_a_missing_rank_ends_the_start() -> None:
    """A rank that never comes must not hang the others, nor leave a file."""
    name = uuid4().hex
    with pytest.raises(DeviceError, match=r"ranks \[1\]"):
        ShmParallel(0, 2, name, timeout_s=0.2)
    assert not list(Path("/dev/shm").glob(f"*{name}*"))
    with pytest.raises(DeviceError, match="rank 0"):
        ShmParallel(1, 2, name, timeout_s=0.2)
    with pytest.raises(DeviceError):
        GlooParallel(0, 2, dist.HashStore(), timeout_s=0.2)


def test_a_lost_rank_is_noticed() -> None:
    """A peer that dies between two sums must end the step, not hang it."""
    name, local, store = uuid4().hex, LocalGroup(2, timeout_s=0.2), dist.HashStore()
    makers: list[Callable[[int], TensorParallel]] = [
        lambda rank: LocalParallel(rank, local),
        lambda rank: ShmParallel(rank, 2, name, timeout_s=0.2),
        lambda rank: GlooParallel(rank, 2, store, timeout_s=0.2),
    ]
    for make in makers:
        with ThreadPoolExecutor(2) as pool:
            first, _second = pool.map(make, range(2))
        with pytest.raises(DeviceError):
            first.all_reduce_(torch.ones(3))


def test_a_long_wait_does_not_burn_the_core() -> None:
    """Ranks that wait for a slow peer must leave the cores to it."""
    name = uuid4().hex
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda rank: ShmParallel(rank, 2, name, timeout_s=20), range(2))
    late = threading.Timer(1.0, second.all_reduce_, [torch.ones(3)])
    late.start()
    before = time.process_time()
    assert first.all_reduce_(torch.ones(3)).tolist() == [2.0, 2.0, 2.0]
    assert time.process_time() - before < 0.3
    late.join()


def test_make_parallel() -> None:
    assert isinstance(make_parallel("shm", 0, 1), SingleRank)
    with pytest.raises(InvalidArgument, match="parallel"):
        make_parallel("gloo", 0, 2)
    with pytest.raises(InvalidArgument, match="parallel"):
        make_parallel("shm", 0, 2)


def main(kind: str, rank: int, size: int, name: str, port: int) -> None:
    if kind == "shm":
        parallel = make_parallel("shm", rank, size, name=name, timeout_s=30)
    else:
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=20))
        parallel = make_parallel("gloo", rank, size, store=dist.PrefixStore(name, store), timeout_s=30)
    sys.stdout.write(exercise(parallel))
    parallel.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], int(sys.argv[5]))
