"""Reads what calls of gRPC send: in turns, within a time, and parsed without holding up the loop."""

from typing import TypeVar

from google.protobuf.message import Message

from orca_common.compression import unreadable
from orca_common.grpc_call import GrpcCall
from orca_common.grpc_server import parsed

from .bodies import IN_LOOP
from .limits import Held
from .threads import Threads
from .turns import Turns

M = TypeVar("M", bound=Message)


class Messages:
    """The messages of all calls of the gRPC door."""

    def __init__(self, seconds: float, turns: Turns, thread: Threads) -> None:
        """seconds: for a message to come. thread: parses the large ones."""
        self._seconds, self._turns, self._thread = seconds, turns, thread

    async def next(self, call: GrpcCall) -> bytes | None:
        """The next message of a call; None: there is no more. Raises DeadlineExceeded, ResourceExhausted."""
        if call.readable:  # nothing is to come that would take memory
            return await call.read()
        async with self._turns.turn(call.peer, self._seconds):
            return await call.read()

    async def read(self, call: GrpcCall, kind: type[M], held: Held | None = None) -> M:
        """The one message of a call. Raises InvalidArgument when it cannot be parsed, and what `next` raises.

        held: what the call holds of the bytes in memory; the message is added when it is whole.
        """
        raw = await self.next(call)
        if raw is None:
            raise unreadable("is missing")
        if held is not None:
            held.add(len(raw))
        if len(raw) <= IN_LOOP:
            return parsed(kind, raw)
        return await self._thread.run(lambda: parsed(kind, raw))
