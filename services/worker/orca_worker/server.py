"""The gRPC server of a supervisor: its own service, and health. And what it has in common with a rank's server."""

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health  # pyright: ignore[reportAttributeAccessIssue]

from orca_common.address import join_address
from orca_common.interceptor import StatusInterceptor
from orca_common.listening import check_port
from orca_common.roles import HEALTH, Role
from orca_common.tls import Transport

# Bytes of a message: an iteration that brings 64 prompts of 128,000 tokens has 24 MB.
MAX_MESSAGE = 64 << 20

# Who may call what, where certificates tell.
ALLOWED = {
    "/orca.v1.Supervisor/": frozenset({Role.SCHEDULER}),
    "/orca.v1.Controller/": frozenset({Role.SCHEDULER}),
    "/orca.v1.Controller/Relay": frozenset({Role.WORKER}),
    **HEALTH,
}

OPTIONS = [
    ("grpc.so_reuseport", 1),  # the stack of `orca serve` keeps the port; see reserve_port
    ("grpc.max_receive_message_length", MAX_MESSAGE),
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_ping_strikes", 0),  # masters may ping as often as they like
]


async def new_server(service: str, transport: Transport) -> tuple[grpc.aio.Server, health.HealthServicer]:
    """A server to which the caller adds `service`, and its health, which says SERVING."""
    interceptors = [StatusInterceptor(), *transport.interceptors(ALLOWED)]
    server = grpc.aio.server(interceptors=interceptors, options=OPTIONS)
    servicer = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    for name in ("", service):
        await servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
    return server, servicer


def listen(server: grpc.aio.Server, transport: Transport, host: str, port: int) -> int:
    """Listens on a port (0: a free one) and returns it. Raises Unavailable when it is taken."""
    check_port("port", host, port, shared=True)
    return transport.listen(server, join_address(host, port))
