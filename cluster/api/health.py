"""The standard health service. (The one that grpcio-health-checking brings for asyncio forgets a service's other
watchers when one of them leaves: 1.81.)"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVING = health_pb2.HealthCheckResponse.SERVING


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # grpc has no types
    """NOT_SERVING for each of `services` (and for "", the server) until `set_serving(True)`."""

    def __init__(self, services: Iterable[str]) -> None:
        self._services = {"", *services}
        self._status = NOT_SERVING
        self._changed = asyncio.Event()

    def set_serving(self, serving: bool) -> None:
        self._status = SERVING if serving else NOT_SERVING
        self._changed.set()
        self._changed = asyncio.Event()

    async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802  # gRPC's names
        if request.service not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service!r} here")
        return health_pb2.HealthCheckResponse(status=self._status)

    async def Watch(self, request: Any, _context: Any) -> AsyncIterator[Any]:  # noqa: N802
        if request.service not in self._services:  # the protocol wants the stream kept open
            yield health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
        said = None
        while True:
            changed, status = self._changed, self._status
            if status != said and request.service in self._services:
                said = status
                yield health_pb2.HealthCheckResponse(status=status)
            await changed.wait()
