"""A plan's rows as tensors, made once per step and used by every layer.

Tokens are put in order of attention: first the rows of one token ("decode"), longest context first and cut into groups
of similar length, then each longer row ("prefill") by itself, those with a cached prefix before those without.
`sample_index` leads back to the plan's order. Where the CPU kernels attend, they take all rows at once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvferry.kernels.attention import PagedRows
from kvferry.kernels.cpu.attention import Contexts
from kvferry.kernels.cpu.available import kernels_for
from kvferry.runtime.errors import InvariantBroken
from kvferry.runtime.kv.storage import KVStorage
from kvferry.runtime.step import Row

_MIN_WASTE = 24
"""Padding blocks that cost less than the extra operations of one more group."""


@dataclass(frozen=True, slots=True)
class DecodePart:
    """Rows of one token each, attended to in one call."""

    tokens: slice
    rows: PagedRows


@dataclass(frozen=True, slots=True)
class PrefixedPart:
    """One longer row whose first token is not its sequence's first."""

    tokens: slice
    start: int
    """Position of the first token."""
    spans: torch.Tensor
    gathered: torch.Tensor
    """Both as in `PagedRows`."""


@dataclass(frozen=True, slots=True)
class Batch:
    token_ids: torch.Tensor
    """int64 `[T]`."""
    positions: torch.Tensor
    """int64 `[T]`."""
    sample_index: torch.Tensor
    """int64: the tokens whose logits are wanted, in the order of the plan's rows."""
    contexts: Contexts | None
    """Where the CPU kernels attend. All below is for torch's operations and absent then."""
    write_index: torch.Tensor
    """int64 `[T·2N]`: slots of the new keys and values."""
    decode: list[DecodePart]
    prefixed: list[PrefixedPart]
    fresh: list[slice]
    """Tokens of prompts from their beginning: their keys and values are all just computed."""


