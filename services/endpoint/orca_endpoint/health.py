"""gRPC's health service, whose requests count and are read as all others: everybody may call it."""

import grpc
from grpc_health.v1 import health_pb2
from grpc_health.v1._async import HealthServicer

from .limits import Limits
from .messages import Context, Messages, peer_of

HEALTH = "grpc.health.v1.Health"
STATUS = health_pb2.HealthCheckResponse.ServingStatus


class Health:
    """Says NOT_SERVING of each service until `serving(True)`."""

    def __init__(self, services: tuple[str, ...], messages: Messages, limits: Limits) -> None:
        """services: full names. The empty name, which means the server, is added."""
        self._services, self._messages, self._limits = ("", *services), messages, limits
        self._servicer = HealthServicer()

    async def serving(self, yes: bool) -> None:
        """Sets what it says: of the server, and of each service."""
        for service in self._services:
            await self._servicer.set(service, STATUS.SERVING if yes else STATUS.NOT_SERVING)

    async def check(self, _: object, context: Context) -> health_pb2.HealthCheckResponse | None:
        with self._limits.call(peer_of(context)):
            request = await self._messages.read(context, health_pb2.HealthCheckRequest)
            return await self._servicer.Check(request, context)

    async def watch(self, _: object, context: Context) -> None:
        with self._limits.call(peer_of(context)):
            request = await self._messages.read(context, health_pb2.HealthCheckRequest)
            await self._servicer.Watch(request, context)

    def handlers(self) -> grpc.GenericRpcHandler:
        """Handlers that read their request themselves, as all of the door do."""
        serialize = health_pb2.HealthCheckResponse.SerializeToString
        methods = {
            "Check": grpc.stream_unary_rpc_method_handler(self.check, response_serializer=serialize),
            "Watch": grpc.stream_stream_rpc_method_handler(self.watch, response_serializer=serialize),
        }
        return grpc.method_handlers_generic_handler(HEALTH, methods)
