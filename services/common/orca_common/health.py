"""gRPC's health service."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext

from grpc_health.v1 import health_pb2

from orca_common.errors import ErrorReason, NotFound

from .grpc_call import GrpcCall, Methods
from .grpc_server import only

HEALTH = "grpc.health.v1.Health"
Request, Answer = health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse


class Health:
    """Says NOT_SERVING of each service until `serving(True)`."""

    def __init__(
        self,
        services: tuple[str, ...],
        read: Callable[
            [GrpcCall, type[health_pb2.HealthCheckRequest]], Awaitable[health_pb2.HealthCheckRequest]
        ] = only,
        bound: Callable[[str], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """services: full names. The empty name, which means the server, is added.

        read: a call's request. bound: counts the calls of a client, for as long as each lasts.
        """
        self._services, self._read, self._bound = {"", *services}, read, bound
        self._serving = False
        self._changed = asyncio.Event()  # set and replaced at each change

    def serving(self, yes: bool) -> None:
        """Sets what it says: of the server, and of each service."""
        self._serving = yes
        self._changed.set()
        self._changed = asyncio.Event()

    def methods(self) -> Methods:
        return {f"/{HEALTH}/Check": self.check, f"/{HEALTH}/Watch": self.watch}

    async def check(self, call: GrpcCall) -> bytes:
        """Raises NotFound for a service that is not known."""
        with self._bound(call.peer):
            service = (await self._read(call, Request)).service
            if service not in self._services:
                raise NotFound("service: is not known here", reason=ErrorReason.UNSUPPORTED)
            return self._status(service).SerializeToString()

    async def watch(self, call: GrpcCall) -> None:
        """Tells the status now, and at each change. A service that is not known may come to be: its stream stays."""
        with self._bound(call.peer):
            service = (await self._read(call, Request)).service
            told: health_pb2.HealthCheckResponse | None = None
            while True:
                changed, status = self._changed, self._status(service)
                if status != told:
                    await call.write(status.SerializeToString())
                    told = status
                await changed.wait()

    def _status(self, service: str) -> health_pb2.HealthCheckResponse:
        if service not in self._services:
            return Answer(status=Answer.SERVICE_UNKNOWN)
        return Answer(status=Answer.SERVING if self._serving else Answer.NOT_SERVING)
