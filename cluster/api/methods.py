"""The methods of the wire contract as server and client need them, read from the stubs: path, messages, shape."""

from __future__ import annotations

from typing import Any

import msgspec
from google.protobuf.message_factory import GetMessageClass

from kvferry.proto import kvferry_pb2 as pb


class Method(msgspec.Struct, frozen=True):
    service: str
    """Full name, as health checks call it."""
    name: str
    request: Any
    """Message class."""
    response: Any
    streams: bool
    """Many responses."""

    @property
    def path(self) -> str:
        return f"/{self.service}/{self.name}"


METHODS = {
    method.name: Method(
        service.full_name,
        method.name,
        GetMessageClass(method.input_type),
        GetMessageClass(method.output_type),
        method.server_streaming,
    )
    for service in pb.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
"""By name; no two services share one."""
SERVICES = tuple(service.full_name for service in pb.DESCRIPTOR.services_by_name.values())
