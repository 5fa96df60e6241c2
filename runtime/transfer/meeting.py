"""Where two ends that come at different times find each other, and how a transport counts what it has opened."""

from __future__ import annotations

import socket
import threading
import time
from functools import cache
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from kvferry.runtime.transfer.transport import LinkClosed


class Closable(Protocol):
    def close(self) -> None: ...


T = TypeVar("T", bound=Closable)
MAX_ARRIVALS = 1024


@cache
def machine_id() -> str:
    """Equal for processes that can share memory and meet on local sockets: boot, host name, network namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{socket.gethostname()}/{Path('/proc/self/ns/net').readlink()}"


class Deadline:
    """`remaining()` of a timeout that began at construction; raises `LinkClosed` when it is over."""

    def __init__(self, timeout_s: float, what: str) -> None:
        self._until = time.monotonic() + timeout_s
        self._what = f"{what}: no answer within {timeout_s:g} s"

    def remaining(self) -> float:
        left = self._until - time.monotonic()
        if left <= 0:
            raise LinkClosed(self._what)
        return left


class Arrivals(Generic[T]):
    """Connections that wait to be accepted, by link name. A newer one under the same name replaces the older."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._waiting: dict[str, T] = {}
        self._closed = False

    def put(self, name: str, arrival: T) -> None:
        """Raises `LinkClosed` when closed."""
        dropped = []
        with self._condition:
            if self._closed:
                raise LinkClosed(f"{name}: the other side is closed")
            if old := self._waiting.pop(name, None):
                dropped.append(old)
            while len(self._waiting) >= MAX_ARRIVALS:
                dropped.append(self._waiting.pop(next(iter(self._waiting))))
            self._waiting[name] = arrival
            self._condition.notify_all()
        for old in dropped:
            old.close()

    def take(self, name: str, deadline: Deadline) -> T:
        """Blocks until someone arrives under that name. Raises `LinkClosed`."""
        with self._condition:
            while name not in self._waiting:
                if self._closed:
                    raise LinkClosed(f"{name}: this side is closed")
                self._condition.wait(deadline.remaining())
            return self._waiting.pop(name)

    def close(self) -> None:
        with self._condition:
            self._closed = True
            left = list(self._waiting.values())
            self._waiting.clear()
            self._condition.notify_all()
        for arrival in left:
            arrival.close()


class OpenEnds:
    """Everything a transport must close. `add` refuses once closed, so nothing slips through."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ends: set[Closable] = set()
        self._closed = False

    def add(self, end: Closable) -> None:
        """Raises `LinkClosed` (and closes `end`) when the transport is closed."""
        with self._lock:
            if not self._closed:
                self._ends.add(end)
                return
        end.close()
        raise LinkClosed("the transport is closed")

    def remove(self, end: Closable) -> None:
        with self._lock:
            self._ends.discard(end)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            ends = list(self._ends)
            self._ends.clear()
        for end in ends:
            end.close()
