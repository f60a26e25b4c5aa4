"""Which engines there may be: candidates from a static list (DESIGN section 6)."""

from collections.abc import Sequence
from dataclasses import dataclass

from orca_common.errors import FailedPrecondition


@dataclass(frozen=True, slots=True)
class Candidate:
    """An engine and the supervisors of its pods, in ordinal order."""

    engine: str
    pods: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank stands in its engine, and which process of which pod it is."""

    stage: int
    tensor_rank: int
    pod: int  # index of the engine's pod
    local_rank: int  # its number in the pod


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


def places(tp: int, pp: int, ranks_per_pod: int) -> list[Place]:
    """An engine's ranks, stage-major, then by tensor rank: the order in which pods hold them."""
    return [Place(n // tp, n % tp, n // ranks_per_pod, n % ranks_per_pod) for n in range(tp * pp)]
