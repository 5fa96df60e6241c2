"""The two ends of a link, each with a thread: one gathers and sends what is queued, one receives, checks, stages."""

from __future__ import annotations

import threading
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from kvferry.runtime.errors import InvariantBroken
from kvferry.runtime.step import Send
from kvferry.runtime.transfer.group_span import GroupSpan
from kvferry.runtime.transfer.header import Expected, MessageHeader, parse, seal
from kvferry.runtime.transfer.landing import Landing
from kvferry.runtime.transfer.meeting import Closable
from kvferry.runtime.transfer.staging import Staged, Staging
from kvferry.runtime.transfer.ticket import LinkReport, RankAddress, Received, Sent
from kvferry.runtime.transfer.transport import (
    MAX_HEADER_BYTES,
    LinkClosed,
    LinkName,
    Payload,
    ReceiveEnd,
    SendEnd,
    Transport,
)

MAX_QUEUED = 8192
IDLE_S = 3600.0
Report = Callable[[LinkReport], None]


@dataclass
class LinkStats:
    """Of all links of one rank, since it began. Changed under `lock`."""

    sent_messages: int = 0
    sent_bytes: int = 0
    received_messages: int = 0
    received_bytes: int = 0
    refused_messages: int = 0
    """Their header or checksum was wrong; the link was torn down."""
    dropped_messages: int = 0
    """Of transfers that were discarded, or there already."""
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def count(self, **amounts: int) -> None:
        with self.lock:
            for name, amount in amounts.items():
                setattr(self, name, getattr(self, name) + amount)


@dataclass(frozen=True)
class LinkContext:
    """What all links of one rank share."""

    transport: Transport
    staging: Staging
    landing: Landing
    stats: LinkStats
    report: Report
    timeout_s: float
    checksum: bool
    fingerprint: bytes
    secret: bytes


class Outgoing:
    """One `Send` on its way over all of this rank's routes; reports `Sent` once, when the last one is done."""

    def __init__(self, send: Send, num_routes: int, rank: int, report: Report, ready: torch.cuda.Event | None) -> None:
        self.send = send
        self._num_left = num_routes
        self._rank = rank
        self._report = report
        self._ready = ready
        self._error: str | None = None
        self._lock = threading.Lock()

    def wait_ready(self) -> None:
        """Until the device has written the blocks."""
        if self._ready is not None:
            self._ready.synchronize()

    def done(self, error: str | None) -> None:
        with self._lock:
            self._num_left -= 1
            self._error = self._error or error
            if self._num_left:
                return
        self._report(Sent(self.send.transfer_id, self.send.attempt, self.send.seq, self._rank, self._error))