class _Table:
    """One row's place in the batch."""

    __slots__ = ("block_ids", "context", "index", "row")

    def __init__(self, index: int, row: Row, block_size: int) -> None:
        self.index = index
        self.row = row
        self.context = row.start + len(row.token_ids)
        num_blocks = -(-self.context // block_size)
        if not row.token_ids or len(row.block_ids) < num_blocks:
            raise InvariantBroken(
                f"row {index} of a plan: {len(row.token_ids)} tokens from position {row.start} "
                f"do not fit its {len(row.block_ids)} blocks of {block_size}"
            )
        self.block_ids = np.asarray(row.block_ids[:num_blocks], dtype=np.int64)


def make_batch(rows: Sequence[Row], storage: KVStorage) -> Batch:
    """Raises `InvariantBroken` for a row without tokens or with too few blocks."""
    block_size, device = storage.layout.block_size, storage.blocks.device
    tables = [_Table(i, row, block_size) for i, row in enumerate(rows)]
    decode = sorted((t for t in tables if len(t.row.token_ids) == 1), key=lambda t: -len(t.block_ids))
    prefill = sorted((t for t in tables if len(t.row.token_ids) > 1), key=lambda t: t.row.start == 0)
    ordered = decode + prefill
    positions = np.concatenate([np.arange(t.row.start, t.context) for t in ordered])
    blocks = np.concatenate([t.block_ids[np.arange(t.row.start, t.context) // block_size] for t in ordered])
    token_ids = np.concatenate([np.asarray(t.row.token_ids, dtype=np.int64) for t in ordered])
    lengths = np.array([len(t.row.token_ids) for t in ordered])
    stops = np.cumsum(lengths)
    stop_of = {t.index: int(stop) for t, stop in zip(ordered, stops, strict=True)}
    wanted = [range(stop_of[i] - row.num_samples, stop_of[i]) for i, row in enumerate(rows)]

    write_index = storage.slot_index(blocks, positions % block_size)
    contexts = None
    parts: tuple[list[DecodePart], list[PrefixedPart], list[slice]] = ([], [], [])
    lib = kernels_for(storage.blocks, storage.layout.head_dim)
    if lib is not None:
        contexts = _contexts(lib, ordered, lengths, write_index, storage)
    else:
        parts = _parts(decode, prefill, (stops - lengths)[len(decode) :].tolist(), storage)
    return Batch(
        token_ids=torch.from_numpy(token_ids).to(device),
        positions=torch.from_numpy(positions).to(device),
        sample_index=torch.tensor([token for tokens in wanted for token in tokens], dtype=torch.int64, device=device),
        contexts=contexts,
        write_index=torch.from_numpy(write_index.reshape(-1)).to(device),
        decode=parts[0],
        prefixed=parts[1],
        fresh=parts[2],
    )


def _contexts(
    lib: ctypes.CDLL,
    ordered: list[_Table],
    lengths: npt.NDArray[np.int64],
    write_index: npt.NDArray[np.int64],
    storage: KVStorage,
) -> Contexts:
    layout = storage.layout
    start = np.array([t.row.start for t in ordered])
    slots = write_index[:, 0] * layout.head_dim
    shape = storage.blocks[0].numel(), layout.rank_heads, layout.block_size, layout.head_dim
    return Contexts(lib, [t.block_ids for t in ordered], lengths, start, slots, shape)


def _parts(
    decode: list[_Table], prefill: list[_Table], prefill_starts: list[int], storage: KVStorage
) -> tuple[list[DecodePart], list[PrefixedPart], list[slice]]:
    parts = _Parts(storage)
    decode_parts, done = [], 0
    for size in _groups([len(t.block_ids) for t in decode]):
        decode_parts.append(parts.decode(decode[done : done + size], done))
        done += size
    spans = list(zip(prefill, prefill_starts, strict=True))
    prefixed = [parts.prefixed(t, start) for t, start in spans if t.row.start > 0]
    fresh = [slice(start, start + len(t.row.token_ids)) for t, start in spans if t.row.start == 0]
    return decode_parts, prefixed, fresh


def _groups(num_blocks: Sequence[int]) -> list[int]:
    """Sizes of consecutive groups of rows (longest first) in which padding stays small beside the work itself."""
    sizes: list[int] = []
    longest = work = waste = 0
    for blocks in num_blocks:
        if sizes and waste + longest - blocks <= max(_MIN_WASTE, (work + blocks) // 4):
            waste += longest - blocks
            work += blocks
            sizes[-1] += 1
        else:
            longest, work, waste = blocks, blocks, 0
            sizes.append(1)
    return sizes


class _Parts:
    """Finds the rows' contexts. What a batch gathers goes into the same memory, one part after the other."""

    def __init__(self, storage: KVStorage) -> None:
        self._storage = storage
        self._memory = storage.blocks.new_empty((0, storage.spans[0].shape[1]))

    def decode(self, tables: list[_Table], first: int) -> DecodePart:
        layout, device = self._storage.layout, self._storage.blocks.device
        heads, num_rows, longest = layout.rank_heads, len(tables), len(tables[0].block_ids)
        # Padding needs a span that is filled to its end: when there is padding, the longest row has more than one
        # block and so a full first one.
        block_ids = np.full((num_rows, longest), tables[0].block_ids[0])
        for r, table in enumerate(tables):
            block_ids[r, : len(table.block_ids)] = table.block_ids
        contexts = np.array([[t.context] for t in tables])
        slot = np.arange(longest * layout.block_size)
        behind = slot >= contexts
        row, unfilled = np.nonzero(behind & (slot < -(-contexts // layout.block_size) * layout.block_size))
        keys_values, head = np.arange(2)[:, None, None], np.arange(heads)[:, None]
        unfilled = ((keys_values * num_rows + row) * heads + head) * len(slot) + unfilled
        mask = torch.zeros((num_rows * heads, 1, len(slot)), dtype=self._storage.blocks.dtype)
        mask.masked_fill_(torch.from_numpy(np.repeat(behind, heads, axis=0))[:, None], float("-inf"))
        spans, gathered = self._context(block_ids)
        rows = PagedRows(spans, gathered, torch.from_numpy(unfilled.reshape(-1)).to(device), mask.to(device))
        return DecodePart(slice(first, first + num_rows), rows)

    def prefixed(self, table: _Table, first: int) -> PrefixedPart:
        tokens = slice(first, first + len(table.row.token_ids))
        return PrefixedPart(tokens, table.row.start, *self._context(table.block_ids[None]))

    def _context(self, block_ids: npt.NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
        """Spans of the blocks `[R, S/B]`, and the memory to gather them into."""
        heads = self._storage.layout.rank_heads
        spans = self._storage.span_index(block_ids).reshape(*block_ids.shape, 2, heads).transpose(2, 0, 3, 1)
        if spans.size > len(self._memory):
            self._memory = self._memory.new_empty((spans.size, self._memory.shape[1]))
        index = torch.from_numpy(np.ascontiguousarray(spans).reshape(-1)).to(self._memory.device)
        return index, self._memory[: spans.size]
