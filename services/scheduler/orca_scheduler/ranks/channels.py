"""gRPC channels to supervisors, and connections to ranks."""

import asyncio
import contextlib

import grpc

from orca_common.address import split_address
from orca_common.lanes.client import CallFailed, LaneConnection, Status
from orca_common.roles import Role
from orca_common.tls import Transport

from .. import timers

OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 200),  # a supervisor that starts again is found within this
]


def dial(address: str, transport: Transport) -> grpc.aio.Channel:
    """A channel to a supervisor, with the certificate of this moment."""
    return transport.channel(address, Role.WORKER, OPTIONS)


async def listens(address: str) -> bool:
    """Whether a process accepts connections there. A frozen one does; one that is still starting does not."""
    host, port = split_address(address)
    try:
        async with asyncio.timeout(timers.DIAL):
            _, writer = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError):
        return False
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return True


async def connect(address: str, transport: Transport) -> LaneConnection:
    """A connection to a rank, with the certificate of this moment. Raises CallFailed when there is none in time."""
    why = "it says nothing"
    try:
        async with asyncio.timeout(timers.DIAL):
            while True:
                try:
                    return await transport.connect(address, Role.WORKER)
                except OSError as error:
                    why = str(error)
                await asyncio.sleep(timers.POLL)
    except TimeoutError:
        raise CallFailed(Status(grpc.StatusCode.DEADLINE_EXCEEDED, why)) from None


def reason(error: grpc.aio.AioRpcError) -> str:
    """Names the failure, for a sentence."""
    return f"{error.code().name}: {error.details()}"