class LinkThread:
    """The thread that owns one end. Once it is over the link is down for good; a new one may take its name."""

    def __init__(self, name: LinkName, kind: str, body: Callable[[], None], on_down: Callable[[str], None]) -> None:
        self.changed = threading.Condition()
        self.closing: str | None = None
        """Why the link is going down; set once."""
        self.name = f"kvferry-{kind}-{name}"
        self._body = body
        self._on_down = on_down
        self._end: Closable | None = None
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        reason = f"thread {self.name} failed"
        try:
            self._body()
        except LinkClosed as closed:
            reason = str(closed)
        finally:
            self.close(reason)
            self._on_down(self.closing or reason)

    def opened(self, end: Closable) -> None:
        """Raises `LinkClosed` if the link was closed meanwhile."""
        with self.changed:
            self._end = end
            if self.closing is not None:
                raise LinkClosed(self.closing)

    def close(self, reason: str) -> None:
        """Makes the thread end soon; does not wait for it."""
        with self.changed:
            if self.closing is None:
                self.closing = reason
            end = self._end
            self.changed.notify_all()
        if end is not None:
            end.close()

    def join(self, timeout_s: float) -> bool:
        """Whether the thread is over."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()


class SendLink:
    def __init__(
        self, context: LinkContext, name: LinkName, to: RankAddress, span: GroupSpan, on_down: Callable[[str], None]
    ) -> None:
        self._context = context
        self._name = name
        self._to = to
        self._span = span
        self._on_down = on_down
        self._queue: deque[Outgoing] = deque()
        self._end: SendEnd | None = None
        self.life = LinkThread(name, "send", self._run, self._down)

    def put(self, outgoing: Outgoing) -> None:
        """Never blocks. A message that cannot be queued is reported as failed."""
        with self.life.changed:
            error = self.life.closing
            if error is None and len(self._queue) >= MAX_QUEUED:
                error = f"{self._name}: {MAX_QUEUED} messages wait already"
            if error is None:
                self._queue.append(outgoing)
                self.life.changed.notify_all()
            end = self._end
        if error is not None:
            outgoing.done(error)
        elif end is not None:
            end.wake()

    def _run(self) -> None:
        end = self._context.transport.connect(self._name, self._to, self._context.timeout_s)
        self.life.opened(end)
        self._end = end
        reason, link_seq = f"{self._name}: the link went down", 0
        begun: deque[Outgoing] = deque()
        try:
            while True:
                full = len(begun) == end.max_unfinished
                outgoing = None if full else self._next(block=not begun)
                if outgoing is None:
                    if end.wait_sent(self._context.timeout_s):
                        begun.popleft().done(None)
                elif self._is_discarded(outgoing):
                    outgoing.done("the transfer was ended")
                else:
                    begun.append(outgoing)
                    self._send(end, outgoing, link_seq)
                    link_seq += 1
        except LinkClosed as closed:
            reason = str(closed)
            raise
        finally:
            end.close()  # until then their blocks may be read
            for outgoing in begun:
                outgoing.done(reason)

    def _is_discarded(self, outgoing: Outgoing) -> bool:
        return self._context.staging.is_discarded(outgoing.send.transfer_id, outgoing.send.attempt)

    def _next(self, block: bool) -> Outgoing | None:
        """`None`: there is nothing to send, and the caller has something else to do."""
        with self.life.changed:
            while not self._queue:
                if self.life.closing is not None:
                    raise LinkClosed(self.life.closing)
                if not block:
                    return None
                self.life.changed.wait()
            return self._queue.popleft()

    def _send(self, end: SendEnd, outgoing: Outgoing, link_seq: int) -> None:
        send = outgoing.send
        outgoing.wait_ready()
        pieces = self._span.read(send.source_block_ids, self._context.transport.device, send.destination_block_ids)
        num_bytes = sum(piece.numel() for piece in pieces)
        header = seal(
            MessageHeader(
                link=str(self._name),
                link_seq=link_seq,
                fingerprint=self._context.fingerprint,
                transfer_id=send.transfer_id,
                attempt=send.attempt,
                seq=send.seq,
                hashes=send.hashes,
                block_ids=send.destination_block_ids,
                num_bytes=num_bytes,
                crc=checksum(pieces) if self._context.checksum else None,
            ),
            self._context.secret,
        )
        if len(header) > MAX_HEADER_BYTES:
            raise InvariantBroken(
                f"header of {len(header)} bytes for {len(send.hashes)} blocks; at most 256 may travel"
            )
        end.send(header, pieces, self._context.timeout_s)
        self._context.stats.count(sent_messages=1, sent_bytes=num_bytes)

    def _down(self, reason: str) -> None:
        with self.life.changed:
            left = list(self._queue)
            self._queue.clear()
        for outgoing in left:
            outgoing.done(reason)
        self._on_down(reason)


class ReceiveLink:
    def __init__(
        self,
        context: LinkContext,
        name: LinkName,
        source: RankAddress,
        span: GroupSpan,
        num_routes: int,
        on_down: Callable[[str], None],
    ) -> None:
        self._context = context
        self._name = name
        self._link = str(name)
        self._source = source
        self._span = span
        self._num_routes = num_routes
        self._expected = Expected(self._link, context.fingerprint, span.ranges, context.secret)
        self._wanted_again = False
        self.life = LinkThread(name, "receive", self._run, on_down)

    def touch(self) -> None:
        """Someone expects blocks: if nobody has connected yet, wait for a whole timeout from now."""
        self._wanted_again = True

    def _run(self) -> None:
        end = self._accept()
        self.life.opened(end)
        link_seq = 0
        while True:
            got = end.receive_header(IDLE_S)
            if got is not None:
                self._receive(end, got[0], got[1], link_seq)
                link_seq += 1

    def _accept(self) -> ReceiveEnd:
        while True:
            self._wanted_again = False
            try:
                return self._context.transport.accept(self._name, self._source, self._context.timeout_s)
            except LinkClosed:
                if self.life.closing is not None or not self._wanted_again:
                    raise

    def _receive(self, end: ReceiveEnd, data: bytes, payload_bytes: int, link_seq: int) -> None:
        staging, stats = self._context.staging, self._context.stats
        header = parse(data, payload_bytes, link_seq, self._expected)
        if isinstance(header, str):
            stats.count(refused_messages=1)
            raise LinkClosed(f"{self._name}: refused a message: {header}")
        if staging.is_discarded(header.transfer_id, header.attempt):
            end.receive_payload(self._context.timeout_s).free()
            stats.count(dropped_messages=1)
            return
        payload = self._land(end, header) or self._stage(end, header)
        key = self._name.source, header.transfer_id, header.attempt, header.seq
        staged = Staged(self._link, payload, header.block_ids, self._span, self._num_routes)
        if not staging.put(key, self._name.source_rank, staged):
            stats.count(dropped_messages=1)
            return
        stats.count(received_messages=1, received_bytes=header.num_bytes)
        self._context.report(
            Received(
                header.transfer_id,
                header.attempt,
                header.seq,
                self._name.source,
                self._name.source_rank,
                self._name.destination_rank,
                header.hashes,
                header.block_ids,
                header.num_bytes,
                payload.seconds,
            )
        )

    def _land(self, end: ReceiveEnd, header: MessageHeader) -> Payload | None:
        """Lets the message be written into its blocks, which leaves nothing to import, if they are granted."""
        landing, ids = self._context.landing, header.block_ids
        places = self._span.places(ids) if end.in_place else []
        if not places:
            return None
        flight = landing.begin((header.transfer_id, header.attempt), ids, self.life.close)
        if flight is None:
            return None
        try:
            payload = end.receive_payload(self._context.timeout_s, places)
            self._check(payload, header)
            return Payload([], payload.free, payload.seconds)
        except BaseException:
            end.close()  # after which nothing is written
            raise
        finally:
            landing.end(flight)

    def _stage(self, end: ReceiveEnd, header: MessageHeader) -> Payload:
        staging, timeout_s = self._context.staging, self._context.timeout_s
        staging.reserve(self._link, header.num_bytes, timeout_s)
        try:
            payload = end.receive_payload(timeout_s)
            self._check(payload, header)
            return payload
        except BaseException:
            staging.unreserve(self._link, header.num_bytes)
            raise

    def _check(self, payload: Payload, header: MessageHeader) -> None:
        if header.crc is not None and payload.read(checksum) != header.crc:
            self._context.stats.count(refused_messages=1)
            raise LinkClosed(f"{self._name}: refused a message: wrong checksum")


def checksum(pieces: Sequence[torch.Tensor]) -> int:
    crc = 0
    for piece in pieces:
        crc = zlib.crc32(piece.cpu().numpy().data, crc)
    return crc
