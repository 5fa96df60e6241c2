"""KV that is stored in fewer bits: what a slot holds, what a block weighs, and that no way to it changes a token."""

from __future__ import annotations

import queue
import time

import msgspec
import pytest
import torch

from kvferry.kernels.cpu import available
from kvferry.kernels.formats import SlotFormat
from kvferry.runtime.config import CacheConfig, EngineConfig, SchedulerConfig, TransferConfig
from kvferry.runtime.engine import Engine
from kvferry.runtime.errors import InvalidArgument
from kvferry.runtime.ids import BlockId, Epoch, GroupId, Peer, RequestId, SequenceKey, TransferId
from kvferry.runtime.kv.layout import FORMATS, KVLayout
from kvferry.runtime.kv.storage import KVStorage
from kvferry.runtime.rank import Rank
from kvferry.runtime.request import SamplingParams, SequenceRequest
from kvferry.runtime.transfer.plan import copy_plan
from kvferry.runtime.transfer.span import HeadSpan
from kvferry.runtime.transfer.ticket import ExpectRequest, GroupAddress, LinkReport
from tests.support.tiny_model import save_tiny_model

QUANTISED = ["int8", "int4", "fp8"]
STEPS = {"int8": (1 / 250, 1 / 250), "int4": (1 / 16, 1 / 4), "fp8": (1 / 16, 1 / 16)}
"""Largest error of a key and of a value, in parts of the vector's largest number (fp8: of each number)."""


def slot(name: str, head_dim: int, dtype: torch.dtype = torch.float32) -> SlotFormat:
    layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=head_dim, block_size=1, dtype=name)
    return SlotFormat(name, dtype, head_dim, layout.block_shape[-1])


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("head_dim", [2, 8, 64, 80, 576])
def test_a_slot_has_the_layouts_bytes_and_gives_back_what_was_put_in(name: str, head_dim: int) -> None:
    """A formula that says something else than what is stored; scales of the wrong run; halves that change places."""
    x = torch.randn(2, 50, 3, head_dim, generator=torch.Generator().manual_seed(head_dim)) * 3
    x[:, 0] = 0.0
    x[:, 1] = 7.0
    x[:, 2, :, 0] = 400.0
    stored = slot(name, head_dim)
    packed = stored.pack(x)
    assert packed.dtype == torch.uint8
    assert packed.shape == (2, 50, 3, FORMATS[name].slot_bytes(head_dim))
    error = (stored.unpack(packed) - x).abs()
    for part, step in enumerate(STEPS[name]):
        size = x[part].abs() if name == "fp8" else x[part].abs().amax(-1, keepdim=True)
        assert (error[part] <= size * step * 1.02 + 2**-10).all()
    assert torch.equal(stored.unpack(packed[:, 0]), torch.zeros(2, 3, head_dim))


@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 256])
def test_int4_errs_on_normal_numbers_as_its_levels_promise(head_dim: int) -> None:
    """Fifth bits of another number, scales of the other vector, levels that are not nearest, a try unused."""
    x = torch.randn(2, 3000, head_dim, generator=torch.Generator().manual_seed(head_dim))
    x[1] *= torch.linspace(0.01, 100, 3000)[:, None]
    stored = slot("int4", head_dim)
    got = stored.unpack(stored.pack(x))
    key, value = (got - x).square().mean((1, 2)) / x.square().mean((1, 2))
    assert key < 0.0028
    assert value < 0.022
    assert torch.equal(stored.pack(x.flip(1)), stored.pack(x).flip(1))


def test_int4_keeps_vectors_of_any_size() -> None:
    """A scale that runs over its byte: endless numbers, or none. Beyond the largest, numbers are cut off."""
    x = torch.linspace(-1, 1, 64).expand(2, 1, 64) * torch.tensor([1e-9, 1e-4, 1.0, 1e5])[None, :, None]
    got = slot("int4", 64).unpack(slot("int4", 64).pack(x))
    assert (got[:, 1:] - x[:, 1:]).abs().amax(-1).div(x[:, 1:].amax(-1)).max() < 0.15
    assert (got[:, 0].abs() < 1e-5).all()
    big = slot("int4", 64).unpack(slot("int4", 64).pack(x[:, 3:] * 10))
    assert big.isfinite().all()
    assert big.amax() > 1e5


