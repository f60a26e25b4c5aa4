"""Suspicions: reasons to think that a rank is lost, and how sure they are (docs/engines.md, "Verdicts")."""

from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """A sure suspicion condemns the rank that it names. A doubtful one may come from a healthy rank whose neighbour is
    lost, so it counts only when no sure one follows soon. The doubtful kinds stand in the order of their weight."""

    GONE = "has ended"
    SILENT = "has been silent"
    STUCK = "makes no progress"
    FAILED = "failed"
    CLOSED = "left the control lane"
    CUT = "was cut off from the control lane"  # the connection broke. A process that has ended is soon GONE.
    REFUSED = "refused the control lane"  # the term is old (so the lease is confirmed before a fence), or another epoch
    PEER_LOST = "lost a neighbour"

    @property
    def sure(self) -> bool:
        return self in (Kind.GONE, Kind.SILENT, Kind.STUCK)

    @property
    def fences(self) -> bool:
        """Whether the rank that it names is to be killed."""
        return self not in (Kind.CUT, Kind.PEER_LOST)


class Suspicion(NamedTuple):
    """`detail` continues a sentence that begins with the rank's name."""

    rank: int  # index in the engine
    kind: Kind
    detail: str


def judge(suspicions: Iterable[Suspicion]) -> list[Suspicion]:
    """The suspicions that count, one a rank: all sure ones; without any, the weightiest of the others.

    A rank that failed before it ended is told as failed.
    """
    seen = list(suspicions)
    sure = {suspicion.rank: suspicion for suspicion in reversed(seen) if suspicion.kind.sure}
    if not sure:
        return sorted(seen, key=lambda suspicion: list(Kind).index(suspicion.kind))[:1]
    failed = {suspicion.rank: suspicion for suspicion in reversed(seen) if suspicion.kind is Kind.FAILED}
    return [failed.get(rank, suspicion) for rank, suspicion in reversed(sure.items())]
