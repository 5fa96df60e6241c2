"""What the next step computes: one scheduler for prefill and decode.

    submit ──▶ waiting ──admit──▶ running ──finish / cancel──▶ gone
                  ▲                  │
                  └────── preempt ───┘        (its sealed blocks stay cached; it recomputes what was evicted)

Each plan serves running sequences first (decodes, then prefill chunks), then admits waiting ones, all in the order of
arrival, where a step of priority is a head start of `priority_step_s`. A waiting sequence whose next block somebody is
just filling (a running sequence, a transfer) is passed over until that block is sealed or withdrawn: nothing is
computed twice. One that lacks blocks is passed by others that have enough, `max_bypass` times; from then on nobody
takes new blocks before it does. Blocks for all known tokens are leased at admission (behind a window: for the chunk at
hand), further ones as the sequence grows; when none is left, the last sequence in order is preempted. What tokens and
blocks then are left over may lengthen decodes by drafted tokens; blocks that these needed in vain are given back with
the step.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from functools import partial

import msgspec

from kvferry.runtime.config import SchedulerConfig
from kvferry.runtime.errors import InvariantBroken
from kvferry.runtime.ids import BlockHash, BlockId, RequestId, SequenceKey
from kvferry.runtime.kv.hashing import hash_block
from kvferry.runtime.kv.table import TableKeeper
from kvferry.runtime.sequence import BlockTable, Sequence
from kvferry.runtime.speculation.acceptance import accept
from kvferry.runtime.speculation.speculator import Speculator
from kvferry.runtime.step import Row, SampledToken, SampleInput

MAX_BLOCKED = 8
"""Sequences without room that one plan looks past: it must not search a long queue in vain at each step."""


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.order


class Batch(msgspec.Struct):
    """One step's rows, and to whom each belongs."""

    rows: list[Row] = []
    sequences: list[Sequence] = []
    samples: list[SampleInput] = []
    num_prefill_tokens: int = 0
    num_decodes: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    """Of the drafted tokens; known when the step is committed."""