@pytest.mark.parametrize("head_dim", [7, 129])
def test_int4_needs_numbers_in_pairs(head_dim: int) -> None:
    """The last number of an odd head would be stored nowhere."""
    with pytest.raises(InvalidArgument, match="heads of"):
        slot("int4", head_dim)


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_not_hidden(name: str, bad: float) -> None:
    """A broken model must be noticed at its logits. (fp8 cuts infinity off.)"""
    x = torch.randn(2, 2, 64)
    x[:, 0, 5] = bad
    got = slot(name, 64).unpack(slot(name, 64).pack(x))
    assert not got[:, 0].isfinite().all(-1).any() or (name == "fp8" and bad == float("inf"))
    assert got[:, 1].isfinite().all()


@pytest.mark.parametrize("name", FORMATS)
def test_the_formula_is_what_the_pool_takes(name: str) -> None:
    """Blocks counted by a formula that forgets the scales would not fit the memory."""
    layout = KVLayout(num_layers=3, num_kv_heads=4, head_dim=64, block_size=16, dtype=name, tp_size=2)
    storage = KVStorage(layout, 5, "cpu", dtype=torch.float32, poison=True)
    assert storage.blocks.nbytes == 5 * layout.block_bytes == 5 * 16 * layout.bytes_per_token
    assert len(storage.block_bytes(BlockId(2))) == layout.block_bytes
    assert storage.format.unpack(torch.stack(storage.layer(0))).isnan().all()
    others = {msgspec.structs.replace(layout, dtype=other).fingerprint for other in FORMATS if other != name}
    assert layout.fingerprint not in others
    with pytest.raises(InvalidArgument, match="kv_dtype='int3'"):
        msgspec.structs.replace(layout, dtype="int3")


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize(("source_tp", "destination_tp"), [(1, 2), (4, 2), (2, 1), (8, 2), (2, 8)])
def test_heads_travel_as_stored_between_unequal_groups(name: str, source_tp: int, destination_tp: int) -> None:
    """A span that counts numbers where bytes are: scales of one head beside the numbers of another."""
    whole = KVLayout(num_layers=2, num_kv_heads=4, head_dim=64, block_size=3, dtype=name)
    blocks = torch.randint(0, 256, (6, *whole.block_shape), dtype=torch.uint8)
    source, destination = (msgspec.structs.replace(whole, tp_size=tp) for tp in (source_tp, destination_tp))
    parts = [blocks[:, :, :, slice(*source.heads(rank))].contiguous() for rank in range(source_tp)]
    got = [torch.zeros(6, *destination.block_shape, dtype=torch.uint8) for _ in range(destination_tp)]
    ids, places = [BlockId(4), BlockId(0), BlockId(1)], [BlockId(2), BlockId(3), BlockId(5)]
    for route in copy_plan(source, destination):
        payload = HeadSpan(parts[route.source_rank], route.source_heads).read(ids, torch.device("cpu"))
        HeadSpan(got[route.destination_rank], route.destination_heads).write(places, payload)
    for rank in range(destination_tp):
        expected = blocks[ids][:, :, :, slice(*destination.heads(rank))]
        assert torch.equal(got[rank][places], expected)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("tiny")))


