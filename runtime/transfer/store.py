"""How ends meet through a key-value store that every destination hosts. For transports built on process groups.

    source       n = add(link/count), set(link/n/offer), wait(link/n/accept)
    destination  wait(link/n/offer), set(link/n/accept)

n numbers the link's connections, so that a link that broke can be made again under its name. The store asks nobody who
he is; so `link` is a name that only those know who have the cluster's secret.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from kvferry.runtime.transfer.meeting import Deadline, OpenEnds, machine_id
from kvferry.runtime.transfer.secret import tag
from kvferry.runtime.transfer.ticket import RankAddress
from kvferry.runtime.transfer.transport import LinkClosed, LinkName

STORE_S = 5.0
"""Deadline of calls that answer at once when all is well."""


def seconds(timeout_s: float) -> timedelta:
    return timedelta(milliseconds=max(1, int(timeout_s * 1000)))


def first_line(error: RuntimeError) -> str:
    return str(error).partition("\n")[0]


def client(address: RankAddress, timeout_s: float = STORE_S) -> TCPStore:
    """A connection of its own: one client serves one call at a time, and some calls wait."""
    return TCPStore(address.host, address.store_port, is_master=False, timeout=seconds(timeout_s))


class StoreMeeting:
    """Hosts this rank's store on a port that the system picks, bound to `host` only."""

    def __init__(self, host: str, ends: OpenEnds, secret: bytes) -> None:
        with socket.create_server((host, 0)) as listener:
            port = listener.getsockname()[1]
            self._store = TCPStore(
                host,
                port,
                is_master=True,
                wait_for_workers=False,
                timeout=seconds(STORE_S),
                master_listen_fd=listener.detach(),
            )
        self.address = RankAddress(host, port, machine_id())
        self._ends = ends
        self._secret = secret
        self._accepted: dict[str, int] = {}

    def connect(self, name: LinkName, destination: RankAddress, deadline: Deadline) -> tuple[TCPStore, str]:
        """The destination's store and a prefix for this connection. Raises `LinkClosed`."""
        link = self._name(name)
        try:
            store = client(destination, deadline.remaining())
            prefix = f"{link}/{store.add(f'{link}/count', 1)}"
            store.set(f"{prefix}/offer", "1")
            self._wait(store, destination, f"{prefix}/accept", deadline)
        except RuntimeError as error:
            raise LinkClosed(f"{name}: cannot reach the destination: {first_line(error)}") from error
        return store, prefix

    def accept(self, name: LinkName, deadline: Deadline) -> tuple[TCPStore, str]:
        """Like `connect`, on the other side."""
        link = self._name(name)
        try:
            store = client(self.address)
            self._wait(store, self.address, f"{link}/{self._accepted.get(link, 0) + 1}/offer", deadline)
            newest = store.add(f"{link}/count", 0)
            self._accepted[link] = newest
            store.set(f"{link}/{newest}/accept", "1")
        except RuntimeError as error:
            raise LinkClosed(f"{name}: nobody came: {first_line(error)}") from error
        return store, f"{link}/{newest}"

    def _name(self, name: LinkName) -> str:
        return tag(self._secret, b"meeting", str(name).encode()).hex()

    def _wait(self, store: TCPStore, address: RankAddress, key: str, deadline: Deadline) -> None:
        with _wakeable(self._ends, address, key):
            store.wait([key], seconds(deadline.remaining()))
        if store.get(key) != b"1":
            raise LinkClosed("closed while waiting for the other side")


@contextlib.contextmanager
def _wakeable(ends: OpenEnds, address: RankAddress, key: str) -> Iterator[None]:
    """Closing `ends` ends a wait for `key` by setting it."""
    wait = _Wait(address, key)
    ends.add(wait)
    try:
        yield
    finally:
        ends.remove(wait)


class _Wait:
    def __init__(self, address: RankAddress, key: str) -> None:
        self._address = address
        self._key = key

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):  # no store any more: the wait fails by itself
            client(self._address, 1.0).set(self._key, "closed")
