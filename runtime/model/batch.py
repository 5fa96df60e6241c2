"""A plan's rows as tensors, made once per step and used by every layer.

Tokens are put in order of attention: first the rows of one token ("decode"), longest context first and cut into groups
of similar length, then each longer row ("prefill") by itself, those with a cached prefix before those without.
`sample_index` leads back to the plan's order. Where the CPU kernels attend, they take all rows at once. Layers with a
window read only the blocks in it; what stands in a block table before may be `NO_BLOCK`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain

import numpy as np
import numpy.typing as npt
import torch

from kvferry.kernels.attention import PagedRows
from kvferry.kernels.cpu.attention import FORMATS, Contexts, Geometry
from kvferry.kernels.cpu.available import kernels_with
from kvferry.kernels.formats import SlotFormat
from kvferry.runtime.errors import InvariantBroken
from kvferry.runtime.ids import NO_BLOCK, BlockId
from kvferry.runtime.kv.storage import KVStorage, RankStorage
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
    first_key: int
    """Position of the first that is gathered."""
    spans: torch.Tensor
    gathered: torch.Tensor
    """Both as in `PagedRows`."""


@dataclass(frozen=True, slots=True)
class Parts:
    """The batch as layers of one window see it."""

    decode: list[DecodePart]
    prefixed: list[PrefixedPart]
    fresh: list[slice]
    """Tokens of prompts from their beginning: their keys and values are all just computed."""


@dataclass(frozen=True, slots=True)
class Batch:
    token_ids: torch.Tensor
    """int64 `[T]`."""
    positions: torch.Tensor
    """int64 `[T]`."""
    num_positions: int
    """More than any of them."""
    sample_index: torch.Tensor
    """int64: the tokens whose logits are wanted, in the order of the plan's rows."""
    contexts: Contexts | None
    """Where the CPU kernels attend. All below is for torch's operations."""
    format: SlotFormat
    gathers: Gathers


