"""Transport between ranks that are threads of one process. For tests and the library's one-process uses."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Sequence

import torch

from kvferry.runtime.transfer.meeting import Arrivals, Deadline, OpenEnds, machine_id
from kvferry.runtime.transfer.ticket import RankAddress
from kvferry.runtime.transfer.transport import LinkClosed, LinkName, Payload

MAX_MESSAGES = 4
_numbers = itertools.count(1)
_transports: dict[int, LocalTransport] = {}


class Channel:
    """A bounded queue of messages with both of its ends; also the handshake between them."""

    max_unfinished = 1
    in_place = False

    def __init__(self, name: str, ends: OpenEnds) -> None:
        self._name = name
        self._ends = ends
        self._condition = threading.Condition()
        self._messages: deque[tuple[bytes, torch.Tensor]] = deque()
        self._current: torch.Tensor | None = None
        self._accepted = False
        self._closed = False

    def accept(self) -> None:
        with self._condition:
            if self._closed:
                raise LinkClosed(f"{self._name}: closed")
            self._accepted = True
            self._condition.notify_all()

    def wait_accepted(self, timeout_s: float) -> None:
        with self._condition:
            deadline = Deadline(timeout_s, f"connecting {self._name}")
            while not self._accepted and not self._closed:
                self._condition.wait(deadline.remaining())
        if self._closed:
            raise LinkClosed(f"{self._name}: closed")

    def send(self, header: bytes, pieces: Sequence[torch.Tensor], timeout_s: float) -> None:
        deadline = Deadline(timeout_s, f"sending on {self._name}")
        with self._condition:
            while len(self._messages) >= MAX_MESSAGES and not self._closed:
                try:
                    left = deadline.remaining()
                except LinkClosed:
                    self._shut()
                    raise
                self._condition.wait(left)
            if self._closed:
                raise LinkClosed(f"{self._name}: closed")
            payload = torch.cat(list(pieces)) if pieces else torch.empty(0, dtype=torch.uint8)
            self._messages.append((header, payload))
            self._condition.notify_all()

    def wait_sent(self, timeout_s: float) -> bool:
        del timeout_s  # `send` has taken the bytes
        return True

    def wake(self) -> None:
        """Nothing waits in `wait_sent`."""

    def receive_header(self, timeout_s: float) -> tuple[bytes, int] | None:
        with self._condition:
            if not self._condition.wait_for(lambda: self._messages or self._closed, timeout_s):
                return None
            if not self._messages:
                raise LinkClosed(f"{self._name}: closed")
            header, self._current = self._messages.popleft()
            self._condition.notify_all()
            return header, self._current.numel()

    def receive_payload(self, timeout_s: float, into: Sequence[torch.Tensor] = ()) -> Payload:
        del timeout_s, into  # it is here already
        with self._condition:
            payload, self._current = self._current, None
        if payload is None:
            raise LinkClosed(f"{self._name}: no header before the payload")
        return Payload([payload], lambda: None)

    def close(self) -> None:
        with self._condition:
            self._shut()
        self._ends.remove(self)

    def _shut(self) -> None:
        self._closed = True
        self._condition.notify_all()


class LocalTransport:
    def __init__(self, host: str) -> None:
        self._arrivals: Arrivals[Channel] = Arrivals()
        self._ends = OpenEnds()
        self._address = RankAddress(host, next(_numbers), machine_id())
        _transports[self._address.store_port] = self

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def address(self) -> RankAddress:
        return self._address

    def connect(self, name: LinkName, destination: RankAddress, timeout_s: float) -> Channel:
        other = _transports.get(destination.store_port)
        if other is None:
            raise LinkClosed(f"{name}: no such rank in this process; transport 'local' does not leave it")
        channel = Channel(str(name), self._ends)
        self._ends.add(channel)
        try:
            other._arrivals.put(str(name), channel)
            channel.wait_accepted(timeout_s)
        except LinkClosed:
            channel.close()
            raise
        return channel

    def accept(self, name: LinkName, source: RankAddress, timeout_s: float) -> Channel:
        del source
        deadline = Deadline(timeout_s, f"accepting {name}")
        while True:
            channel = self._arrivals.take(str(name), deadline)
            try:
                channel.accept()
            except LinkClosed:
                continue  # it gave up; another may come
            return channel

    def close(self) -> None:
        _transports.pop(self._address.store_port, None)
        self._arrivals.close()
        self._ends.close()
