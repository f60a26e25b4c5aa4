"""The connections of a rank for one epoch: its data plane, and its relays to the neighbours."""

import asyncio
import logging
from collections.abc import Callable

from orca.v1 import worker_pb2
from orca_common.errors import OrcaError, Unavailable
from orca_common.lanes.client import ClientCall
from orca_common.protocol import CONTROLLER
from orca_common.roles import Role
from orca_common.tls import Transport

from ..data_plane.plane import DataPlane, PeerLost
from ..data_plane.rendezvous import Rendezvous
from .membership import Formation

log = logging.getLogger(__name__)

ANSWER = 5.0  # seconds for a neighbour to take a stream
RELAY_TIMEOUT = 10.0  # seconds for the neighbours to take the relays' streams
LEAVE = 5.0  # seconds for an abort to end. NCCL's may hang when a peer of the same node was killed (NCCL issue 1777)


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
        """Ends the stream. Waiters in `connected` get Unavailable."""
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


class Epoch:
    """The open connections of one epoch.

    `on_broken` is called with a sentence when a relay ends before the epoch is closed, `on_stuck` when the data plane
    cannot be left.
    """

    def __init__(
        self,
        number: int,
        formation: Formation,
        rendezvous: Rendezvous,
        transport: Transport,
        on_broken: Callable[[str], None],
        on_stuck: Callable[[str], None],
    ) -> None:
        self.number, self.formation = number, formation
        self._rendezvous, self._transport = rendezvous, transport
        self._on_broken, self._on_stuck = on_broken, on_stuck
        self._plane: DataPlane | None = None
        self._relays: tuple[Neighbour, ...] = ()
        self._closed: str | None = None  # why

    async def open_plane(self) -> DataPlane:
        """The data plane, not joined yet. Raises PeerLost when the epoch was closed meanwhile."""
        asked = self.formation
        arguments = asked.place, self.number, asked.store, asked.return_tokens
        if asked.place.ranks > 1:  # imports torch
            plane = await asyncio.to_thread(self._rendezvous.plane, *arguments)
        else:
            plane = self._rendezvous.plane(*arguments)
        if self._closed is not None:
            plane.abort(self._closed)
            raise PeerLost(self._closed)
        self._plane = plane
        return plane

    async def open_relays(self) -> None:
        """Opens a controller's streams: to the next stage's controller first, which has the farthest to go, then to the
        tensor peers. Raises Unavailable when a neighbour does not take its stream, PeerLost when the epoch was closed.
        """
        if self._closed is not None:
            raise PeerLost(self._closed)
        place, controllers = self.formation.place, self.formation.controllers
        if place.tensor_rank:
            return
        end = place.index + place.tensor_parallel
        numbers = [*(() if place.is_last else (end,)), *range(place.index + 1, end)]
        self._relays = tuple(Neighbour(controllers[number], self._transport, self._on_broken) for number in numbers)
        try:
            async with asyncio.timeout(RELAY_TIMEOUT):
                await asyncio.gather(*(relay.connected() for relay in self._relays))
        except (TimeoutError, OrcaError) as error:
            if self._closed is not None:
                raise PeerLost(self._closed) from None
            reason = str(error) or f"no answer within {RELAY_TIMEOUT} s"
            raise Unavailable(f"the neighbours of epoch {self.number}: {reason}") from None

    def forward(self, iteration: worker_pb2.Iteration) -> None:
        """Sends an iteration to the neighbours, without waiting for them."""
        for relay in self._relays:
            relay.put(iteration)

    def close(self, reason: str) -> None:
        """Closes everything. Waiters in the data plane wake at once with PeerLost and this reason."""
        self._closed = reason
        if self._plane is not None:
            self._plane.abort(reason)
            asyncio.get_running_loop().call_later(LEAVE, self._check_left, self._plane)
        for relay in self._relays:
            relay.close()

    def _check_left(self, plane: DataPlane) -> None:
        if not plane.left:
            self._on_stuck(f"the process groups of epoch {self.number} were not left within {LEAVE:g} s")
