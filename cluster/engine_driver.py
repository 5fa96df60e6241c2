"""What a group's leader does with messages and with what its steps bring. No thread, no queue, no clock of its own.

`engine_loop.EngineLoop` drives it from a thread, the simulator from its event loop:

    handle(gateway, message) …  as they come
    due(now) ─▶ step(now) ─▶ Output: tokens by gateway, KV events, transfers, load
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import msgspec
import structlog

from kvferry.cluster import messages as m
from kvferry.cluster.kv_events import KvEventLog
from kvferry.runtime.errors import FatalError, KvferryError
from kvferry.runtime.ids import BlockHash, Peer, SequenceKey, TransferId
from kvferry.runtime.reports import OnEvicted, StepOutput
from kvferry.runtime.request import SequenceRequest, TokenEvent
from kvferry.runtime.transfer.ticket import ExpectRequest, LinkReport, Ticket, TransferEvent, TransferState

MAX_REMEMBERED_TRANSFERS = 65536

_log = structlog.get_logger(__name__)


class EngineLike(Protocol):
    """The part of `kvferry.runtime.engine.Engine` that a leader drives."""

    def submit(self, request: SequenceRequest, now_ns: int) -> bool: ...
    def cancel(self, key: SequenceKey) -> None: ...
    def expect(self, request: ExpectRequest, now_ns: int) -> Ticket: ...
    def send(self, ticket: Ticket, now_ns: int) -> None: ...
    def end_transfer(self, transfer_id: TransferId, attempt: int, reason: str) -> None: ...
    def shorten_transfer(self, transfer_id: TransferId, attempt: int, lacking: list[BlockHash]) -> None: ...
    def renew(self, ids: list[TransferId], timeout_s: float, now_ns: int) -> None: ...
    def peer_gone(self, peer: Peer) -> None: ...
    def report(self, report: LinkReport) -> None: ...
    def has_work(self) -> bool: ...
    def next_deadline_ns(self) -> int | None: ...
    def step(self, now_ns: int, on_evicted: OnEvicted | None = None) -> StepOutput: ...
    def load(self) -> m.Load: ...
    def audit(self) -> Any: ...  # the fields of `messages.Audit` but `call_id`
    def cached_hashes(self) -> list[BlockHash]: ...


class GatewayClosed(msgspec.Struct, frozen=True):
    """A gateway's stream ended: what it asked for is nobody's any more."""


class Output(msgspec.Struct, frozen=True):
    """What one step brought. `tokens` by gateway."""

    tokens: dict[str, list[TokenEvent]]
    transfers: list[TransferEvent]
    kv: m.KvEvents | None
    load: m.Load


class Sink(Protocol):
    """Takes what the engine says, in order; must not block."""

    def output(self, output: Output) -> None: ...
    def reply(self, gateway: str, reply: m.Reply | m.Audit | m.KvSnapshot) -> None: ...


class EngineDriver:
    """Knows which gateway asked for what.

    `reply` is called with answers, at once; `early` with what is known of a step before it is executed.
    """

    def __init__(
        self,
        engine: EngineLike,
        reply: Callable[[str, m.Reply | m.Audit | m.KvSnapshot], None],
        early: Callable[[Output], None],
        now_ns: Callable[[], int],
    ) -> None:
        self._engine = engine
        self._early = early
        self._reply = reply
        self._now_ns = now_ns
        self._owner: dict[SequenceKey, str] = {}
        self._transfers: dict[tuple[TransferId, int], str] = {}
        self._log = KvEventLog()
        self._visible: dict[BlockHash, None] = {}
        """As the outputs so far tell it; what a snapshot must agree with."""

    # ------------------------------------------------------------ steps
    def due(self, now_ns: int) -> bool:
        """Whether a step could do something now."""
        if self._engine.has_work():
            return True
        deadline_ns = self._engine.next_deadline_ns()
        return deadline_ns is not None and deadline_ns <= now_ns

    def wait_s(self, now_ns: int, longest_s: float) -> float:
        """How long there is nothing to do if nothing comes, at most `longest_s`."""
        if self._engine.has_work():
            return 0.0
        deadline_ns = self._engine.next_deadline_ns()
        return longest_s if deadline_ns is None else min(longest_s, max(0.0, (deadline_ns - now_ns) / 1e9))

    def step(self, now_ns: int) -> Output:
        step = self._engine.step(now_ns, self._evicted)
        tokens: dict[str, list[TokenEvent]] = {}
        for event in step.tokens:
            over = event.finish_reason is not None or event.error_label is not None
            owner = self._owner.pop(event.key, None) if over else self._owner.get(event.key)
            if owner is not None:
                tokens.setdefault(owner, []).append(event)
        for transfer in step.transfers:
            if transfer.state is not TransferState.ACTIVE:
                self._transfers.pop((transfer.transfer_id, transfer.attempt), None)
        kv = self._kv_events(step.stored, step.removed)
        return Output(tokens=tokens, transfers=step.transfers, kv=kv, load=self._engine.load())

    def _evicted(self, stored: list[BlockHash], removed: list[BlockHash]) -> None:
        kv = self._kv_events(stored, removed)
        self._early(Output(tokens={}, transfers=[], kv=kv, load=self._engine.load()))

    def _kv_events(self, stored: list[BlockHash], removed: list[BlockHash]) -> m.KvEvents | None:
        for block_hash in stored:
            self._log.stored(block_hash)
            self._visible[block_hash] = None
        for block_hash in removed:
            self._log.removed(block_hash)
            self._visible.pop(block_hash, None)
        return self._log.take()

    # ------------------------------------------------------------ messages
    def handle(self, gateway: str, message: m.ToGroup | GatewayClosed | LinkReport) -> None:
        """A message that the engine refuses costs its sender, not the group. Raises `FatalError` only."""
        try:
            self._apply(gateway, message)
        except FatalError:
            raise
        except KvferryError as error:
            _log.warning("message_refused", kind=type(message).__name__, gateway=gateway, error=str(error))

    def _apply(self, gateway: str, message: Any) -> None:
        engine, now_ns = self._engine, self._now_ns()
        match message:
            case m.Submit(sequences=sequences):
                for sequence in sequences:
                    if engine.submit(_on_this_clock(sequence, now_ns), now_ns):
                        self._owner[sequence.key] = gateway
            case m.Cancel(keys=keys):
                for key in keys:
                    engine.cancel(key)
            case m.Expect(call_id=call_id, request=request):
                self._reply(gateway, self._expect(gateway, call_id, request))
            case m.SendTicket(ticket=ticket):
                self._remember_transfer(gateway, ticket.transfer_id, ticket.attempt)
                engine.send(ticket, now_ns)
            case m.EndTransfer(transfer_id=transfer_id, attempt=attempt, reason=reason):
                self._transfers.pop((transfer_id, attempt), None)
                engine.end_transfer(transfer_id, attempt, reason)
            case m.ShortenTransfer(transfer_id=transfer_id, attempt=attempt, lacking=lacking):
                engine.shorten_transfer(transfer_id, attempt, lacking)
            case m.Renew(transfer_ids=transfer_ids, timeout_s=timeout_s):
                engine.renew(transfer_ids, timeout_s, now_ns)
            case m.PeerGone(group=group, epoch=epoch):
                engine.peer_gone(Peer(group, epoch))
            case m.Query(call_id=call_id, what=what):
                self._reply(gateway, self._query(call_id, what))
            case GatewayClosed():
                self._forget_gateway(gateway)
            case _:
                engine.report(message)

    def _expect(self, gateway: str, call_id: int, request: ExpectRequest) -> m.Reply:
        try:
            ticket = self._engine.expect(request, self._now_ns())
        except FatalError:
            raise
        except KvferryError as error:
            return m.Reply(call_id=call_id, error_label=error.label, error_message=str(error))
        self._remember_transfer(gateway, request.transfer_id, request.attempt)
        return m.Reply(call_id=call_id, ticket=ticket)

    def _query(self, call_id: int, what: str) -> m.Reply | m.Audit | m.KvSnapshot:
        if what == "snapshot":  # the sink writes the frame's number into it
            return m.KvSnapshot(call_id=call_id, seq=0, hashes=list(self._visible))
        if what == "audit":
            audit = self._engine.audit()
            return m.Audit(
                call_id=call_id,
                broken=list(audit.broken),
                sequences=list(audit.sequences),
                inbound=list(audit.inbound),
                outbound=list(audit.outbound),
                num_leased_blocks=audit.num_leased_blocks,
            )
        return m.Reply(call_id=call_id, error_label="invalid_argument", error_message=f"what={what!r}")

    def _remember_transfer(self, gateway: str, transfer_id: TransferId, attempt: int) -> None:
        """The source of a transfer never hears of its end, so the oldest entries make room."""
        while len(self._transfers) >= MAX_REMEMBERED_TRANSFERS:
            del self._transfers[next(iter(self._transfers))]
        self._transfers[transfer_id, attempt] = gateway

    def _forget_gateway(self, gateway: str) -> None:
        for key in [key for key, owner in self._owner.items() if owner == gateway]:
            self._engine.cancel(key)
        for transfer_id, attempt in [name for name, owner in self._transfers.items() if owner == gateway]:
            del self._transfers[transfer_id, attempt]
            self._engine.end_transfer(transfer_id, attempt, "its gateway is gone")

    def owners(self) -> list[str]:
        """The gateway of each sequence that one waits for. At rest empty."""
        return list(self._owner.values())


def _on_this_clock(sequence: SequenceRequest, now_ns: int) -> SequenceRequest:
    """Clocks of machines differ: a deadline of a second must not have passed because this one is ahead by two.

    The way here counts as no time; the gateway keeps the deadline itself.
    """
    if sequence.sent_ns is None:
        return sequence
    ahead_ns, deadline_ns = now_ns - sequence.sent_ns, sequence.deadline_ns
    return msgspec.structs.replace(
        sequence,
        arrival_ns=sequence.arrival_ns + ahead_ns,
        deadline_ns=None if deadline_ns is None else deadline_ns + ahead_ns,
        sent_ns=None,
    )