class _Table:
    """One row's place in the batch."""

    __slots__ = ("block_ids", "context", "count", "index", "row")

    def __init__(self, index: int, row: Row, block_size: int) -> None:
        self.index = index
        self.row = row
        self.count = len(row.token_ids)
        self.context = row.start + self.count
        num_blocks = -(-self.context // block_size)
        if not row.token_ids or len(row.block_ids) < num_blocks:
            raise InvariantBroken(
                f"row {index} of a plan: {len(row.token_ids)} tokens from position {row.start} "
                f"do not fit its {len(row.block_ids)} blocks of {block_size}"
            )
        self.block_ids = row.block_ids[:num_blocks]


def make_batches(rows: Sequence[Row], storage: RankStorage) -> list[Batch]:
    """The batch as the layers of each block group see it; the order of tokens is the same."""
    batches = [make_batch(rows, storage.groups[0])]
    for group, of_group in zip(storage.kv.groups[1:], storage.groups[1:], strict=True):
        batches.append(make_batch([_of_group(row, group.first_block) for row in rows], of_group))
    return batches


def _of_group(row: Row, first_block: BlockId) -> Row:
    table = [b if b == NO_BLOCK else BlockId(b - first_block) for b in row.window_block_ids]
    return Row(row.token_ids, row.start, table, row.num_samples)


def make_batch(rows: Sequence[Row], storage: KVStorage) -> Batch:
    """Raises `InvariantBroken` for a row without tokens or with too few blocks."""
    block_size, device = storage.layout.block_size, storage.blocks.device
    tables = [_Table(i, row, block_size) for i, row in enumerate(rows)]
    decode = sorted((t for t in tables if t.count == 1), key=lambda t: -len(t.block_ids))
    prefill = sorted((t for t in tables if t.count > 1), key=lambda t: t.row.start == 0)
    ordered = decode + prefill
    wanted: list[range] = [range(0)] * len(tables)
    for table, stop in zip(ordered, accumulate(t.count for t in ordered), strict=True):
        wanted[table.index] = range(stop - table.row.num_samples, stop)
    contexts = _contexts(ordered, storage)
    if contexts is None:
        positions = np.concatenate([np.arange(t.row.start, t.context) for t in ordered])
    else:
        positions = contexts.positions
    return Batch(
        token_ids=_tensor([t.row.token_ids for t in ordered], device),
        positions=torch.from_numpy(positions).to(device),
        num_positions=max(t.context for t in tables),
        sample_index=_tensor(wanted, device),
        contexts=contexts,
        format=storage.format,
        gathers=Gathers(decode, prefill, positions, storage),
    )


def _tensor(parts: Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:
    """All parts one after the other, int64."""
    return torch.from_numpy(np.fromiter(chain.from_iterable(parts), np.int64)).to(device)


def _contexts(ordered: list[_Table], storage: KVStorage) -> Contexts | None:
    """None where the kernels do not know the device, the numbers or the format; latents are torch's too."""
    layout, stored = storage.layout, storage.format
    lib = kernels_with(stored.dtype, storage.blocks.device, layout.head_dim)
    if lib is None or stored.name not in FORMATS or layout.planes != 2:
        return None
    geometry = Geometry(
        num_kv_heads=layout.rank_heads,
        head_dim=layout.head_dim,
        block_size=layout.block_size,
        slot_bytes=layout.slot_bytes,
        block_bytes=layout.block_bytes,
        format=stored.name,
    )
    tables, counts, starts = zip(*((t.block_ids, t.count, t.row.start) for t in ordered), strict=True)
    return Contexts(lib, tables, counts, starts, geometry, storage.workspace)


def _groups(num_blocks: Sequence[int]) -> list[int]:
    """Sizes of consecutive groups of rows in which padding stays small beside the work itself."""
    sizes: list[int] = []
    longest = work = 0
    for blocks in num_blocks:
        padded = max(longest, blocks) * (sizes[-1] + 1) if sizes else 0
        if sizes and padded - work - blocks <= max(_MIN_WASTE, (work + blocks) // 4):
            longest = max(longest, blocks)
            work += blocks
            sizes[-1] += 1
        else:
            longest = work = blocks
            sizes.append(1)
    return sizes


class Gathers:
    """Finds the rows' contexts. What a batch gathers goes into the same memory, one part after the other."""

    def __init__(
        self, decode: list[_Table], prefill: list[_Table], positions: npt.NDArray[np.int64], storage: KVStorage
    ) -> None:
        self._decode, self._prefill, self._positions = decode, prefill, positions
        self._storage = storage
        self._memory: torch.Tensor | None = None
        self._parts: dict[int | None, Parts] = {}

    @cached_property
    def write_index(self) -> torch.Tensor:
        """int64 `[T·2N]`: slots of the new keys and values."""
        size = self._storage.layout.block_size
        ids = [np.asarray(t.block_ids)[np.arange(t.row.start, t.context) // size] for t in self._decode + self._prefill]
        index = self._storage.slot_index(np.concatenate(ids), self._positions % size)
        return torch.from_numpy(index.reshape(-1)).to(self._storage.blocks.device)

    def parts(self, window: int | None) -> Parts:
        """Made at the first call; the same for all layers with this window."""
        if window not in self._parts:
            self._parts[window] = self._find(window)
        return self._parts[window]

    def _find(self, window: int | None) -> Parts:
        first_seen = [0 if window is None else max(0, t.row.start - window + 1) for t in self._decode]
        skipped = [seen // self._storage.layout.block_size for seen in first_seen]
        decode, done = [], 0
        for size in _groups([len(t.block_ids) - skip for t, skip in zip(self._decode, skipped, strict=True)]):
            rows = slice(done, done + size)
            decode.append(DecodePart(rows, self._rows(self._decode[rows], skipped[rows], first_seen[rows])))
            done += size
        prefixed, fresh = [], []
        for table in self._prefill:
            tokens = slice(done, done + len(table.row.token_ids))
            done = tokens.stop
            if table.row.start:
                prefixed.append(self._prefixed(table, tokens, window))
            else:
                fresh.append(tokens)
        return Parts(decode, prefixed, fresh)

    def _rows(self, tables: list[_Table], skipped: list[int], first_seen: list[int]) -> PagedRows:
        """Without the first `skipped` blocks of each row; what it sees begins at `first_seen`."""
        layout, device = self._storage.layout, self._storage.blocks.device
        heads, num_rows = layout.rank_heads, len(tables)
        seen = [t.block_ids[skip:] for t, skip in zip(tables, skipped, strict=True)]
        longest = max(seen, key=len)
        # Padding needs a span that is filled to its end: when there is padding, the longest row has more than one
        # block and so a full first one.
        block_ids = np.full((num_rows, len(longest)), longest[0])
        for r, ids in enumerate(seen):
            block_ids[r, : len(ids)] = ids
        skips = np.array(skipped)[:, None] * layout.block_size
        contexts = np.array([[t.context] for t in tables]) - skips
        slot = np.arange(len(longest) * layout.block_size)
        behind = slot >= contexts
        row, unfilled = np.nonzero(behind & (slot < -(-contexts // layout.block_size) * layout.block_size))
        keys_values, head = np.arange(layout.planes)[:, None, None], np.arange(heads)[:, None]
        unfilled = ((keys_values * num_rows + row) * heads + head) * len(slot) + unfilled
        mask = torch.zeros((num_rows * heads, 1, len(slot)), dtype=self._storage.format.dtype)
        hidden = behind | (slot < np.array(first_seen)[:, None] - skips)
        mask.masked_fill_(torch.from_numpy(np.repeat(hidden, heads, axis=0))[:, None], float("-inf"))
        spans, gathered = self._context(block_ids)
        return PagedRows(spans, gathered, torch.from_numpy(unfilled.reshape(-1)).to(device), mask.to(device))

    def _prefixed(self, table: _Table, tokens: slice, window: int | None) -> PrefixedPart:
        first_seen = 0 if window is None else max(0, table.row.start - window + 1)
        skip = first_seen // self._storage.layout.block_size
        first_key = skip * self._storage.layout.block_size
        return PrefixedPart(tokens, table.row.start, first_key, *self._context(np.array([table.block_ids[skip:]])))

    def _context(self, block_ids: npt.NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
        """Spans of the blocks `[R, S/B]`, and the memory to gather them into."""
        planes, heads = self._storage.layout.planes, self._storage.layout.rank_heads
        spans = self._storage.span_index(block_ids).reshape(*block_ids.shape, planes, heads).transpose(2, 0, 3, 1)
        if self._memory is None or spans.size > len(self._memory):
            self._memory = self._storage.blocks.new_empty((spans.size, self._storage.spans[0].shape[1]))
        index = torch.from_numpy(np.ascontiguousarray(spans).reshape(-1)).to(self._memory.device)
        return index, self._memory[: spans.size]
