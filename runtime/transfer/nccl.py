"""Transport between GPUs: one NCCL communicator per link, headers through the destination's store.

NCCL has no tags, no sizes and no sign of a peer's death but silence; so every wait has kvferry's own deadline, after
which the communicator is aborted. The device work of a message is waited for on the host before the call returns.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from kvferry.runtime.errors import ResourceMissing
from kvferry.runtime.transfer.meeting import Deadline, OpenEnds
from kvferry.runtime.transfer.store import StoreMeeting, client, first_line, seconds
from kvferry.runtime.transfer.ticket import RankAddress
from kvferry.runtime.transfer.transport import LinkClosed, LinkName, Payload

SOURCE, DESTINATION = 0, 1
CLOSED = b"closed"


class _End:
    """One end of a link. Message n's header is the store's key `n`. An end that closes puts `CLOSED` there instead."""

    max_unfinished = 1
    in_place = False

    def __init__(self, name: str, address: RankAddress, prefix: str, rank: int, timeout_s: float, ends: OpenEnds):
        from torch.distributed import ProcessGroupNCCL

        self._name = name
        self._address = address
        self._prefix = prefix
        self._rank = rank
        self._ends = ends
        self._count = 0
        self._unread = 0
        self._closed = threading.Event()
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._store: Any = PrefixStore(prefix, client(address, timeout_s))
        options = ProcessGroupNCCL.Options()
        options._timeout = seconds(timeout_s)
        self._group: Any = ProcessGroupNCCL(PrefixStore("nccl", self._store), rank, 2, options)
        ends.add(self)

    def send(self, header: bytes, pieces: Sequence[torch.Tensor], timeout_s: float) -> None:
        deadline = Deadline(timeout_s, f"sending on {self._name}")
        self._check()
        try:
            if self._store.check([str(self._count)]):
                raise RuntimeError("the other end closed")
            self._store.set(str(self._count), sum(p.numel() for p in pieces).to_bytes(8, "little") + header)
            self._count += 1
            if pieces:
                payload = pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))
                self._group.send([payload], DESTINATION, 0).wait(seconds(deadline.remaining()))
                torch.cuda.current_stream(payload.device).synchronize()
        except RuntimeError as error:
            raise self._broken(error) from error

    def wait_sent(self, timeout_s: float) -> bool:
        del timeout_s  # `send` has waited
        return True

    def wake(self) -> None:
        """Nothing waits in `wait_sent`."""

    def receive_header(self, timeout_s: float) -> tuple[bytes, int] | None:
        self._check()
        key = str(self._count)
        try:
            self._store.wait([key], seconds(timeout_s))
        except RuntimeError as error:
            self._check()
            if "timeout" in str(error).lower():
                return None
            raise self._broken(error) from error
        value = self._store.get(key)
        if value == CLOSED:
            self.close()
            raise LinkClosed(f"{self._name}: the other end closed")
        self._store.delete_key(key)
        self._count += 1
        self._unread = int.from_bytes(value[:8], "little")
        return value[8:], self._unread

    def receive_payload(self, timeout_s: float, into: Sequence[torch.Tensor] = ()) -> Payload:
        del into
        self._check()
        begin = time.perf_counter()
        data = torch.empty(self._unread, dtype=torch.uint8, device=self._device)
        self._unread = 0
        try:
            if data.numel():
                self._group.recv([data], SOURCE, 0).wait(seconds(timeout_s))
                torch.cuda.current_stream(data.device).synchronize()
        except RuntimeError as error:
            raise self._broken(error) from error
        return Payload([data], lambda: None, time.perf_counter() - begin)  # torch keeps the device's memory itself

    def _check(self) -> None:
        if self._closed.is_set():
            raise LinkClosed(f"{self._name}: closed")

    def _broken(self, error: RuntimeError) -> LinkClosed:
        self.close()
        return LinkClosed(f"{self._name}: {first_line(error)}")

    def close(self) -> None:
        """Wakes a receiver by the header it waits for; an abort may hang, so it has a thread of its own."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._ends.remove(self)
        with contextlib.suppress(RuntimeError):
            store: Any = PrefixStore(self._prefix, client(self._address, 1.0))
            store.set(str(self._count), CLOSED)
        threading.Thread(target=self._group.abort, name=f"kvferry-nccl-abort-{self._name}", daemon=True).start()


class NcclTransport:
    """Uses the current CUDA device. `host`: name or address of this machine's interface that peers reach."""

    def __init__(self, host: str, secret: bytes) -> None:
        """Raises `ResourceMissing` without a CUDA device."""
        if not (torch.cuda.is_available() and torch.distributed.is_nccl_available()):
            raise ResourceMissing(
                "transport='nccl' needs a CUDA device and a torch built with NCCL, and this process has none; "
                "use transport='shm' on one machine or 'gloo' between machines"
            )
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._ends = OpenEnds()
        self._meeting = StoreMeeting(host, self._ends, secret)

    @property
    def device(self) -> torch.device:
        return self._device

    def address(self) -> RankAddress:
        return self._meeting.address

    def connect(self, name: LinkName, destination: RankAddress, timeout_s: float) -> _End:
        torch.cuda.set_device(self._device)  # of the calling thread
        _, prefix = self._meeting.connect(name, destination, Deadline(timeout_s, f"connecting {name}"))
        return _End(str(name), destination, prefix, SOURCE, timeout_s, self._ends)

    def accept(self, name: LinkName, source: RankAddress, timeout_s: float) -> _End:
        del source
        torch.cuda.set_device(self._device)
        _, prefix = self._meeting.accept(name, Deadline(timeout_s, f"accepting {name}"))
        return _End(str(name), self.address(), prefix, DESTINATION, timeout_s, self._ends)

    def close(self) -> None:
        self._ends.close()
