"""Bugs planted one at a time in production classes: the simulator finds each, and passes the same seed without it.

Guards against: a simulator that is green because it cannot see.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kvferry.cluster.coordinator import Coordinator
from kvferry.cluster.ends import Ends
from kvferry.cluster.engine_driver import EngineDriver
from kvferry.cluster.legs import Record
from kvferry.cluster.prefix_index import PrefixIndex
from kvferry.cluster.sim.runner import simulate
from kvferry.cluster.transfers import Transfers
from kvferry.runtime import scheduler
from kvferry.runtime.engine import Engine
from kvferry.runtime.ids import NO_BLOCK
from kvferry.runtime.kv.groups import BlockGroup
from kvferry.runtime.kv.pool import BlockPool
from kvferry.runtime.kv.table import TableKeeper
from kvferry.runtime.speculation.acceptance import accept
from kvferry.runtime.transfer.inbound import Inbound
from kvferry.runtime.transfer.outbound import Outbound
from kvferry.runtime.transfer.ticket import TransferState

pytestmark = [pytest.mark.core, pytest.mark.sim]
MAX_SEEDS = 2000
Patch = Callable[[Any, str, Any], None]


def pool_keeps_the_duplicate(patch: Patch) -> None:
    """Pool: a block whose content somebody else sealed first is never given back."""
    real = BlockPool.seal

    def seal(self: Any, block_id: Any) -> Any:
        content = self._get(block_id)
        twin = self._sealed.get(content.hash)
        if twin is None or content.sealed:
            return real(self, block_id)
        self.acquire(twin)
        return twin

    patch(BlockPool, "seal", seal)


def pool_evicts_what_is_held(patch: Patch) -> None:
    """Pool: a reference on a sealed block that is in use already is not counted."""
    real = BlockPool.acquire

    def acquire(self: Any, block_id: Any) -> None:
        real(self, block_id)
        if self._refs[block_id] > 2:
            self._refs[block_id] -= 1

    patch(BlockPool, "acquire", acquire)


def ledger_frees_before_the_drain_ack(patch: Patch) -> None:
    """Outbound ledger: blocks are let go when their message is planned, not when the ranks have sent it."""
    real_plan, real_sent = Outbound._plan, Outbound.sent

    def plan(self: Any, departure: Any, hashes: Any) -> Any:
        sends = real_plan(self, departure, hashes)
        for send in sends:
            for block_id in send.source_block_ids:
                self._store.release(block_id)
        return sends

    def sent(self: Any, report: Any, num_ranks: int) -> None:
        departure = self._departures.get((report.transfer_id, report.attempt))
        if departure is not None and (flight := departure.flights.get(report.seq)) is not None:
            flight.block_ids = []
        real_sent(self, report, num_ranks)

    patch(Outbound, "_plan", plan)
    patch(Outbound, "sent", sent)


def ledger_never_lets_lapse(patch: Patch) -> None:
    """Inbound ledger: the reaper does nothing."""
    patch(Inbound, "expire", lambda self, now_ns: None)


def scheduler_seals_unfilled_blocks(patch: Patch) -> None:
    """Scheduler: the block that a chunk has only begun to fill becomes visible."""
    real = TableKeeper.computed

    def computed(self: Any, sequence: Any, table: Any) -> None:
        for i in range(table.num_sealed, min(-(-sequence.num_computed // self._size), len(sequence.hashes))):
            table.block_ids[i] = self.pool.seal(table.block_ids[i])
            table.num_sealed = i + 1
        real(self, sequence, table)

    patch(TableKeeper, "computed", computed)


def window_ends_one_block_too_early(patch: Patch) -> None:
    """Block group: the oldest block that a token still sees counts as out of its window."""
    real = BlockGroup.first_needed

    def first_needed(self: Any, position: int) -> int:
        first = real(self, position)
        return first if self.window is None else min(first + 1, max(0, position - 1) // self.layout.block_size)

    patch(BlockGroup, "first_needed", first_needed)


def window_hit_without_its_window(patch: Patch) -> None:
    """Block tables: the last cached block counts as a prefix, whatever became of those before it."""
    real = TableKeeper._find_window

    def find(self: Any, limit: int, lookup: Any) -> Any:
        hits = real(self, limit, lookup)
        last = next((i for i in reversed(range(limit)) if lookup(i) is not None), -1)
        return hits if last < len(hits) else [NO_BLOCK] * last + [lookup(last)]

    patch(TableKeeper, "_find_window", find)


def engine_forgets_who_adopts(patch: Patch) -> None:
    """Engine: a waiting sequence that is cancelled keeps its transfer's blocks."""
    real = Engine._leave_transfer

    def leave(self: Any, sequence: Any) -> None:
        if sequence.tables:
            real(self, sequence)

    patch(Engine, "_leave_transfer", leave)


