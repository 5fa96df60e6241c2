"""What the next step computes: one scheduler for prefill and decode.

    submit ──▶ waiting ──admit──▶ running ──finish / cancel──▶ gone
                  ▲                  │
                  └────── preempt ───┘        (its sealed blocks stay cached; it recomputes what was evicted)

Each plan serves running sequences first (decodes, then prefill chunks), then admits waiting ones, all in the order of
arrival, where a step of priority is a head start of `priority_step_s`. A waiting sequence whose next block somebody is
just filling (a running sequence, a transfer) is passed over until that block is sealed or withdrawn: nothing is
computed twice. One that lacks blocks is passed by others that have enough, `max_bypass` times; from then on nobody
takes new blocks before it does. Blocks for all known tokens are leased at admission, further ones as the sequence
grows; when none is left, the last sequence in order is preempted. What tokens and blocks then are left over may
lengthen decodes by drafted tokens; blocks that these needed in vain are given back with the step.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from itertools import islice

import msgspec

from kvferry.runtime.config import SchedulerConfig
from kvferry.runtime.errors import InvariantBroken
from kvferry.runtime.ids import BlockHash, BlockId, RequestId, SequenceKey
from kvferry.runtime.kv.hashing import hash_block
from kvferry.runtime.kv.pool import BlockPool
from kvferry.runtime.sequence import Sequence
from kvferry.runtime.speculation.acceptance import accept
from kvferry.runtime.speculation.speculator import Speculator
from kvferry.runtime.step import Row, SampledToken, SampleInput

MAX_BLOCKED = 8
"""Sequences without room that one plan looks past: it must not search a long queue in vain at each step."""


class PlannedRow(msgspec.Struct):
    sequence: Sequence
    row: Row


class Batch(msgspec.Struct):
    """One step's rows, with whom they belong to."""

    planned: list[PlannedRow]
    samples: list[SampleInput]
    num_prefill_tokens: int
    num_decodes: int
    num_drafted: int = 0
    num_accepted: int = 0
    """Of the drafted tokens; known when the step is committed."""


