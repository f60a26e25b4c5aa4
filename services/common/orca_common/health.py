"""gRPC's health service.

grpcio's servicer is not safe with strangers: its Watch writes while it holds a lock. One client that reads nothing
would keep the status of all others from changing.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence

from grpc_health.v1 import health_pb2, health_pb2_grpc

from .errors import ErrorReason, NotFound

Request, Answer = health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse


class Health(health_pb2_grpc.HealthServicer):
    """Says NOT_SERVING of each service until `serving(True)`."""

    def __init__(self, services: Sequence[str]) -> None:
        """services: full names. The empty name, which means the server, is added."""
        self._services, self._serving = {"", *services}, False
        self._changed = asyncio.Event()  # set and replaced at each change

    def serving(self, yes: bool) -> None:
        """Sets the status of the server and of each service."""
        self._serving = yes
        self._changed.set()
        self._changed = asyncio.Event()

    async def Check(  # noqa: N802 the proto's name
        self, request: health_pb2.HealthCheckRequest, context: object
    ) -> health_pb2.HealthCheckResponse:
        """Raises NotFound for a service that is not known."""
        if request.service not in self._services:
            raise NotFound("service: is not known here", reason=ErrorReason.UNSUPPORTED)
        return self._status(request.service)

    async def Watch(  # noqa: N802 the proto's name
        self, request: health_pb2.HealthCheckRequest, context: object
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """Streams the status now and at each change. The stream of an unknown service stays: it may start later."""
        told: health_pb2.HealthCheckResponse | None = None
        while True:
            changed, status = self._changed, self._status(request.service)
            if status != told:
                yield status
                told = status
            await changed.wait()

    def _status(self, service: str) -> health_pb2.HealthCheckResponse:
        if service not in self._services:
            return Answer(status=Answer.SERVICE_UNKNOWN)
        return Answer(status=Answer.SERVING if self._serving else Answer.NOT_SERVING)
