"""The target of chaos: an interface with two implementations, `orca serve` on this machine and a cluster's release."""

from collections.abc import Sequence
from typing import Protocol

from .faults import Fault, Victim


class Watched(Protocol):
    """A running Orca, whose state can be seen."""

    @property
    def addresses(self) -> Sequence[str]:
        """Addresses of the endpoints' gRPC doors. Several endpoints may share one."""
        ...

    @property
    def endpoints(self) -> int:
        """How many there are."""
        ...

    @property
    def redis_url(self) -> str | None:
        """The request pool's URL, past all proxies; None: it cannot be reached from here."""
        ...

    @property
    def pool(self) -> str:
        """The release's name in its Redis."""
        ...

    @property
    def engines(self) -> int:
        """How many there are."""
        ...

    async def ailing(self) -> str | None:
        """Returns a sentence that says why not everything runs; None when it does."""
        ...

    async def leftovers(self) -> list[str]:
        """Returns a sentence for each fault outside the pool after the load's end. Called last: it may end all."""
        ...


class Target(Watched, Protocol):
    """A running Orca that can be harmed."""

    def victims(self) -> Sequence[Victim]:
        """Returns the processes and links that can be hit. Runs with the same settings give the same order."""
        ...

    async def begin(self, fault: Fault) -> bool:
        """Does it. False: there was nothing to hit, because the process does not run now."""
        ...

    async def end(self, fault: Fault) -> None:
        """Heals what `begin` has done. Processes that were killed come back by themselves."""
        ...