def coordinator_skips_the_attempt_check(patch: Patch) -> None:
    """Coordinator: what an earlier leg still says counts."""
    real = Coordinator._on_event

    def on_event(self: Any, record: Any, sequence: Any, peer: Any, event: Any) -> None:
        if (leg := sequence.leg) is not None:
            key = msgspec.structs.replace(event.key, attempt=leg.attempt)
            real(self, record, sequence, leg.peer, msgspec.structs.replace(event, key=key))

    patch(Coordinator, "_on_event", on_event)


def coordinator_counts_a_token_twice(patch: Patch) -> None:
    """Coordinator: after a loss the last token is resubmitted twice."""
    real = Ends.lose

    def lose(self: Any, record: Any, sequence: Any, *rest: Any, **more: Any) -> None:
        if sequence.leg is not None and sequence.tokens and not record.over:
            sequence.tokens.append(sequence.tokens[-1])
        real(self, record, sequence, *rest, **more)

    patch(Ends, "lose", lose)


def transfers_are_not_renewed(patch: Patch) -> None:
    """Transfers: a renewal is dropped; leases of what waits in a queue lapse."""
    patch(Transfers, "renew", lambda self, now_ns: None)


def index_ignores_gaps(patch: Patch) -> None:
    """Index: a missing frame is not noticed."""
    real = PrefixIndex.apply

    def apply(self: Any, peer: Any, seq: int, events: Any) -> bool:
        entries = self._entries(peer)
        if seq > entries.seq + 1:
            entries.seq = seq - 1
        return real(self, peer, seq, events)

    patch(PrefixIndex, "apply", apply)


def scheduler_accepts_one_token_too_many(patch: Patch) -> None:
    """Speculation: what was drawn behind the first wrong guess is delivered as well."""

    def too_many(draft: Any, drawn: Any) -> Any:
        return drawn[: len(accept(draft, drawn)) + 1]

    patch(scheduler, "accept", too_many)


def driver_forgets_dead_gateways(patch: Patch) -> None:
    """Leader: a dead gateway's sequences run on."""
    patch(EngineDriver, "_forget_gateway", lambda self, gateway: None)


def fetches_are_waited_for_for_ever(patch: Patch) -> None:
    """Transfers: a prefix that does not come is not given up."""
    real = Transfers.renew

    def renew(self: Any, now_ns: int) -> None:
        real(self, 0)

    patch(Transfers, "renew", renew)


def what_will_not_come_stays_leased(patch: Patch) -> None:
    """Inbound ledger: blocks that a source cannot send any more are not waited for, and not given back either."""

    def shorten(self: Any, transfer_id: Any, attempt: int, lacking: Any) -> None:
        arrival = self._arrivals.get((transfer_id, attempt))
        if arrival is not None and arrival.state is TransferState.ACTIVE and not arrival.ending:
            for block_hash in lacking:
                arrival.missing.pop(block_hash, None)
            self._settle(arrival)

    patch(Inbound, "shorten", shorten)


def usage_counts_what_was_ferried(patch: Patch) -> None:
    """Record: what the decode leg found counts as cached, though prefill has computed it for the same request."""
    patch(Record, "note_cached", lambda self, event: setattr(self, "_num_cached", event.num_cached_tokens))


@pytest.mark.parametrize(
    "plant",
    [
        pool_keeps_the_duplicate,
        pool_evicts_what_is_held,
        ledger_frees_before_the_drain_ack,
        ledger_never_lets_lapse,
        scheduler_seals_unfilled_blocks,
        window_ends_one_block_too_early,
        window_hit_without_its_window,
        engine_forgets_who_adopts,
        coordinator_skips_the_attempt_check,
        coordinator_counts_a_token_twice,
        transfers_are_not_renewed,
        index_ignores_gaps,
        scheduler_accepts_one_token_too_many,
        driver_forgets_dead_gateways,
        fetches_are_waited_for_for_ever,
        what_will_not_come_stays_leased,
        usage_counts_what_was_ferried,
    ],
)
def test_planted_bug_is_found(plant: Callable[[Patch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as planted:
        plant(planted.setattr)
        found = next((seed for seed in range(MAX_SEEDS) if simulate(seed).failures), None)
    assert found is not None, f"{plant.__name__} lives through {MAX_SEEDS} seeds"
    assert simulate(found).failures == [], "the same seed without the bug"
    print(f"{plant.__name__}: seed {found}")
