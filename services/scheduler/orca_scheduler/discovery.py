"""Which engines there may be: candidates from a static list (docs/design.md, "Discovery")."""

from collections.abc import Sequence
from dataclasses import dataclass

from orca_common.errors import FailedPrecondition


@dataclass(frozen=True, slots=True)
class Candidate:
    """An engine and the supervisors of its pods, in ordinal order."""

    engine: str
    pods: tuple[str, ...]


def candidates(pods: Sequence[str], pods_per_engine: int) -> list[Candidate]:
    """Ordinal o belongs to engine o // pods_per_engine.

    Raises FailedPrecondition when the list holds a part of an engine.
    """
    if not pods or len(pods) % pods_per_engine:
        raise FailedPrecondition(
            f"workers: {len(pods)} pods are no multiple of the {pods_per_engine} pods of an engine"
        )
    starts = range(0, len(pods), pods_per_engine)
    return [Candidate(f"engine-{n}", tuple(pods[s : s + pods_per_engine])) for n, s in enumerate(starts)]
