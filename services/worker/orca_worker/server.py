"""The gRPC server of a rank or a supervisor: its own service, and health."""

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health  # pyright: ignore[reportAttributeAccessIssue]

from orca_common.address import join_address
from orca_common.interceptor import StatusInterceptor

OPTIONS = [
    ("grpc.so_reuseport", 1),  # the supervisor holds a rank's port; see process.reserve_port
    ("grpc.max_receive_message_length", -1),  # the endpoint bounds the prompts
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_ping_strikes", 0),  # masters may ping as often as they like
]


async def new_server(service: str) -> tuple[grpc.aio.Server, health.HealthServicer]:
    """A server to which the caller adds `service`, and its health, which says SERVING."""
    server = grpc.aio.server(interceptors=[StatusInterceptor()], options=OPTIONS)
    servicer = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    for name in ("", service):
        await servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
    return server, servicer


def listen(server: grpc.aio.Server, host: str, port: int) -> int:
    """Listens on a port (0: a free one) and returns it. Raises SystemExit when it is taken."""
    address = join_address(host, port)
    try:
        return server.add_insecure_port(address)
    except RuntimeError as error:
        raise SystemExit(f"ORCA_PORT: cannot listen on {address} ({error})") from None
