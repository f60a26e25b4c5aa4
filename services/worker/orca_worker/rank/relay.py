"""How iterations get from a controller to its neighbours: over one long-lived stream to each, for one epoch."""

import asyncio
import logging
from collections.abc import Callable

from orca.v1 import worker_pb2
from orca_common.errors import Unavailable
from orca_common.lanes.client import ClientCall
from orca_common.protocol import CONTROLLER
from orca_common.roles import Role
from orca_common.tls import Transport

log = logging.getLogger(__name__)

ANSWER = 5.0  # seconds for a neighbour to take a stream


class Neighbour:
    """The stream to one neighbour. `on_broken` is called with a sentence when it ends before `close`."""

    def __init__(self, address: str, transport: Transport, on_broken: Callable[[str], None]) -> None:
        self.address, self._transport, self._on_broken = address, transport, on_broken
        self._call: ClientCall | None = None
        self._connected: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._keep(), name=f"relay-{address}")

    async def connected(self) -> None:
        """Waits until the neighbour has taken the stream. Raises Unavailable when it does not."""
        await asyncio.shield(self._connected)

    def put(self, iteration: worker_pb2.Iteration) -> None:
        """Sends an iteration without waiting for the neighbour."""
        assert self._call is not None, "iterations come when all neighbours are connected"
        self._call.send(iteration.SerializeToString())  # both controllers bound what they accept

    def close(self) -> None:
        """Ends the stream. Whoever waits in `connected` gets Unavailable."""
        self._task.cancel()
        if not self._connected.done():
            self._refuse(f"the relay to {self.address} was closed")

    async def _keep(self) -> None:
        try:
            problem = await self._hold()
        except TimeoutError:
            problem = f"it did not answer within {ANSWER:g} s"
        except OSError as error:
            problem = str(error)
        except Exception as error:
            log.exception("relay failed", extra={"neighbour": self.address})
            problem = f"{type(error).__name__}: {error}"
        if self._connected.done():
            self._on_broken(f"the relay to {self.address} broke: {problem}")
        else:
            self._refuse(f"no relay to {self.address}: {problem}")

    async def _hold(self) -> str:
        """Opens the stream and returns why it has ended. Raises OSError, and TimeoutError before it stands."""
        async with asyncio.timeout(ANSWER):
            connection = await self._transport.connect(self.address, Role.WORKER)
        try:
            self._call = connection.call(f"/{CONTROLLER}/Relay", lambda answer: None)
            async with asyncio.timeout(ANSWER):
                await self._call.taken
            if not self._call.over.done():
                self._connected.set_result(None)
            status = await self._call.over
            return status.details or status.code.name
        finally:
            connection.close()

    def _refuse(self, problem: str) -> None:
        self._connected.set_exception(Unavailable(problem))
        self._connected.exception()  # nobody may be waiting for it
