"""Layers compiled into a step program compute what the same layers do one by one, bit for bit."""

from __future__ import annotations

import ctypes
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, TypeVar
from uuid import uuid4

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from kvferry.kernels.cpu.available import library
from kvferry.kernels.cpu.threads import Cores, share_cores
from kvferry.kernels.linear import PackedLinear
from kvferry.kernels.packing import Quantization
from kvferry.kernels.sampling import argmax
from kvferry.runtime.errors import DeviceError
from kvferry.runtime.ids import BlockId, RequestId, SequenceKey
from kvferry.runtime.kv.groups import one_group
from kvferry.runtime.kv.storage import RankStorage
from kvferry.runtime.model.batch import make_batches
from kvferry.runtime.model.decoder import Decoder
from kvferry.runtime.model.parallel import Ranks, ShmParallel, SingleRank, TensorParallel
from kvferry.runtime.model.sampler import sample
from kvferry.runtime.model.shm_parallel import ShmExchange
from kvferry.runtime.request import SamplingParams
from kvferry.runtime.step import Row, SampleInput
from tests.support.golden import BLOCK, build_from, randomised
from tests.support.golden_configs import CONFIGS, VOCAB

T = TypeVar("T")
pytestmark = [
    pytest.mark.golden,
    pytest.mark.skipif(library() is None, reason="the CPU kernels are not built or are turned off"),
]
OTHERS = [name for name in CONFIGS if name.startswith(("gpt2", "mixtral", "deepseek")) or "moe" in name]
"""Layer norms, experts, latents."""
STEPS = [[(0, 200), (0, 3)], [(200, 1), (3, 1)], [(201, 1), (4, 9)], [(202, 70), (13, 1)], [(272, 1)]]
"""Per step the first position and number of tokens of the first and second sequence: alone, mixed, cached."""


@cache
def oracle(name: str) -> PreTrainedModel:
    """With heads and channels that the kernels take, also when four ranks share them."""
    config = CONFIGS[name]()
    config.head_dim, config.intermediate_size = 16, 96
    config.hidden_size = 64
    return randomised(name, config)


def build(
    name: str, dtype: str, parallel: TensorParallel | None = None, quantization: Quantization = "none"
) -> Decoder:
    return build_from(oracle(name), parallel or SingleRank(), getattr(torch, dtype), quantization)


def finds(model: Decoder) -> bool:
    """Whether its logits are whole and final within the program."""
    return model.parallel.size == 1 and model.spec.logit_softcap is None


def every(_: int, count: int) -> int:
    return count


def some(step: int, _: int) -> int:
    return step % 2


def run(
    model: Decoder, stored: str, threads: int, wants: Callable[[int, int], int] = every
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Logits of each step, and the cache as bytes. wants(step, count): of so many last tokens of a row of count."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        layout = model.spec.kv_layout(BLOCK, stored, model.parallel.size)
        storage = RankStorage(one_group(layout, 160), "cpu", dtype=model.dtype, poison=True)
        ids = np.random.default_rng(0).permutation(160).tolist()
        tables = [[BlockId(i) for i in ids[:100]], [BlockId(i) for i in ids[100:]]]
        tokens = np.random.default_rng(1).integers(0, VOCAB, (2, 300)).tolist()
        logits = []
        with torch.inference_mode():
            for number, step in enumerate(STEPS):
                rows = [
                    Row(tokens[i][start : start + count], start, tables[i], wants(number + i, count))
                    for i, (start, count) in enumerate(step)
                ]
                batches = make_batches(rows, storage)
                assert model.compiled is None or model.compiled.takes(batches, storage)
                computed, largest = model.forward(batches, storage)
                assert (largest is not None) == (model.compiled is not None and finds(model))
                assert largest in (None, argmax(computed))
                logits.append(computed.to(torch.float32, copy=True))
        return logits, storage.groups[0].blocks.view(torch.uint8)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in OTHERS])
def test_compiled_layers_are_the_layers(name: str, dtype: str) -> None:
    """A norm, bias, window or buffer mixed up in the program; work that a thread leaves out or does too early."""
    check(build(name, dtype), dtype)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("stored", ["bfloat16", "int8", "int4", "fp8"])
def test_so_are_those_with_quantised_weights_or_kv(stored: str, quantization: Quantization) -> None:
    """Rows of integers that overlap, or of another form; slots packed in another thread's memory."""
    check(build("gqa-tied", "bfloat16", quantization=quantization), stored)


def check(
    model: Decoder, stored: str, wants: Callable[[int, int], int] = every, all_threads: Sequence[int] = (1, 2, 3)
) -> None:
    assert model.compiled is not None
    expected, kept = run(dataclasses.replace(model, compiled=None), stored, 1, wants)
    for threads in all_threads:
        logits, cache = run(model, stored, threads, wants)
        for got, wanted in zip(logits, expected, strict=True):
            assert torch.equal(got, wanted)
        assert torch.equal(cache, kept)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", ["gqa-tied", "gemma2", "gemma3"])
def test_what_nobody_wants_is_left_out_of_the_last_layer(name: str, threads: int) -> None:
    """Rows that are selected in another order, or at the wrong place; a query that is left out; KV that is."""
    for wants in (some, lambda step, count: 0, lambda step, count: min(count, 1 + step * 3)):
        check(build(name, "bfloat16"), "bfloat16", wants, (threads,))


