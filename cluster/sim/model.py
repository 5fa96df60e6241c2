"""A toy model whose next token is a digest of *what the blocks say* the sequence is.

As in a real model, what a position's slot holds depends on its token and on the slots before it that its layers see:
all, those of a window, or with layers of both kinds, all in one block group and those of a window in the other. So
reading an unfilled, reused or foreign block changes the answer and all that is cached after it, and what a window has
shown goes on to matter when it is out of sight. KV is one byte per slot, head and block group; freed blocks are
poisoned.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable
from collections.abc import Sequence as SequenceOf

from kvferry.runtime.ids import NO_BLOCK, BlockId, SequenceKey
from kvferry.runtime.kv.groups import KVGroups
from kvferry.runtime.kv.layout import KVLayout
from kvferry.runtime.request import Logprob, Request
from kvferry.runtime.sequence import Sequence
from kvferry.runtime.speculation.acceptance import Draft
from kvferry.runtime.step import Row, SampledToken, SampleInput

VOCAB = 240
POISON = 255
NUM_HEADS = 2
BLOCK_SIZE = 4
BLOCK_BYTES = NUM_HEADS * BLOCK_SIZE
ROOT = b"simulated-root16"
_POISONED = bytes([POISON]) * BLOCK_SIZE


class ForeignRead(AssertionError):
    """A row read a slot that nobody has filled, or its heads disagree about what it holds."""


def layout(tp_size: int) -> KVLayout:
    return KVLayout(
        num_layers=1, num_kv_heads=NUM_HEADS, head_dim=1, block_size=BLOCK_SIZE, dtype="float32", tp_size=tp_size
    )


class Context:
    """What the token after some others sees of their slots. `windows`: of each block group."""

    def __init__(self, windows: list[int | None], seen: list[bytes]) -> None:
        self._windows = windows
        self._all = 0
        """Checksum of what groups without a window hold."""
        self._tails = [b"" for _ in windows]
        for group, values in enumerate(seen):
            self._see(group, values)

    def _see(self, group: int, values: bytes) -> None:
        if (window := self._windows[group]) is None:
            self._all = zlib.crc32(values, self._all)
        else:
            tail = self._tails[group] + values
            self._tails[group] = tail[max(0, len(tail) - window + 1) :]

    def checksum(self) -> int:
        value = self._all
        for window, tail in zip(self._windows, self._tails, strict=True):
            if window is not None:
                value = zlib.crc32(tail, value)
        return value

    def push(self, token: int) -> list[int]:
        """The token's slot in each group."""
        before = self.checksum()
        values = [_slot(before + group * 977, token) for group in range(len(self._windows))]
        for group, value in enumerate(values):
            self._see(group, bytes([value]))
        return values


def _slot(before: int, token: int) -> int:
    """What a token's slot holds; `before`: checksum of the slots that it sees."""
    return ((before ^ token * 40503) * 2654435761 >> 16) % POISON


def _draw(context: int, seed: int, index: int, position: int, banned: Collection[int]) -> int:
    """The next token after slots with checksum `context`."""
    token = ((context + (seed * 31 + index) * 1009 + position * 7919) * 2654435761 >> 16) % VOCAB
    while token in banned:
        token = (token + 1) % VOCAB
    return token


def logprob_of(token: int, position: int) -> float:
    return -((token * 7 + position) % 64) / 16


def expected(request: Request, index: int, windows: list[int | None]) -> list[int]:
    """The output of an undisturbed run; the same in every process."""
    sampling = request.sampling
    stops = {*([] if sampling.ignore_eos else request.eos_token_ids), *sampling.stop_token_ids}
    context = Context(windows, [])
    for token in request.prompt_token_ids:
        context.push(token)
    output: list[int] = []
    while len(output) < sampling.max_tokens and not (output and output[-1] in stops):
        banned = stops if len(output) < sampling.min_tokens else ()
        output.append(_draw(context.checksum(), sampling.seed or 0, index, len(output), banned))
        context.push(output[-1])
    return output


