"""Transports by name. Each is imported only when it is used."""

from __future__ import annotations

from kvferry.runtime.config import TransportName
from kvferry.runtime.errors import InvalidArgument
from kvferry.runtime.transfer.secret import NO_SECRET
from kvferry.runtime.transfer.transport import Transport


def make_transport(name: TransportName, host: str, secret: bytes = NO_SECRET) -> Transport:
    """A transport for one rank; `host` is where other machines reach it. Only ranks with the same `secret` meet.

    Raises `InvalidArgument` for an unknown name, `ResourceMissing` for `nccl` without a CUDA device.
    """
    match name:
        case "shm":
            from kvferry.runtime.transfer.shm import ShmTransport

            return ShmTransport(host, secret)
        case "gloo":
            from kvferry.runtime.transfer.gloo import GlooTransport

            return GlooTransport(host, secret)
        case "nccl":
            from kvferry.runtime.transfer.nccl import NcclTransport

            return NcclTransport(host, secret)
        case "local":
            from kvferry.runtime.transfer.local import LocalTransport

            return LocalTransport(host)
    raise InvalidArgument("transport", name, "must be one of shm, gloo, nccl, local")
