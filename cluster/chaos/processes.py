"""Signals to workers, after making sure that they are workers, ours, and on this machine."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Sequence
from typing import Protocol

import psutil

from kvferry.cluster.service import GroupView
from kvferry.runtime.errors import InvalidArgument, NotFound

WORKER_TITLE = "ray::Worker"
"""How Ray names the process of `cluster/worker.py`'s actor."""
WAY_OUT = "run this on the workers' machine as their user, or leave out kill and stop: --faults cut,cancel"


class Processes(Protocol):
    """Raises `NotFound` for a process that has ended meanwhile, `InvalidArgument` for one that must not be touched."""

    def check(self, groups: Sequence[GroupView]) -> None:
        """Whether all these workers may be signalled."""

    def kill(self, pid: int) -> None: ...
    def stop(self, pid: int) -> None: ...
    def go_on(self, pid: int) -> None:
        """Lets a stopped process run again. Does nothing if it has ended, or was not stopped here."""

    def go_on_all(self) -> None:
        """For every way out of the program."""


class LocalProcesses:
    """Of this machine. Remembers what it stopped; a pid that now names another process is never hit."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._stopped: dict[int, psutil.Process] = {}

    def check(self, groups: Sequence[GroupView]) -> None:
        host = self._target.rpartition(":")[0].strip("[]")
        if not is_local(host):
            raise InvalidArgument(
                "target", self._target, "is another machine: its workers cannot be signalled", WAY_OUT
            )
        for group in groups:
            for pid in group.pids:
                self._worker(pid)

    def kill(self, pid: int) -> None:
        self._signal(self._worker(pid), signal.SIGKILL)

    def stop(self, pid: int) -> None:
        process = self._worker(pid)
        self._stopped[pid] = process  # before: if we are interrupted in between, it is let go on
        self._signal(process, signal.SIGSTOP)

    def go_on(self, pid: int) -> None:
        process = self._stopped.pop(pid, None)
        if process is not None and process.is_running():
            self._signal(process, signal.SIGCONT)

    def go_on_all(self) -> None:
        for pid in list(self._stopped):
            self.go_on(pid)

    def _worker(self, pid: int) -> psutil.Process:
        try:
            process = psutil.Process(pid)
            title, uid = " ".join(process.cmdline()), process.uids().real
        except psutil.NoSuchProcess:
            raise NotFound(f"pid={pid}: no such process on this machine; {WAY_OUT}") from None
        except psutil.AccessDenied:
            raise InvalidArgument("pid", pid, "belongs to another user", WAY_OUT) from None
        if not title.startswith(WORKER_TITLE):
            raise InvalidArgument("pid", pid, f"is no kvferry worker but {title[:60]!r}", WAY_OUT)
        if uid != os.getuid():
            raise InvalidArgument("pid", pid, f"belongs to user {uid}, this program to {os.getuid()}", WAY_OUT)
        return process

    @staticmethod
    def _signal(process: psutil.Process, number: signal.Signals) -> None:
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            if number is not signal.SIGCONT:
                raise NotFound(f"pid={process.pid}: has ended meanwhile") from None
        except psutil.AccessDenied:
            raise InvalidArgument("pid", process.pid, f"may not be sent {number.name}", WAY_OUT) from None


def is_local(host: str) -> bool:
    """Whether an address is one of this machine's: only those can be bound. Raises `InvalidArgument` for no address."""
    try:
        addresses = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError as error:
        raise InvalidArgument("target", host, f"is no known host: {error}", "must be HOST:PORT") from None
    for family, kind, protocol, _, address in addresses:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.bind(address)
            except OSError:
                continue
            return True
    return False


def is_loopback(host: str) -> bool:
    """Whether all addresses of a name are this machine's loopback."""
    try:
        addresses = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return all(str(entry[4][0]).startswith("127.") or entry[4][0] == "::1" for entry in addresses)