class Group:
    """One rank's engine with real links."""

    def __init__(self, model: str, name: str, epoch: int, kv_dtype: str, max_batch_tokens: int = 256) -> None:
        config = EngineConfig(
            dtype="float32",
            threads=1,
            cache=msgspec.convert({"num_blocks": 40, "kv_dtype": kv_dtype}, CacheConfig),
            scheduler=SchedulerConfig(max_batch_tokens=max_batch_tokens),
            transfer=TransferConfig(transport="local", blocks_per_message=3),
        )
        self.rank = Rank(model, config, host="127.0.0.1")
        kv = self.rank.kv
        peer = Peer(GroupId(name), Epoch(epoch))
        self.address = GroupAddress(peer, 1, kv.fingerprint, [self.rank.address])
        root, execute = self.rank.hash_root, self.rank.execute
        self.engine = Engine(config, kv, root, self.address, self.rank.max_context, execute, time.monotonic_ns)
        self.reports: queue.Queue[LinkReport] = queue.Queue()
        self.rank.attach(self.address, self.reports.put)
        self.tokens: list[int] = []
        self.num_bytes = 0

    def submit(self, name: str, prompt: list[int], max_tokens: int, **more: object) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, seed=0)
        key = SequenceKey(RequestId(name), 0, 1)
        fields = {"key": key, "prompt_token_ids": prompt, "sampling": params, "eos_token_ids": [], **more}
        self.engine.submit(SequenceRequest(**fields), time.monotonic_ns())  # type: ignore[arg-type]

    def step(self) -> None:
        while not self.reports.empty():
            self.engine.report(self.reports.get_nowait())
        output = self.engine.step(time.monotonic_ns())
        for event in output.tokens:
            self.tokens += [] if event.token_id is None else [event.token_id]
        self.num_bytes += sum(event.num_bytes for event in output.transfers)

    def close(self) -> None:
        self.rank.close()


def run(groups: list[Group], num_tokens: int, seconds: float = 20.0) -> None:
    """Until the last group has given so many."""
    until = time.monotonic() + seconds
    while len(groups[-1].tokens) < num_tokens:
        assert time.monotonic() < until, "no more tokens come"
        for group in groups:
            group.step()


PROMPT = [(i * 37 + i * i) % 384 for i in range(150)]


def undisturbed(model: str, kv_dtype: str, max_batch_tokens: int) -> list[int]:
    group = Group(model, "alone", 1, kv_dtype, max_batch_tokens)
    group.submit("a", PROMPT, 24)
    run([group], 24)
    group.close()
    return group.tokens


def ferried(model: str, kv_dtype: str) -> tuple[list[int], int, KVLayout]:
    """Prefilled by one group in chunks, decoded by another. Tokens, and the bytes that went over."""
    source, destination = Group(model, "p", 1, kv_dtype, 40), Group(model, "d", 2, kv_dtype)
    name, token_ids = TransferId("t"), PROMPT
    wanted = ExpectRequest(
        transfer_id=name, attempt=1, source=source.address, token_ids=token_ids, cache_salt="", timeout_s=20.0
    )
    source.submit("a", PROMPT, 24, handoff_after=1, sends_transfer_id=name)
    source.engine.send(destination.engine.expect(wanted, time.monotonic_ns()), time.monotonic_ns())
    run([destination, source], 1)
    first = list(source.tokens)
    destination.submit("a", PROMPT, 24, output_token_ids=first, transfer_id=name)
    run([source, destination], 23)
    source.close()
    destination.close()
    return first + destination.tokens, destination.num_bytes, destination.rank.kv.main.layout


@pytest.mark.parametrize("kv_dtype", QUANTISED)
@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "torch"])
def test_no_way_changes_a_token(model: str, kv_dtype: str, kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk that reads its own keys as they were before they were stored; blocks that are stored anew on arrival."""
    if not kernels:
        monkeypatch.setattr(available, "library", lambda: None)
    whole = undisturbed(model, kv_dtype, 256)
    assert len(whole) == 24
    assert undisturbed(model, kv_dtype, 13) == whole
    tokens, num_bytes, layout = ferried(model, kv_dtype)
    assert tokens == whole
    assert num_bytes == len(PROMPT) // 16 * layout.block_bytes


def test_bytes_ferried_fall_to_about_a_half_and_a_quarter(model: str) -> None:
    """Blocks that are unpacked for the way: then quantising would save memory, but no time on a link."""
    sent = {kv_dtype: ferried(model, kv_dtype)[1] for kv_dtype in ("bfloat16", "int8", "int4")}
    assert sent["int8"] / sent["bfloat16"] == 18 / 32  # of these small heads of 16 numbers
    assert sent["int4"] / sent["bfloat16"] == 10 / 32
    usual = {name: form.slot_bytes(64) / FORMATS["bfloat16"].slot_bytes(64) for name, form in FORMATS.items()}
    assert usual["int8"] < 0.52
    assert usual["fp8"] == 0.5
    assert usual["int4"] < 0.274
