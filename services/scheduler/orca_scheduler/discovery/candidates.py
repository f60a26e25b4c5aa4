"""Candidates: the engines that there may be, as a discovery reports them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Never, Protocol

from .size import Size


@dataclass(frozen=True, slots=True)
class Candidate:
    """An engine that is wanted, and the supervisors of its pods."""

    engine: str
    pods: tuple[str, ...]  # addresses in ordinal order; "" for a pod that has none
    absent: str = ""  # why pods have no address, as a sentence; "" when all have one
    replace: bool = False  # the pods are of an old revision, and it is this engine's turn to get new ones
    other_model: bool = False  # .. and the new ones have another model; none is lost or new yet
    ending: bool = False  # it is to be taken away soon: it finishes what it began, and begins nothing


class Discovery(Protocol):
    """Finds the candidates, and goes on looking."""

    @property
    def unready(self) -> str | None:
        """Why the candidates are not known yet; None once they are. May be called in any thread."""
        ...

    @property
    def notices(self) -> Sequence[str]:
        """Sentences for an operator: what cannot be read, which pods idle, why an update waits.

        May be called in any thread.
        """
        ...

    async def run(self, discovered: Callable[[Sequence[Candidate]], None]) -> Never:
        """Calls `discovered` with all candidates, now and after every change. Failed reads keep the previous state."""
        ...

    async def replace(self, engine: str) -> None:
        """Has the pods of an engine that are of an old revision made anew. The caller has brought the engine to rest.

        May be called again. Raises Unavailable when that cannot be asked for now.
        """
        ...

    def unfinished(self, engine: str, seconds: float) -> None:
        """Says that the engine has lost pods before it had finished with its old model.

        What it had begun waits so long for pods of that model.
        """
        ...

    async def close(self) -> None:
        """Frees what is left, after `run` was cancelled."""
        ...


class Scaled(Protocol):
    """Pods whose number can be changed."""

    @property
    def size(self) -> Size | None:
        """The number of engines that there are to be, as it was seen last; None: not known yet."""
        ...

    @property
    def stopped(self) -> bool | None:
        """Whether an update of the pods has stopped; None: not known yet. May be called in any thread."""
        ...

    async def resize(self, seen: Size, engines: int, beginning: int, why: str) -> None:
        """Asks for this many engines; or, where there are to be as many already, has the last ones of them finish.

        seen: the size that this was decided by; where it has changed meanwhile, nothing happens. beginning: how many
        engines begin requests. Raises Unavailable when that cannot be asked for now.
        """
        ...
