"""Cuts the links between two processes from outside, as a network would: the sockets are shut, both live on."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
from pathlib import Path

import psutil

PIDFD_GETFD = 438
"""Of Linux, 5.6 and later; Python has no name for it."""
_libc = ctypes.CDLL(None, use_errno=True)


def cut_links(source: int, destination: int) -> int:
    """Shuts the source's connections to the destination, and its `shm` links to anybody. Returns how many."""
    theirs = {(c.raddr, c.laddr) for c in psutil.Process(destination).net_connections() if c.raddr}
    handle, num_cut = os.pidfd_open(source), 0
    try:
        for entry in Path(f"/proc/{source}/fd").iterdir():
            with contextlib.suppress(OSError):  # it has gone
                if os.readlink(entry).startswith("socket:"):
                    num_cut += _cut(handle, int(entry.name), theirs)
    finally:
        os.close(handle)
    return num_cut


def _cut(handle: int, descriptor: int, theirs: set[tuple[object, object]]) -> bool:
    copy = _libc.syscall(PIDFD_GETFD, handle, descriptor, 0)
    if copy < 0:
        raise OSError(ctypes.get_errno(), "pidfd_getfd")
    with socket.socket(fileno=copy) as sock:
        if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            is_link = False
        elif sock.family == socket.AF_UNIX:
            is_link = sock.type == socket.SOCK_SEQPACKET
        else:
            is_link = (_plain(sock.getsockname()), _plain(sock.getpeername())) in {
                (_plain(a), _plain(b)) for a, b in theirs
            }
        if is_link:
            sock.shutdown(socket.SHUT_RDWR)
        return is_link


def _plain(address: object) -> tuple[str, int]:
    host, port = list(address)[:2]  # type: ignore[call-overload]
    return str(host).removeprefix("::ffff:"), int(port)