class Scheduler:
    """Plans and commits steps over the pools of one engine: `keepers`, one for each block group.

    `may_start(sequence)` says whether a waiting sequence's transfer is over, `waits_for(sequence, hash)` whether it
    should wait for a block that is not here, `holds_blocks(sequence)` whether a transfer holds blocks for it;
    `on_admitted(sequence)` is told when it has taken its own references.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        keepers: list[TableKeeper],
        may_start: Callable[[Sequence], bool],
        on_admitted: Callable[[Sequence], None],
        waits_for: Callable[[Sequence, BlockHash], bool],
        holds_blocks: Callable[[Sequence], bool],
        speculator: Speculator | None = None,
    ) -> None:
        self._config = config
        self._keepers = keepers
        self._size = keepers[0].pool.block_size
        self._may_start = may_start
        self._on_admitted = on_admitted
        self._waits_for = waits_for
        self._holds_blocks = holds_blocks
        self._speculator = speculator
        self.waiting: list[Sequence] = []
        self.blocked: list[Sequence] = []
        """Of those that wait: the first ones that the last plan had no blocks for."""
        self.running: list[Sequence] = []
        self.num_waiting_tokens = 0
        """Of `waiting`: all of theirs, as they have computed none."""
        self._by_name: dict[tuple[RequestId, int], Sequence] = {}
        self.num_preemptions = 0
        self.is_stuck = False
        """The last plan could run nothing although sequences wait for room."""

    # ------------------------------------------------------------- coming and going
    def add(self, sequence: Sequence) -> None:
        self._by_name[sequence.key.request_id, sequence.key.index] = sequence
        self._wait(sequence)

    def _wait(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=_order)
        self.num_waiting_tokens += len(sequence.tokens)

    def _wait_no_more(self, sequence: Sequence) -> None:
        self.waiting.remove(sequence)
        self.num_waiting_tokens -= len(sequence.tokens)

    def get(self, key: SequenceKey) -> Sequence | None:
        sequence = self.latest(key)
        return sequence if sequence is not None and sequence.key == key else None

    def latest(self, key: SequenceKey) -> Sequence | None:
        """The same sequence at whatever attempt."""
        return self._by_name.get((key.request_id, key.index))

    def remove(self, sequence: Sequence) -> None:
        """Ends a sequence at a step border and gives its blocks back."""
        del self._by_name[sequence.key.request_id, sequence.key.index]
        if sequence.tables:
            self.running.remove(sequence)
        else:
            self._wait_no_more(sequence)
        if sequence in self.blocked:
            self.blocked.remove(sequence)
        if self._speculator is not None:
            self._speculator.forget(sequence.key)
        self._release(sequence)

    def sequences(self) -> list[Sequence]:
        return list(self._by_name.values())

    # ------------------------------------------------------------- planning
    def plan(self, now_ns: int) -> Batch:
        """Rows for the next step. Leases blocks; may preempt and admit."""
        batch = Batch()
        budget = self._config.max_batch_tokens
        decodes: list[Sequence] = []
        prefills: list[Sequence] = []
        for sequence in self.running:
            (prefills if len(sequence.tokens) - sequence.num_computed > 1 else decodes).append(sequence)
        for sequence in decodes + prefills:
            if budget == 0:
                break
            if not sequence.tables:  # preempted by one before it
                continue
            if count := self._grow(batch, sequence, min(sequence.num_uncomputed, budget), now_ns):
                self._add_row(batch, sequence, count, now_ns)
                budget -= count
        blocked = self._admit(batch, budget, now_ns)
        if self._speculator is not None and batch.num_decodes:
            self._speculate(batch, self._config.max_batch_tokens - sum(len(row.token_ids) for row in batch.rows))
        for sequence, row in zip(batch.sequences, batch.rows, strict=True):
            if row.num_samples == 1:
                batch.samples.append(sequence.sample_input([]))
            else:
                batch.samples += [sequence.sample_input(row.draft[:i]) for i in range(row.num_samples)]
        self.is_stuck = blocked and not self.running
        return batch

    def _admit(self, batch: Batch, budget: int, now_ns: int) -> bool:
        """Moves waiting sequences to running while budgets last. True: the first in line lacks blocks."""
        if budget == 0 or len(self.running) >= self._config.max_sequences:
            return False  # `blocked` stays as it was
        blocked: list[Sequence] = []
        for sequence in list(self.waiting):
            if budget == 0 or len(self.running) >= self._config.max_sequences or len(blocked) > MAX_BLOCKED:
                break
            # Each one needs a block for its last token, and each running one keeps one to grow.
            if blocked and any(keeper.pool.num_available <= len(self.running) for keeper in self._keepers):
                break
            holds = self._holds_blocks(sequence)
            if self._reserved(blocked) and not holds:
                continue
            if not self._may_start(sequence):
                continue
            hits, pending = self._cached_prefix(sequence)
            if pending:
                continue
            if not self._open_tables(sequence, hits):
                blocked.append(sequence)
                continue
            self._wait_no_more(sequence)
            insort(self.running, sequence, key=_order)
            self._on_admitted(sequence)
            sequence.num_passed = 0
            if sequence.preempted_ns is not None:
                sequence.stalled_ns += now_ns - sequence.preempted_ns
                sequence.preempted_ns = None
            if not holds:  # who brings its blocks along takes hardly any, and is on its way to give them back
                for passed in blocked:
                    passed.num_passed += 1
            count = self._cover(sequence, min(sequence.num_uncomputed, budget))
            self._add_row(batch, sequence, count, now_ns)
            budget -= count
        self.blocked = blocked
        return bool(blocked)

    def _reserved(self, blocked: list[Sequence]) -> bool:
        return any(s.num_passed >= self._config.max_bypass for s in blocked)

    def passed_by_transfer(self) -> None:
        """A transfer took blocks that a waiting sequence lacks."""
        for sequence in self.blocked:
            sequence.num_passed += 1

    def num_spared(self, place: int) -> int:
        """Blocks of the group at `place` to be left to those that run, and to those that were passed too often."""
        keeper = self._keepers[place]
        passed = [s for s in self.blocked if s.num_passed >= self._config.max_bypass]
        return keeper.num_growing(self.running, place) + max((keeper.num_wanted(s, []) for s in passed), default=0)

    def _cached_prefix(self, sequence: Sequence) -> tuple[list[list[BlockId]], bool]:
        """Each group's table of the longest prefix that all have, and whether to wait for more.

        The last token stays out.
        """
        limit = length = (len(sequence.tokens) - 1) // self._size
        hits: list[list[BlockId]] = []
        for keeper in self._keepers:
            hits.append(keeper.find(sequence, length))
            length = len(hits[-1])
        if length == limit:
            return hits, False
        if self._keepers[-1].group.window is None:
            return hits, self._waits_for(sequence, sequence.hashes[length])
        for keeper in self._keepers:
            limit = keeper.reach(sequence, length, limit, partial(self._waits_for, sequence))
        return [blocks[:length] for blocks in hits], limit > length

    def _open_tables(self, sequence: Sequence, hits: list[list[BlockId]]) -> bool:
        """Takes the hits and, as far as they are leased at once, all other blocks; False: no room, nothing changed."""
        for keeper, blocks in zip(self._keepers, hits, strict=True):
            keeper.acquire(blocks)
        # Room for running sequences to grow: admitting into the last block would only preempt at once.
        if any(
            keeper.num_wanted(sequence, hits[i]) + keeper.num_growing(self.running, i) > keeper.pool.num_available
            for i, keeper in enumerate(self._keepers)
        ):
            for keeper, blocks in zip(self._keepers, hits, strict=True):
                keeper.release(blocks)
            return False
        sequence.tables = [BlockTable() for _ in self._keepers]
        sequence.num_computed = len(hits[0]) * self._size
        for keeper, table, blocks in zip(self._keepers, sequence.tables, hits, strict=True):
            keeper.open(sequence, table, blocks)
        # Less than at its first admission: what it found then was evicted meanwhile, and is computed now.
        if sequence.num_cached is None or sequence.num_computed < sequence.num_cached:
            sequence.num_cached = sequence.num_computed
        return True

    def _cover(self, sequence: Sequence, count: int) -> int:
        """Sees to it that the tables cover the next `count` tokens; returns for how many there are blocks."""
        end, size = sequence.num_computed + count, self._size
        for place, table in enumerate(sequence.tables):
            if len(table.block_ids) * size < end:
                end = min(end, self._keepers[place].extend(sequence, table, end))
        return end - sequence.num_computed

    def _grow(self, batch: Batch, sequence: Sequence, count: int, now_ns: int) -> int:
        """As `_cover`, but if there is no block at all, preempts later ones, or in the end this one (0).

        Sequences that have a row in this step are not touched. Decodes are planned in order, so the last one in order
        has none yet; behind a window prefill grows too, and waits for its turn if only such are left.
        """
        while not (covered := self._cover(sequence, count)):
            planned = {id(other) for other in batch.sequences}
            victim = next(s for s in reversed(self.running) if id(s) not in planned)
            if victim is sequence and planned and sequence.num_uncomputed > 1:
                return 0
            self._preempt(victim, now_ns)
            if victim is sequence:
                return 0
        return covered

    def _add_row(self, batch: Batch, sequence: Sequence, count: int, now_ns: int) -> None:
        start, end = sequence.num_computed, sequence.num_computed + count
        row = Row(sequence.tokens[start:end], start, (), int(end == len(sequence.tokens)))
        self._give_tables(row, sequence, end)
        batch.rows.append(row)
        batch.sequences.append(sequence)
        if sequence.begin_ns is None:
            sequence.begin_ns = now_ns
        if count == 1 and sequence.num_output:
            batch.num_decodes += 1
        else:
            batch.num_prefill_tokens += count

    def _give_tables(self, row: Row, sequence: Sequence, end: int) -> None:
        num_blocks = -(-end // self._size)
        row.block_ids = sequence.tables[0].block_ids[:num_blocks]
        if len(sequence.tables) > 1:
            row.window_block_ids = sequence.tables[1].block_ids[:num_blocks]

    def _speculate(self, batch: Batch, budget: int) -> None:
        """Lengthens decodes by drafts. Takes only what nobody else wants in this step."""
        assert self._speculator is not None
        planned = zip(batch.sequences, batch.rows, strict=True)
        decodes = [(sequence, row) for sequence, row in planned if len(row.token_ids) == row.num_samples == 1]
        drafts = self._speculator.drafts([sequence for sequence, _ in decodes], budget)
        for (sequence, row), draft in zip(decodes, drafts, strict=True):
            if not draft:
                continue
            del draft[self._cover(sequence, 1 + len(draft)) - 1 :]
            self._shorten(sequence, len(sequence.tokens) + len(draft))  # not all block groups had room for as many
            row.token_ids += draft
            row.num_samples += len(draft)
            self._give_tables(row, sequence, row.start + len(row.token_ids))
            batch.num_drafted += len(draft)

    def _preempt(self, sequence: Sequence, now_ns: int) -> None:
        sequence.preempted_ns = now_ns
        self.running.remove(sequence)
        self._release(sequence)
        self._wait(sequence)
        self.num_preemptions += 1

    def _release(self, sequence: Sequence) -> None:
        for keeper, table in zip(self._keepers, sequence.tables, strict=bool(sequence.tables)):
            keeper.release(table.block_ids)
        sequence.tables = []
        sequence.num_computed = 0

    # ------------------------------------------------------------- committing
    def commit(self, batch: Batch, sampled: list[SampledToken]) -> list[tuple[Sequence, list[SampledToken]]]:
        """Seals what was filled and appends what was drawn: one token or, after drafts, several.

        The caller judges ends and removes; only the last of several tokens may be an end.
        """
        if len(sampled) != len(batch.samples):
            raise InvariantBroken(f"{len(batch.samples)} rows to sample, {len(sampled)} tokens came back")
        done = 0
        drawn: list[tuple[Sequence, list[SampledToken]]] = []
        for sequence, row in zip(batch.sequences, batch.rows, strict=True):
            new = sampled[done : done + row.num_samples]
            done += row.num_samples
            if row.num_samples > 1:
                new = accept(row.draft, new)
            sequence.num_computed = row.start + len(row.token_ids) - (row.num_samples - len(new))
            for token in new:
                sequence.tokens.append(token.token_id)
            if sequence.num_computed // self._size > sequence.tables[0].num_sealed:
                self._seal(sequence)
            if new:
                drawn.append((sequence, new))
            if row.num_samples > 1:
                self._judge(batch, sequence, row.num_samples - 1, len(new) - 1)
        return drawn

    def _judge(self, batch: Batch, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        """After a row with drafts: blocks that only rejected tokens needed go back. What else these left in the last
        block, the next row overwrites."""
        assert self._speculator is not None
        self._speculator.judge(sequence, num_drafted, num_accepted)
        batch.num_accepted += num_accepted
        self._shorten(sequence, len(sequence.tokens))

    def _shorten(self, sequence: Sequence, num_tokens: int) -> None:
        for keeper, table in zip(self._keepers, sequence.tables, strict=True):
            keeper.shorten(table, num_tokens)

    def _seal(self, sequence: Sequence) -> None:
        """Blocks that have become full."""
        size, hashes = self._size, sequence.hashes
        for i in range(len(hashes), sequence.num_computed // size):  # filled by decode
            parent = hashes[i - 1] if i else None
            hashes.append(hash_block(sequence.root, parent, sequence.tokens[i * size : (i + 1) * size]))
        for keeper, table in zip(self._keepers, sequence.tables, strict=True):
            keeper.computed(sequence, table)

    def check_invariants(self) -> None:
        """Raises `InvariantBroken`."""
        rules = {
            "a list is out of order": all(
                [s.order for s in q] == sorted(s.order for s in q) for q in (self.waiting, self.running)
            ),
            "a sequence is in no list or in two": sorted(s.order for s in self._by_name.values())
            == sorted(s.order for s in [*self.waiting, *self.running]),
            "a waiting sequence holds blocks": not any(s.tables for s in self.waiting),
            "a running sequence has no tables": all(s.tables for s in self.running),
            "waiting tokens are miscounted": self.num_waiting_tokens == sum(s.num_uncomputed for s in self.waiting),
            "too many run": len(self.running) <= self._config.max_sequences,
        }
        for sequence in self.running:
            for keeper, table in zip(self._keepers, sequence.tables, strict=True):
                if fault := keeper.check(sequence, table):
                    rules[fault] = False
        for words, holds in rules.items():
            if not holds:
                raise InvariantBroken(f"scheduler: {words}")
