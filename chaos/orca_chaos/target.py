"""What chaos is done to: an interface of two implementations, `orca serve` on this machine and a cluster's release."""

from collections.abc import Sequence
from typing import Protocol

from .faults import Fault, Victim


class Watched(Protocol):
    """A running Orca, whose state can be seen."""

    @property
    def addresses(self) -> Sequence[str]:
        """Of the endpoints' gRPC doors. Several endpoints may have one."""
        ...

    @property
    def endpoints(self) -> int:
        """How many there are."""
        ...

    @property
    def redis_url(self) -> str | None:
        """Of the request pool, past all proxies; None: it cannot be reached from here."""
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
        """Why not everything runs, as a sentence; None: it does."""
        ...

    async def leftovers(self) -> list[str]:
        """What is wrong beside the pool after the load's end, a sentence each. Called last: it may end all."""
        ...


class Target(Watched, Protocol):
    """A running Orca that can be harmed."""

    def victims(self) -> Sequence[Victim]:
        """What can be hit, in an order that is the same in each run with the same settings."""
        ...

    async def begin(self, fault: Fault) -> bool:
        """Does it. False: there was nothing to hit, because the process does not run now."""
        ...

    async def end(self, fault: Fault) -> None:
        """Heals what `begin` has done. Processes that were killed come back by themselves."""
        ...
