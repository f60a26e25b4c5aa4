"""What a rank has open for one epoch: its data plane, and its relays to the neighbours."""

import asyncio
from collections.abc import Callable

from orca.v1 import worker_pb2
from orca_common.errors import OrcaError, Unavailable
from orca_common.tls import Transport

from ..data_plane.plane import DataPlane, PeerLost
from ..data_plane.rendezvous import Rendezvous
from .membership import Formation
from .relay import Neighbour

RELAY_TIMEOUT = 10.0  # seconds for the neighbours to take the relays' streams


class Epoch:
    """The open connections of one epoch.

    `on_broken` is called with a sentence when a relay ends before the epoch is closed.
    """

    def __init__(
        self,
        number: int,
        formation: Formation,
        rendezvous: Rendezvous,
        transport: Transport,
        on_broken: Callable[[str], None],
    ) -> None:
        self.number, self.formation = number, formation
        self._rendezvous, self._transport, self._on_broken = rendezvous, transport, on_broken
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
        """Closes everything. Whoever waits in the data plane wakes at once with PeerLost and this reason."""
        self._closed = reason
        if self._plane is not None:
            self._plane.abort(reason)
        for relay in self._relays:
            relay.close()