class Scheduler:
    """Plans and commits steps over one pool.

    `may_start(sequence)` says whether a waiting sequence's transfer is over, `waits_for(sequence, hash)` whether it
    should wait for a block that is not here, `holds_blocks(sequence)` whether a transfer holds blocks for it;
    `on_admitted(sequence)` is told when it has taken its own references.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        pool: BlockPool,
        may_start: Callable[[Sequence], bool] = lambda _: True,
        on_admitted: Callable[[Sequence], None] = lambda _: None,
        waits_for: Callable[[Sequence, BlockHash], bool] | None = None,
        holds_blocks: Callable[[Sequence], bool] = lambda _: False,
        speculator: Speculator | None = None,
    ) -> None:
        self._config = config
        self._pool = pool
        self._may_start = may_start
        self._on_admitted = on_admitted
        self._waits_for = waits_for or (lambda _, block_hash: pool.is_pending(block_hash))
        self._holds_blocks = holds_blocks
        self._speculator = speculator
        self.waiting: list[Sequence] = []
        self.blocked: list[Sequence] = []
        """Of those that wait: the first ones that the last plan had no blocks for."""
        self.running: list[Sequence] = []
        self._by_name: dict[tuple[RequestId, int], Sequence] = {}
        self.num_preemptions = 0
        self.is_stuck = False
        """The last plan could run nothing although sequences wait for room."""

    # ------------------------------------------------------------- coming and going
    def add(self, sequence: Sequence) -> None:
        self._by_name[sequence.key.request_id, sequence.key.index] = sequence
        insort(self.waiting, sequence, key=lambda s: s.order)

    def get(self, key: SequenceKey) -> Sequence | None:
        sequence = self.latest(key)
        return sequence if sequence is not None and sequence.key == key else None

    def latest(self, key: SequenceKey) -> Sequence | None:
        """The same sequence at whatever attempt."""
        return self._by_name.get((key.request_id, key.index))

    def remove(self, sequence: Sequence) -> None:
        """Ends a sequence at a step border and gives its blocks back."""
        del self._by_name[sequence.key.request_id, sequence.key.index]
        (self.running if sequence in self.running else self.waiting).remove(sequence)
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
        batch = Batch([], [], 0, 0)
        budget = self._config.max_batch_tokens
        for sequence in sorted(self.running, key=lambda s: (s.num_uncomputed > 1, s.order)):
            if budget == 0:
                break
            if sequence not in self.running:  # preempted by one before it
                continue
            if self._grow(sequence, now_ns):
                budget -= self._add_row(batch, sequence, budget, now_ns)
        blocked = self._admit(batch, budget, now_ns)
        if self._speculator is not None and batch.num_decodes:
            self._speculate(batch, self._config.max_batch_tokens - sum(len(p.row.token_ids) for p in batch.planned))
        batch.samples = [
            p.sequence.sample_input(p.row.draft[:i]) for p in batch.planned for i in range(p.row.num_samples)
        ]
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
            if blocked and self._pool.num_available <= len(self.running):
                break
            holds = self._holds_blocks(sequence)
            if self._reserved(blocked) and not holds:
                continue
            if not self._may_start(sequence):
                continue
            hits, pending = self._cached_prefix(sequence)
            if pending:
                continue
            if not self._lease_all(sequence, hits):
                blocked.append(sequence)
                continue
            self.waiting.remove(sequence)
            insort(self.running, sequence, key=lambda s: s.order)
            self._on_admitted(sequence)
            sequence.num_passed = 0
            if sequence.preempted_ns is not None:
                sequence.stalled_ns += now_ns - sequence.preempted_ns
                sequence.preempted_ns = None
            if not holds:  # who brings its blocks along takes hardly any, and is on its way to give them back
                for passed in blocked:
                    passed.num_passed += 1
            budget -= self._add_row(batch, sequence, budget, now_ns)
        self.blocked = blocked
        return bool(blocked)

    def _reserved(self, blocked: list[Sequence]) -> bool:
        return any(s.num_passed >= self._config.max_bypass for s in blocked)

    def passed_by_transfer(self) -> None:
        """A transfer took blocks that a waiting sequence lacks."""
        for sequence in self.blocked:
            sequence.num_passed += 1

    @property
    def num_reserved(self) -> int:
        """Blocks to be kept for waiting sequences that were passed too often."""
        size = self._pool.block_size
        return max(
            (-(-len(s.tokens) // size) for s in self.blocked if s.num_passed >= self._config.max_bypass), default=0
        )

    def _cached_prefix(self, sequence: Sequence) -> tuple[list[BlockId], bool]:
        """Sealed blocks from the start, and whether to wait for the next one. The last token stays out."""
        size = self._pool.block_size
        hits: list[BlockId] = []
        for i, block_hash in enumerate(sequence.hashes[: (len(sequence.tokens) - 1) // size]):
            block_id = self._pool.lookup(block_hash, sequence.tokens[i * size : (i + 1) * size])
            if block_id is None:
                return hits, self._waits_for(sequence, block_hash)
            hits.append(block_id)
        return hits, False

    def _lease_all(self, sequence: Sequence, hits: list[BlockId]) -> bool:
        """Takes the hits and fresh blocks for all other known tokens; False: no room, nothing changed."""
        pool, size = self._pool, self._pool.block_size
        for block_id in hits:
            pool.acquire(block_id)
        num_fresh = -(-len(sequence.tokens) // size) - len(hits)
        # Room for each running sequence to grow by a block: admitting into the last block would only preempt at once.
        if num_fresh + len(self.running) > pool.num_available:
            for block_id in hits:
                pool.release(block_id)
            return False
        sequence.block_ids = [*hits, *pool.lease(num_fresh)]
        sequence.num_computed = len(hits) * size
        sequence.num_sealed = len(hits)
        if sequence.num_cached is None:
            sequence.num_cached = sequence.num_computed
        for i in range(len(hits), len(sequence.hashes)):
            self._announce(sequence, i)
        return True

    def _announce(self, sequence: Sequence, index: int) -> None:
        size = self._pool.block_size
        parent = sequence.hashes[index - 1] if index else None
        tokens = sequence.tokens[index * size : (index + 1) * size]
        self._pool.begin_fill(sequence.block_ids[index], sequence.hashes[index], parent, tokens)

    def _grow(self, sequence: Sequence, now_ns: int) -> bool:
        """Sees to it that the table covers all tokens; preempts later ones, or in the end this one (False).

        Only decodes grow, and they are planned in order: the last in order has no row yet.
        """
        while len(sequence.block_ids) * self._pool.block_size < len(sequence.tokens):
            if self._pool.num_available:
                sequence.block_ids += self._pool.lease(1)
                continue
            victim = self.running[-1]
            self._preempt(victim, now_ns)
            if victim is sequence:
                return False
        return True

    def _add_row(self, batch: Batch, sequence: Sequence, budget: int, now_ns: int) -> int:
        start = sequence.num_computed
        count = min(sequence.num_uncomputed, budget)
        end = start + count
        num_blocks = -(-end // self._pool.block_size)
        num_samples = int(end == len(sequence.tokens))
        row = Row(sequence.tokens[start:end], start, sequence.block_ids[:num_blocks], num_samples)
        batch.planned.append(PlannedRow(sequence, row))
        if sequence.begin_ns is None:
            sequence.begin_ns = now_ns
        if count == 1 and sequence.num_output:
            batch.num_decodes += 1
        else:
            batch.num_prefill_tokens += count
        return count

    def _speculate(self, batch: Batch, budget: int) -> None:
        """Lengthens decodes by drafts. Takes only what nobody else wants in this step."""
        assert self._speculator is not None
        decodes = [p for p in batch.planned if len(p.row.token_ids) == p.row.num_samples == 1]
        drafts = self._speculator.drafts([p.sequence for p in decodes], budget)
        for planned, draft in zip(decodes, drafts, strict=True):
            sequence, row, size = planned.sequence, planned.row, self._pool.block_size
            if not draft:
                continue
            lacking = -(-(len(sequence.tokens) + len(draft)) // size) - len(sequence.block_ids)
            sequence.block_ids += self._pool.lease(max(0, min(lacking, self._pool.num_available)))
            del draft[len(sequence.block_ids) * size - len(sequence.tokens) :]
            row.token_ids += draft
            row.block_ids = list(sequence.block_ids)
            row.num_samples += len(draft)
            batch.num_drafted += len(draft)

    def _preempt(self, sequence: Sequence, now_ns: int) -> None:
        sequence.preempted_ns = now_ns
        self.running.remove(sequence)
        self._release(sequence)
        insort(self.waiting, sequence, key=lambda s: s.order)
        self.num_preemptions += 1

    def _release(self, sequence: Sequence) -> None:
        for block_id in reversed(sequence.block_ids):  # children first: they are evicted before their parents
            self._pool.release(block_id)
        sequence.block_ids = []
        sequence.num_computed = sequence.num_sealed = 0

    # ------------------------------------------------------------- committing
    def commit(self, batch: Batch, sampled: list[SampledToken]) -> list[tuple[Sequence, list[SampledToken]]]:
        """Seals what was filled and appends what was drawn: one token or, after drafts, several.

        The caller judges ends and removes; only the last of several tokens may be an end.
        """
        if len(sampled) != len(batch.samples):
            raise InvariantBroken(f"{len(batch.samples)} rows to sample, {len(sampled)} tokens came back")
        tokens = iter(sampled)
        drawn: list[tuple[Sequence, list[SampledToken]]] = []
        for planned in batch.planned:
            sequence, row = planned.sequence, planned.row
            new = accept(row.draft, list(islice(tokens, row.num_samples)))
            sequence.num_computed = row.start + len(row.token_ids) - (row.num_samples - len(new))
            sequence.tokens += [token.token_id for token in new]
            self._seal(sequence)
            if new:
                drawn.append((sequence, new))
            if row.draft:
                self._judge(batch, sequence, len(row.draft), len(new) - 1)
        return drawn

    def _judge(self, batch: Batch, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        """After a row with drafts: blocks that only rejected tokens needed go back. What else these left in the last
        block, the next row overwrites."""
        assert self._speculator is not None
        self._speculator.judge(sequence, num_drafted, num_accepted)
        batch.num_accepted += num_accepted
        num_blocks = -(-len(sequence.tokens) // self._pool.block_size)
        for block_id in sequence.block_ids[num_blocks:]:
            self._pool.release(block_id)
        del sequence.block_ids[num_blocks:]

    def _seal(self, sequence: Sequence) -> None:
        size = self._pool.block_size
        for i in range(sequence.num_sealed, sequence.num_computed // size):
            if i == len(sequence.hashes):  # filled by decode, so not announced at admission
                parent = sequence.hashes[i - 1] if i else None
                sequence.hashes.append(hash_block(sequence.root, parent, sequence.tokens[i * size : (i + 1) * size]))
                self._announce(sequence, i)
            canonical = self._pool.seal(sequence.block_ids[i])
            if canonical is None:
                raise InvariantBroken(f"{sequence.key}: block {i} filled while its parent is not here")
            sequence.block_ids[i] = canonical
            sequence.num_sealed = i + 1

    def check_invariants(self) -> None:
        """Raises `InvariantBroken`."""
        size = self._pool.block_size
        rules = {
            "a list is out of order": all(
                [s.order for s in q] == sorted(s.order for s in q) for q in (self.waiting, self.running)
            ),
            "a sequence is in no list or in two": sorted(s.order for s in self._by_name.values())
            == sorted(s.order for s in [*self.waiting, *self.running]),
            "a waiting sequence holds blocks": not any(s.block_ids for s in self.waiting),
            "too many run": len(self.running) <= self._config.max_sequences,
            "a table is too short": all(len(s.block_ids) * size >= s.num_computed for s in self.running),
            "a table is longer than its tokens": all(
                (len(s.block_ids) - 1) * size < len(s.tokens) for s in self.running
            ),
            "a full block is not sealed": all(s.num_sealed == s.num_computed // size for s in self.running),
        }
        for words, holds in rules.items():
            if not holds:
                raise InvariantBroken(f"scheduler: {words}")
