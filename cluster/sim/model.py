"""A toy model whose next token is a digest of *what the blocks say* the sequence is.

As in a real model, what a position's slot holds depends on its token and on all slots before it. So reading an
unfilled, reused or foreign block changes the answer and all that is cached after it. KV is one byte per slot and head;
freed blocks are poisoned.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable
from collections.abc import Sequence as SequenceOf

from kvferry.runtime.ids import BlockId, SequenceKey
from kvferry.runtime.kv.layout import KVLayout
from kvferry.runtime.request import Logprob, Request
from kvferry.runtime.sequence import Sequence
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


def _slot(before: int, token: int) -> int:
    """What a token's slot holds; `before`: checksum of all slots before it."""
    return ((before ^ token * 40503) * 2654435761 >> 16) % POISON


def _draw(context: int, seed: int, index: int, position: int, banned: Collection[int]) -> int:
    """The next token after slots with checksum `context`."""
    token = ((context + (seed * 31 + index) * 1009 + position * 7919) * 2654435761 >> 16) % VOCAB
    while token in banned:
        token = (token + 1) % VOCAB
    return token


def logprob_of(token: int, position: int) -> float:
    return -((token * 7 + position) % 64) / 16


def expected(request: Request, index: int) -> list[int]:
    """The output of an undisturbed run; the same in every process."""
    sampling = request.sampling
    stops = {*([] if sampling.ignore_eos else request.eos_token_ids), *sampling.stop_token_ids}
    context = 0
    for token in request.prompt_token_ids:
        context = zlib.crc32(bytes([_slot(context, token)]), context)
    output: list[int] = []
    while len(output) < sampling.max_tokens and not (output and output[-1] in stops):
        banned = stops if len(output) < sampling.min_tokens else ()
        output.append(_draw(context, sampling.seed or 0, index, len(output), banned))
        context = zlib.crc32(bytes([_slot(context, output[-1])]), context)
    return output


class Guesses:
    """Implements `speculator.Proposer`: what the model will draw, and now and then something else."""

    def propose(self, sequences: SequenceOf[Sequence], counts: SequenceOf[int]) -> list[list[int]]:
        return [self._guess(sequence, count) for sequence, count in zip(sequences, counts, strict=True)]

    def _guess(self, sequence: Sequence, count: int) -> list[int]:
        context, sampling = 0, sequence.request.sampling
        for token in sequence.tokens:
            context = zlib.crc32(bytes([_slot(context, token)]), context)
        draft: list[int] = []
        for position in range(sequence.num_output, sequence.num_output + count):
            token = _draw(context, sampling.seed or 0, sequence.key.index, position, sequence.banned(position))
            draft.append((token + (context % 4 == 0)) % VOCAB)
            context = zlib.crc32(bytes([_slot(context, draft[-1])]), context)
        return draft

    def forget(self, key: SequenceKey) -> None:
        pass


class Blocks:
    """All ranks' KV storage of one group: `[head][block * BLOCK_SIZE + slot]`."""

    def __init__(self, num_blocks: int) -> None:
        self._heads = [bytearray([POISON]) * (num_blocks * BLOCK_SIZE) for _ in range(NUM_HEADS)]

    def compute(self, rows: list[Row], samples: list[SampleInput]) -> list[SampledToken]:
        """One forward pass. Raises `ForeignRead`."""
        for row in rows:
            context = zlib.crc32(self._context(row.block_ids, row.start))
            for position, token in enumerate(row.token_ids, row.start):
                value = _slot(context, token)
                context = zlib.crc32(bytes([value]), context)
                slot = row.block_ids[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
                for head in self._heads:
                    head[slot] = value
        inputs = iter(samples)
        return [
            self._sample(row, length, next(inputs))
            for row in rows
            for length in range(len(row.token_ids) - row.num_samples + 1, len(row.token_ids) + 1)
        ]

    def _context(self, block_ids: list[BlockId], length: int) -> bytes:
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
        context = zlib.crc32(self._context(row.block_ids, row.start + length))
        token = _draw(context, params.seed or 0, given.key.index, position, given.banned_token_ids)
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
