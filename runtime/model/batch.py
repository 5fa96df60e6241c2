"""A plan's rows as tensors, made once per step and used by every layer.

Tokens are put in order of attention: first the rows of one token ("decode"), longest context first and cut into groups
of similar length, then each longer row ("prefill") by itself, those with a cached prefix before those without.
`sample_index` leads back to the plan's order. Where the CPU kernels attend, they take all rows at once. Layers with a
window read only the blocks in it; what stands in a block table before may be `NO_BLOCK`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from math import gcd

import numpy as np
import numpy.typing as npt
import torch

from kvferry.kernels.attention import PagedRows
from kvferry.kernels.cpu.attention import CHUNK, FORMATS, Contexts, Geometry
from kvferry.kernels.cpu.available import kernels_with
from kvferry.kernels.formats import SlotFormat
from kvferry.runtime.errors import InvariantBroken
from kvferry.runtime.ids import NO_BLOCK
from kvferry.runtime.kv.storage import KVStorage, RankStorage
from kvferry.runtime.step import Row, Table

Ints = npt.NDArray[np.int64]
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
    """More than any of them, in this step and in those that go on in the same blocks."""
    sample_index: torch.Tensor
    """int64: the tokens whose logits are wanted, in the order of the plan's rows."""
    contexts: Contexts | None
    """Where the CPU kernels attend. All below is for torch's operations."""
    format: SlotFormat
    gathers: Gathers