class Guesses:
    """Implements `speculator.Proposer`: what the model will draw, and now and then something else."""

    def __init__(self, kv: KVGroups) -> None:
        self._windows = [group.window for group in kv.groups]

    def propose(self, sequences: SequenceOf[Sequence], counts: SequenceOf[int]) -> list[Draft]:
        return [Draft(self._guess(sequence, count)) for sequence, count in zip(sequences, counts, strict=True)]

    def _guess(self, sequence: Sequence, count: int) -> list[int]:
        context, sampling = Context(self._windows, []), sequence.request.sampling
        for token in sequence.tokens:
            context.push(token)
        draft: list[int] = []
        for position in range(sequence.num_output, sequence.num_output + count):
            value = context.checksum()
            token = _draw(value, sampling.seed or 0, sequence.key.index, position, sequence.banned(position))
            draft.append((token + (value % 4 == 0)) % VOCAB)
            context.push(draft[-1])
        return draft

    def forget(self, key: SequenceKey) -> None:
        pass


class Blocks:
    """All ranks' KV storage of one group of workers: `[head][block * BLOCK_SIZE + slot]`, of all block groups."""

    def __init__(self, kv: KVGroups) -> None:
        self._groups = kv.groups
        self._windows = [group.window for group in kv.groups]
        num_blocks = sum(group.num_blocks for group in kv.groups)
        self._heads = [bytearray([POISON]) * (num_blocks * BLOCK_SIZE) for _ in range(NUM_HEADS)]

    def compute(self, rows: list[Row], samples: list[SampleInput]) -> list[SampledToken]:
        """One forward pass. Raises `ForeignRead`."""
        for row in rows:
            context = self._context(row, row.start)
            for position, token in enumerate(row.token_ids, row.start):
                for value, table in zip(context.push(token), _tables(row), strict=False):
                    slot = table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
                    for head in self._heads:
                        head[slot] = value
        inputs = iter(samples)
        return [
            self._sample(row, length, next(inputs))
            for row in rows
            for length in range(len(row.token_ids) - row.num_samples + 1, len(row.token_ids) + 1)
        ]

    def _context(self, row: Row, length: int) -> Context:
        """What the token at position `length` sees."""
        seen = []
        for group, table in zip(self._groups, _tables(row), strict=False):
            first = group.first_needed(length)
            seen.append(self._contents(table[first:], length - first * BLOCK_SIZE))
        return Context(self._windows, seen)

    def _contents(self, block_ids: SequenceOf[BlockId], length: int) -> bytes:
        block_ids = block_ids[: -(-length // BLOCK_SIZE)]
        if NO_BLOCK in block_ids:
            raise ForeignRead(f"blocks {block_ids}: one was let go that is still seen")
        first, *others = (
            b"".join([head[b * BLOCK_SIZE : (b + 1) * BLOCK_SIZE] for b in block_ids])[:length] for head in self._heads
        )
        if any(other != first for other in others):
            raise ForeignRead(f"heads disagree about blocks {block_ids}: {first.hex()}, {others[0].hex()}")
        if POISON in first:
            raise ForeignRead(f"blocks {block_ids} hold unfilled slots: {first.hex()}")
        return first

    def _sample(self, row: Row, length: int, given: SampleInput) -> SampledToken:
        """After the first `length` tokens of the row."""
        params, position = given.params, given.position
        context = self._context(row, row.start + length)
        token = _draw(context.checksum(), params.seed or 0, given.key.index, position, given.banned_token_ids)
        return SampledToken(token, None if params.logprobs is None else Logprob(token, logprob_of(token, position)))

    def read(self, block_ids: list[BlockId], heads: range) -> list[list[bytes]]:
        """`[head][block]`, as a link sends it."""
        return [[bytes(self._heads[h][b * BLOCK_SIZE : (b + 1) * BLOCK_SIZE]) for b in block_ids] for h in heads]

    def write(self, block_ids: list[BlockId], heads: range, payload: list[list[bytes]]) -> None:
        for head, contents in zip(heads, payload, strict=True):
            for block_id, content in zip(block_ids, contents, strict=True):
                self._heads[head][block_id * BLOCK_SIZE : (block_id + 1) * BLOCK_SIZE] = content

    def poison(self, block_ids: Iterable[BlockId]) -> None:
        for block_id in block_ids:
            for head in self._heads:
                head[block_id * BLOCK_SIZE : (block_id + 1) * BLOCK_SIZE] = _POISONED


def _tables(row: Row) -> tuple[SequenceOf[BlockId], SequenceOf[BlockId]]:
    return row.block_ids, row.window_block_ids
