"""gRPC channels to supervisors and ranks."""

import asyncio
import contextlib

import grpc

DIAL_SECONDS = 5.0  # bound of one call to a supervisor or a rank that listens
OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.use_local_subchannel_pool", 1),  # a connection of our own: an earlier one's backoff is none of ours
]


def dial(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, options=OPTIONS)


async def listens(address: str) -> bool:
    """Whether a process listens there. One that is frozen does; one that is still starting does not yet."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(DIAL_SECONDS):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except (OSError, TimeoutError):
        return False
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return True


def reason(error: Exception) -> str:
    """What went wrong, for a sentence."""
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error) or type(error).__name__