class _Rows:
    """A plan's rows in the order of attention, as arrays. All are int64 `[R]` but where said."""

    def __init__(self, rows: Sequence[Row], block_size: int) -> None:
        lengths = np.array([len(row.token_ids) for row in rows])
        start = np.array([row.start for row in rows])
        num_blocks = -(-(start + lengths) // block_size)
        decodes = lengths.max() == 1
        order = (-num_blocks if decodes else _turn(lengths, start, num_blocks)).argsort(kind="stable")
        self.block_size = block_size
        self.order = order.tolist()
        """Places in the plan."""
        self.rows = [rows[i] for i in self.order]
        self.lengths, self.start, self.num_blocks = lengths[order], start[order], num_blocks[order]
        self.stops = self.lengths.cumsum()
        """Of each row's tokens in the batch."""
        self.are_steps = bool(decodes) and all(row.num_samples == 1 for row in rows)
        """Each is one token that another follows."""
        self.joined: list[bytes] = []
        """What `tables` has put together, one after the other."""
        self.row_of = slice(None) if decodes else np.repeat(np.arange(len(rows)), self.lengths)
        """Of each token, `[T]`; as an index."""
        self.sample_index = self._sample_index(rows, order)
        """Of the wanted tokens, in the plan's order."""

    @cached_property
    def positions(self) -> Ints:
        """`[T]`."""
        found: Ints = np.arange(self.stops[-1]) + (self.start - self.stops + self.lengths)[self.row_of]
        return found

    def _sample_index(self, rows: Sequence[Row], order: Ints) -> Ints:
        counts = np.array([int(row.num_samples) for row in rows])
        stops = np.empty_like(counts)
        stops[order] = self.stops
        if counts.max() <= 1:
            return stops[counts > 0] - 1
        return np.repeat(stops - counts.cumsum(), counts) + np.arange(counts.sum())

    def token_ids(self) -> Ints:
        """`[T]`."""
        return np.array(list(chain.from_iterable([row.token_ids for row in self.rows])))

    def tables(self, tables: Sequence[Table], first_block: int) -> Ints:
        """The rows' blocks end to end, counted from `first_block`. Raises `InvariantBroken` if there are too few."""
        counts = self.num_blocks.tolist()
        for row, table, count in zip(self.rows, tables, counts, strict=True):
            if not row.token_ids or len(table) < count:
                raise InvariantBroken(
                    f"a row of a plan: {len(row.token_ids)} tokens from position {row.start} "
                    f"do not fit its {len(table)} blocks of {self.block_size}"
                )
        self.joined.append(_joined(tables, counts))
        whole = np.frombuffer(self.joined[-1], dtype=np.int64)
        return np.where(whole == NO_BLOCK, NO_BLOCK, whole - first_block) if first_block else whole


def _joined(tables: Iterable[Table], counts: Iterable[int]) -> bytes:
    """The first blocks of each, so many."""
    parts: list[array[int]] = []
    for table, count in zip(tables, counts, strict=True):
        used = table if len(table) == count else table[:count]
        parts.append(used if isinstance(used, array) else array("q", used))
    return b"".join(parts)


def _turn(lengths: Ints, start: Ints, num_blocks: Ints) -> Ints:
    """Rows of one token, then those with a cached prefix, then others."""
    return np.where(lengths == 1, -num_blocks, np.where(start > 0, 1, 2))


class Batches:
    """Of one step after the other. A step in which every row is one token further in the same blocks keeps its arrays.

    Then a batch of the step before must not be used any more.
    """

    def __init__(self, storage: RankStorage) -> None:
        self._storage = storage
        self._last: _Steady | None = None

    def make(self, rows: Sequence[Row]) -> list[Batch]:
        """As `make_batches`."""
        last = self._last
        if last is not None and last.go_on(rows):
            return last.batches
        arranged = _Rows(rows, self._storage.kv.block_size)
        batches = _batches(arranged, self._storage)
        contexts = [batch.contexts for batch in batches if batch.contexts is not None]
        steady = arranged.are_steps and len(contexts) == len(batches)
        self._last = _Steady(rows, arranged, batches, contexts) if steady else None
        return batches


class _Steady:
    """Rows of one token each, and their batches."""

    def __init__(
        self, rows: Sequence[Row], arranged: _Rows, batches: list[Batch], contexts: Sequence[Contexts]
    ) -> None:
        self.batches = batches
        self._contexts = contexts
        self._next = [row.start + 1 for row in rows]
        self._unit = gcd(arranged.block_size, CHUNK)
        """Within so many positions neither blocks nor what attention makes of them change."""
        self._order, self._counts = arranged.order, arranged.num_blocks.tolist()
        self._tables = arranged.joined
        self._token_ids = batches[0].token_ids.numpy().data

    def _tables_of(self, rows: Sequence[Row]) -> list[bytes]:
        """By block group; `rows` in the order of attention."""
        tables = [_joined([row.block_ids for row in rows], self._counts)]
        if len(self.batches) > 1:
            tables.append(_joined([row.window_block_ids for row in rows], self._counts))
        return tables

    def go_on(self, rows: Sequence[Row]) -> bool:
        """Whether these rows follow; then the batches are theirs."""
        if len(rows) != len(self._next):
            return False
        unit = self._unit
        for row, start in zip(rows, self._next, strict=True):
            if row.start != start or not start % unit or len(row.token_ids) != 1 or row.num_samples != 1:
                return False
        ordered = [rows[i] for i in self._order]
        if self._tables_of(ordered) != self._tables:
            return False
        for i, row in enumerate(ordered):
            self._token_ids[i] = row.token_ids[0]
        self._next = [start + 1 for start in self._next]
        for contexts in self._contexts:
            contexts.go_on()
        return True


def make_batches(rows: Sequence[Row], storage: RankStorage) -> list[Batch]:
    """The batch as the layers of each block group see it; the order of tokens is the same.

    Raises `InvariantBroken` for a row without tokens or with too few blocks.
    """
    return _batches(_Rows(rows, storage.kv.block_size), storage)


def _batches(arranged: _Rows, storage: RankStorage) -> list[Batch]:
    token_ids = arranged.token_ids()
    batches = [_batch(arranged, token_ids, [row.block_ids for row in arranged.rows], storage.groups[0])]
    for group, of_group in zip(storage.kv.groups[1:], storage.groups[1:], strict=True):
        tables = [row.window_block_ids for row in arranged.rows]
        batches.append(_batch(arranged, token_ids, tables, of_group, group.first_block))
    return batches


def make_batch(rows: Sequence[Row], storage: KVStorage) -> Batch:
    """As `make_batches`, of one block group."""
    arranged = _Rows(rows, storage.layout.block_size)
    return _batch(arranged, arranged.token_ids(), [row.block_ids for row in arranged.rows], storage)


def _batch(rows: _Rows, token_ids: Ints, tables: Sequence[Table], storage: KVStorage, first_block: int = 0) -> Batch:
    device = storage.blocks.device
    blocks = rows.tables(tables, first_block)
    table_at = rows.num_blocks.cumsum() - rows.num_blocks
    contexts = _contexts(rows, blocks, table_at, storage)
    positions = rows.positions if contexts is None else contexts.positions
    return Batch(
        token_ids=torch.from_numpy(token_ids).to(device),
        positions=torch.from_numpy(positions).to(device),
        num_positions=int(rows.num_blocks.max()) * rows.block_size,
        sample_index=torch.from_numpy(rows.sample_index).to(device),
        contexts=contexts,
        format=storage.format,
        gathers=Gathers(rows, blocks, table_at, storage),
    )


def _contexts(rows: _Rows, blocks: Ints, table_at: Ints, storage: KVStorage) -> Contexts | None:
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
    return Contexts(lib, blocks, table_at, rows.lengths, rows.start, geometry, storage.workspace)


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


class _Context:
    """Of one row."""

    __slots__ = ("block_ids", "length", "start", "tokens")

    def __init__(self, block_ids: Ints, start: int, tokens: slice) -> None:
        self.block_ids = block_ids
        self.start = start
        self.tokens = tokens
        self.length = start + tokens.stop - tokens.start


class Gathers:
    """Finds the rows' contexts. What a batch gathers goes into the same memory, one part after the other."""

    def __init__(self, rows: _Rows, blocks: Ints, table_at: Ints, storage: KVStorage) -> None:
        self._rows, self._blocks, self._table_at = rows, blocks, table_at
        self._storage = storage
        self._memory: torch.Tensor | None = None
        self._parts: dict[int | None, Parts] = {}

    @cached_property
    def write_index(self) -> torch.Tensor:
        """int64 `[T·2N]`: slots of the new keys and values."""
        rows, size = self._rows, self._rows.block_size
        blocks = self._blocks[self._table_at[rows.row_of] + rows.positions // size]
        index = self._storage.slot_index(blocks, rows.positions % size)
        return torch.from_numpy(index.reshape(-1)).to(self._storage.blocks.device)

    def _contexts(self) -> list[_Context]:
        rows = self._rows
        return [
            _Context(block_ids, start, slice(stop - length, stop))
            for block_ids, start, length, stop in zip(
                np.split(self._blocks, self._table_at[1:]),
                rows.start.tolist(),
                rows.lengths.tolist(),
                rows.stops.tolist(),
                strict=True,
            )
        ]

    def parts(self, window: int | None) -> Parts:
        """Made at the first call; the same for all layers with this window."""
        if window not in self._parts:
            self._parts[window] = self._find(window)
        return self._parts[window]

    def _find(self, window: int | None) -> Parts:
        contexts = self._contexts()
        num_decodes = int((self._rows.lengths == 1).sum())
        singles = contexts[:num_decodes]
        first_seen = [0 if window is None else max(0, c.start - window + 1) for c in singles]
        skipped = [seen // self._storage.layout.block_size for seen in first_seen]
        decode, done = [], 0
        for size in _groups([len(c.block_ids) - skip for c, skip in zip(singles, skipped, strict=True)]):
            rows = slice(done, done + size)
            decode.append(DecodePart(rows, self._paged(singles[rows], skipped[rows], first_seen[rows])))
            done += size
        longer = contexts[num_decodes:]
        prefixed = [self._prefixed(context, window) for context in longer if context.start]
        return Parts(decode, prefixed, [context.tokens for context in longer if not context.start])

    def _paged(self, contexts: list[_Context], skipped: list[int], first_seen: list[int]) -> PagedRows:
        """Without the first `skipped` blocks of each row; what it sees begins at `first_seen`."""
        layout, device = self._storage.layout, self._storage.blocks.device
        heads, num_rows = layout.rank_heads, len(contexts)
        seen = [c.block_ids[skip:] for c, skip in zip(contexts, skipped, strict=True)]
        longest = max(seen, key=len)
        # Padding needs a span that is filled to its end: when there is padding, the longest row has more than one
        # block and so a full first one.
        block_ids = np.full((num_rows, len(longest)), longest[0])
        for r, ids in enumerate(seen):
            block_ids[r, : len(ids)] = ids
        skips = np.array(skipped)[:, None] * layout.block_size
        lengths = np.array([[c.length] for c in contexts]) - skips
        slot = np.arange(len(longest) * layout.block_size)
        behind = slot >= lengths
        row, unfilled = np.nonzero(behind & (slot < -(-lengths // layout.block_size) * layout.block_size))
        keys_values, head = np.arange(layout.planes)[:, None, None], np.arange(heads)[:, None]
        unfilled = ((keys_values * num_rows + row) * heads + head) * len(slot) + unfilled
        mask = torch.zeros((num_rows * heads, 1, len(slot)), dtype=self._storage.format.dtype)
        hidden = behind | (slot < np.array(first_seen)[:, None] - skips)
        mask.masked_fill_(torch.from_numpy(np.repeat(hidden, heads, axis=0))[:, None], float("-inf"))
        spans, gathered = self._context(block_ids)
        return PagedRows(spans, gathered, torch.from_numpy(unfilled.reshape(-1)).to(device), mask.to(device))

    def _prefixed(self, context: _Context, window: int | None) -> PrefixedPart:
        first_seen = 0 if window is None else max(0, context.start - window + 1)
        skip = first_seen // self._storage.layout.block_size
        first_key = skip * self._storage.layout.block_size
        return PrefixedPart(context.tokens, context.start, first_key, *self._context(context.block_ids[None, skip:]))

    def _context(self, block_ids: npt.NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
        """Spans of the blocks `[R, S/B]`, and the memory to gather them into."""
        planes, heads = self._storage.layout.planes, self._storage.layout.rank_heads
        spans = self._storage.span_index(block_ids).reshape(*block_ids.shape, planes, heads).transpose(2, 0, 3, 1)
        if self._memory is None or spans.size > len(self._memory):
            self._memory = self._storage.blocks.new_empty((spans.size, self._storage.spans[0].shape[1]))
        index = torch.from_numpy(np.ascontiguousarray(spans).reshape(-1)).to(self._memory.device)
        return index, self._memory[: spans.size]
