"""Reads the requests of Orca's methods: counted while they are in memory, and parsed without holding up the loop."""

from typing import TypeVar

from google.protobuf.message import Message

from orca_common.grpc_server import ServerCall

from .bodies import IN_LOOP
from .limits import Held
from .threads import Threads

M = TypeVar("M", bound=Message)


class Messages:
    """The requests of all calls of the gRPC door."""

    def __init__(self, thread: Threads) -> None:
        """thread: parses the large ones."""
        self._thread = thread

    async def read(self, call: ServerCall, kind: type[M], held: Held) -> M:
        """The one message of a call. Raises InvalidArgument when it cannot be parsed, and what the door's guard raises.

        held: what the call holds of the bytes in memory; the message is added when it is whole.
        """
        raw = await call.only()
        held.add(len(raw))
        if len(raw) <= IN_LOOP:
            return call.parsed(kind.FromString, raw)
        return await self._thread.run(lambda: call.parsed(kind.FromString, raw))
