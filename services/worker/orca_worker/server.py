"""The gRPC server of a rank or a supervisor: its own service, and health."""

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health  # pyright: ignore[reportAttributeAccessIssue]

from .process import join_address

OPTIONS = [
    ("grpc.so_reuseport", 1),  # the supervisor holds a rank's port; see process.reserve_port
    ("grpc.max_receive_message_length", -1),  # the endpoint has bounded the prompts
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_ping_strikes", 0),  # masters may ping as often as they like
]


async def new_server(service: str) -> tuple[grpc.aio.Server, health.HealthServicer]:
    """A server to which `service` is still to be added; its health says SERVING."""
    server = grpc.aio.server(options=OPTIONS)
    servicer = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    for name in ("", service):
        await servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
    return server, servicer


def listen(server: grpc.aio.Server, host: str, port: int) -> int:
    """The port that the server listens on. Raises SystemExit when it is taken."""
    address = join_address(host, port)
    try:
        return server.add_insecure_port(address)
    except RuntimeError as error:
        raise SystemExit(f"ORCA_PORT: cannot listen on {address} ({error})") from None