@pytest.fixture
def crowd() -> Iterator[tuple[Cores, Any]]:
    """Three cores for the programs of this process, and the note of a neighbour: pid, group, ranks, busy until."""
    notes = (ctypes.c_int64 * 5)(1, 1, 99, 3, 0)
    lib, cores = library(), Cores(ctypes.addressof(notes), 3, 7, 1, 0)
    assert lib is not None
    share_cores(lib, cores)
    yield cores, notes
    share_cores(lib, None)


def test_threads_come_and_go_within_a_program(crowd: tuple[Cores, Any]) -> None:
    """An operation that a thread joins twice, when it is over, or while the next is prepared; or that nobody ends."""
    cores, notes = crowd
    model = build("gqa-tied", "bfloat16")
    expected, kept = run(dataclasses.replace(model, compiled=None), "bfloat16", 1)
    over = threading.Event()

    def neighbours() -> None:
        random = np.random.default_rng(0)
        while not over.is_set():
            now_ns = time.monotonic_ns()
            notes[3], notes[4] = int(random.integers(1, 4)), now_ns + int(random.integers(0, 300_000))
            cores.one_free_until = now_ns + int(random.integers(0, 200_000))
            over.wait(float(random.random()) * 3e-4)

    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(neighbours)
        try:
            for _ in range(10):
                logits, cache = run(model, "bfloat16", 1)
                for got, wanted in zip(logits, expected, strict=True):
                    assert torch.equal(got, wanted)
                assert torch.equal(cache, kept)
        finally:
            over.set()
        beside.result(timeout=10)


def others_share(forward: Callable[[], object]) -> float:
    """CPU time of the threads that help, of the caller's."""
    own, all_threads = time.thread_time(), time.process_time()
    forward()
    own = time.thread_time() - own
    return (time.process_time() - all_threads - own) / own


def test_cores_that_neighbours_use_are_left_to_them(crowd: tuple[Cores, Any]) -> None:
    """A program that never uses more than one core, or all whoever is there."""
    cores, notes = crowd
    config = CONFIGS["gqa-tied"]()
    config.hidden_size, config.intermediate_size, config.head_dim = 512, 2048, 64
    model = build_from(randomised("gqa-tied", config), SingleRank(), torch.bfloat16)
    storage = RankStorage(one_group(model.spec.kv_layout(BLOCK, "bfloat16", 1), 400), "cpu", dtype=model.dtype)
    rows = [Row([5] * 512, 0, [BlockId(i) for i in range(400)], 1)]

    def forward() -> None:
        with torch.inference_mode():
            model.forward(make_batches(rows, storage), storage)

    others_share(forward)  # starts the threads
    assert max(others_share(forward) for _ in range(3)) > 0.3
    notes[4] = time.monotonic_ns() + 60 * 10**9
    assert min(others_share(forward) for _ in range(3)) < 0.2
    notes[4], cores.count, cores.one_free_until = 0, 2, time.monotonic_ns() + 60 * 10**9
    assert min(others_share(forward) for _ in range(3)) < 0.2
    cores.one_free_until = 0
    assert max(others_share(forward) for _ in range(3)) > 0.3


def test_a_broken_model_is_found_by_the_program() -> None:
    """An argmax that passes over NaN: answers made of nothing."""
    model = build("gqa-tied", "bfloat16")
    assert isinstance(model.head, PackedLinear)
    model.head.weight.view(torch.bfloat16)[5] = float("nan")
    layout = model.spec.kv_layout(BLOCK, "bfloat16", 1)
    storage = RankStorage(one_group(layout, 2), "cpu", dtype=model.dtype)
    rows = [Row([40 + i], 0, [BlockId(i)], 1) for i in range(2)]
    with torch.inference_mode():
        logits, largest = model.forward(make_batches(rows, storage), storage)
    assert largest is not None
    key = SequenceKey(RequestId("r"), 0, 0)
    inputs = [SampleInput(key, SamplingParams(), 1, [], [], [], plain=True)] * 2
    with pytest.raises(DeviceError, match=r"not finite in rows \[0, 1\]"):
        sample(logits, inputs, largest)


@pytest.mark.parametrize("name", OTHERS)
def test_what_has_no_operation_is_not_compiled(name: str) -> None:
    """An activation or a kind of layer that the program would compute as another."""
    assert build(name, "float32").compiled is None


def in_ranks(size: int, work: Callable[[int, TensorParallel], T]) -> list[T]:
    """Each rank in a thread, joined by shared memory."""
    name = f"test-{uuid4().hex}"
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: work(rank, ShmParallel(rank, size, name, timeout_s=60)), range(size)))


@pytest.mark.parametrize(("name", "size"), [("qwen3", 2), ("all-biases", 4), ("gemma2", 2)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ranks_that_share_memory_add_up_within_the_program(name: str, size: int, dtype: str) -> None:
    """A sum in another order, over fewer rows, or read before it was written."""
    oracle(name)

    def rank(_: int, parallel: TensorParallel) -> None:
        model = build(name, dtype, parallel)
        for wants in every, some:
            check(model, dtype, wants, (1,))

    in_ranks(size, rank)


def test_a_rank_that_is_gone_is_noticed() -> None:
    """The program waits for the other ranks outside of Python: without a deadline there, nothing would end it."""

    def rank(index: int, parallel: TensorParallel) -> str:
        assert isinstance(parallel, Ranks)
        assert isinstance(parallel.exchange, ShmExchange)
        parallel.exchange.state.timeout_ns = 300_000_000
        if index == 1:
            return ""
        with pytest.raises(DeviceError, match=r"rank 0 waited .* for ranks \[1\]"):
            run(build("qwen3", "float32", parallel), "float32", 1)
        return "noticed"

    assert in_ranks(2, rank) == ["noticed", ""]
