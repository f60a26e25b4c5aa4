"""Rendezvous: a rank finds the other ranks of an epoch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from orca_common.address import split_address
from orca_common.errors import FailedPrecondition

from ..partition import Place
from .plane import DataPlane, Loopback

if TYPE_CHECKING:
    import torch


class Store(Protocol):
    """The store of an epoch, at which its ranks find each other. It is open as long as there is a reference to it."""

    @property
    def port(self) -> int: ...


class Rendezvous:
    """Opens stores and data planes. `host`: where other ranks reach this one; `device` None: no torch is needed.

    `listen_on`: the address that stores listen on; `host` if not given. `returns_encoded`: the model has an encoder,
    whose output goes back from the last stage to the first.
    """

    def __init__(
        self, host: str, device: torch.device | None, listen_on: str | None = None, returns_encoded: bool = False
    ) -> None:
        self.host, self._device, self.listen_on = host, device, listen_on or host
        self._returns_encoded = returns_encoded

    def open_store(self) -> Store:
        """A store on a free port. Imports torch: not for an event loop's thread."""
        from .process_groups import open_store

        return open_store(self.listen_on)

    def plane(self, place: Place, epoch: int, store: str, returns_tokens: bool) -> DataPlane:
        """The data plane of an epoch, not joined yet. `store`: "host:port" of the epoch's store.

        Imports torch if there are other ranks: not for an event loop's thread. Raises FailedPrecondition when these
        have no store.
        """
        if place.ranks == 1:
            return Loopback()
        try:
            address = split_address(store)
        except ValueError:
            address = "", 0
        if not address[0]:
            raise FailedPrecondition(f"an engine of {place.ranks} ranks needs the address of a store, not {store!r}")
        from .backends import Gloo, Nccl
        from .process_groups import ProcessGroups

        device = self._device
        backend = Nccl(device) if device is not None and device.type == "cuda" else Gloo(self.host)
        return ProcessGroups(place, epoch, address, backend, returns_tokens, self._returns_encoded)
