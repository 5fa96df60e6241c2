"""One forward pass: what every rank is told to do, and what comes back.

A step's order on each rank: imports (staged blocks are copied into the pool's storage), sends (blocks sealed before
this step are handed to the links, and travel while it computes), rows (the forward pass). KV storage is written by
imports and rows, in the one thread that executes plans, and by links into blocks that a plan has granted them until
another takes them back; so a block that the leader has given to somebody else is never written by a late arrival.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, MutableSequence, Sequence
from typing import TYPE_CHECKING, cast

import msgspec

from kvferry.runtime.ids import BlockHash, BlockId, Peer, SequenceKey, TransferId
from kvferry.runtime.request import Logprob, SamplingParams
from kvferry.runtime.transfer.ticket import GroupAddress

if TYPE_CHECKING:
    Table = Sequence[BlockId]
else:
    Table = array
"""A block table: what `make_table` makes, where speed matters. Then a batch and a message take it as one piece of
memory, not number by number."""


def make_table(block_ids: Iterable[BlockId] = ()) -> MutableSequence[BlockId]:
    """An `array` of int64."""
    return cast("MutableSequence[BlockId]", array("q", block_ids))


class Row(msgspec.Struct, array_like=True, gc=False):
    """A span of one sequence: a prefill chunk (many tokens) or a decode (one, and drafted tokens behind it).

    Tokens `token_ids` stand at positions `start, start + 1, …`; `block_ids` is the block table that covers positions
    `[0, start + len(token_ids))`. The row writes KV for its own positions and reads all before, or what a window shows
    of them: blocks before the window are `NO_BLOCK`. Rows of one step may share blocks: all rows write a layer's KV
    before any row reads it.
    """

    token_ids: list[int]
    start: int
    block_ids: Table
    num_samples: int
    """Of how many of the last tokens the logits are wanted: none inside a prompt; each drafted token adds one."""
    window_block_ids: Table = make_table()
    """The table of layers with a window, in models that also have layers without one."""

    @property
    def draft(self) -> list[int]:
        """Guesses, right only if the model draws the same."""
        return self.token_ids[len(self.token_ids) - self.num_samples + 1 :] if self.num_samples > 1 else []


class SampleInput(msgspec.Struct, gc=False):
    """What the sampler needs for one wanted row of logits. Stays on rank 0."""

    key: SequenceKey
    params: SamplingParams
    position: int
    """Index of the token to draw among the sequence's output tokens; with seed and index, the draw's counter."""
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    """Only where a penalty needs them; else empty."""
    banned_token_ids: list[int]
    """Ends of sequence that may not be drawn yet (`min_tokens`)."""
    plain: bool = False
    """The largest logit will do, and no more is asked for: nothing above is looked at."""


class Send(msgspec.Struct, frozen=True, array_like=True):
    """One message of a transfer: sealed blocks of this group, for named blocks of the destination."""

    transfer_id: TransferId
    attempt: int
    seq: int
    """Counts the messages of a transfer from 0."""
    destination: Peer
    hashes: list[BlockHash]
    source_block_ids: list[BlockId]
    destination_block_ids: list[BlockId]


class Import(msgspec.Struct, frozen=True, array_like=True):
    """Copy the staged payload of one message (from every source rank) into the pool."""

    transfer_id: TransferId
    attempt: int
    seq: int
    source: Peer
    block_ids: list[BlockId]


class Discard(msgspec.Struct, frozen=True, array_like=True):
    """Forget what is staged, queued or still to come of a transfer."""

    transfer_id: TransferId
    attempt: int


class Grant(msgspec.Struct, frozen=True, array_like=True):
    """Messages of a transfer may be received straight into these blocks, each once. Ends with the transfer's discard,
    or block by block with an import or a `Revoke`."""

    transfer_id: TransferId
    attempt: int
    block_ids: list[BlockId]


class Revoke(msgspec.Struct, frozen=True, array_like=True):
    """From now on no message of a transfer writes these blocks."""

    transfer_id: TransferId
    attempt: int
    block_ids: list[BlockId]


class OpenLink(msgspec.Struct, frozen=True, array_like=True):
    """Be ready to exchange blocks with a group. Idempotent."""

    peer: GroupAddress
    inbound: bool
    """True: this group receives."""


class CloseLink(msgspec.Struct, frozen=True, array_like=True):
    """The peer is gone: tear the link down, fail what was in flight."""

    peer: Peer


class StepPlan(msgspec.Struct, array_like=True):
    """Sent as msgpack from rank 0 to the other ranks; everything a rank needs, nothing it must look up."""

    step: int
    rows: list[Row] = []
    opens: list[OpenLink] = []
    closes: list[CloseLink] = []
    discards: list[Discard] = []
    imports: list[Import] = []
    sends: list[Send] = []
    grants: list[Grant] = []
    revokes: list[Revoke] = []

    @property
    def num_tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.rows)


class SampledToken(msgspec.Struct, gc=False):
    token_id: int
    logprob: Logprob | None = None


class StepResult(msgspec.Struct):
    """`num_samples` entries per row, in the rows' order."""

    sampled: list[SampledToken]
