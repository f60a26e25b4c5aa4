"""How iterations get from a controller to its neighbours: over one long-lived stream to each, for one epoch."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

import grpc

from orca.v1 import worker_pb2, worker_pb2_grpc
from orca_common.errors import Unavailable
from orca_common.roles import Role
from orca_common.tls import Transport

from .server import OPTIONS

log = logging.getLogger(__name__)

ANSWER = 5.0  # seconds for a neighbour to take a stream
# A connection of its own: one of an earlier epoch to the same address may be dead, and TCP takes a minute to say so.
FRESH = [*OPTIONS, ("grpc.use_local_subchannel_pool", 1)]


class Neighbour:
    """The stream to one neighbour. `on_broken` is called with a sentence when it ends before `close`."""

    def __init__(self, address: str, transport: Transport, on_broken: Callable[[str], None]) -> None:
        self.address, self._transport, self._on_broken = address, transport, on_broken
        self._queue: asyncio.Queue[worker_pb2.Iteration] = asyncio.Queue()  # both controllers bound what they accept
        self._connected: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._keep(), name=f"relay-{address}")

    async def connected(self) -> None:
        """Waits until the neighbour has taken the stream. Raises Unavailable when it does not."""
        await asyncio.shield(self._connected)

    def put(self, iteration: worker_pb2.Iteration) -> None:
        """Sends an iteration when the event loop next runs, without waiting for the neighbour."""
        self._queue.put_nowait(iteration)

    def close(self) -> None:
        """Ends the stream. Whoever waits in `connected` gets Unavailable."""
        self._task.cancel()
        if not self._connected.done():
            self._refuse(f"the relay to {self.address} was closed")

    async def _keep(self) -> None:
        try:
            async with self._transport.channel(self.address, Role.WORKER, FRESH) as channel:
                call = worker_pb2_grpc.ControllerStub(channel).Relay(self._messages())
                # `wait_for_connection` returns when the call was sent, whether or not anybody reads it.
                async with asyncio.timeout(ANSWER):
                    await call.initial_metadata()
                if call.done():
                    await call  # raises why
                self._connected.set_result(None)
                await call
                problem = "it ended the stream"
        except TimeoutError:
            problem = f"it did not answer within {ANSWER:g} s"
        except grpc.aio.AioRpcError as error:
            problem = error.details() or error.code().name
        except Exception as error:
            log.exception("relay failed", extra={"neighbour": self.address})
            problem = f"{type(error).__name__}: {error}"
        if self._connected.done():
            self._on_broken(f"the relay to {self.address} broke: {problem}")
        else:
            self._refuse(f"no relay to {self.address}: {problem}")

    def _refuse(self, problem: str) -> None:
        self._connected.set_exception(Unavailable(problem))
        self._connected.exception()  # nobody may be waiting for it

    async def _messages(self) -> AsyncIterator[worker_pb2.Iteration]:
        while True:
            yield await self._queue.get()
