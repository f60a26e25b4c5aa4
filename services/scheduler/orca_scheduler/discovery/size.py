"""The number of engines of a StatefulSet, and of those that begin requests. Pure.

The last engines finish before their pods are taken away. The scheduler that decides it writes it on the StatefulSet, so
that each scheduler has the engines that it masters finish. The number counts for the generation of the specification
beside it: with any change of the specification, as when the pods are taken away, all engines begin requests again.
"""

from collections.abc import Mapping
from typing import NamedTuple

from .pods import BEGINNING, WorkerSet

GENERATION = f"{BEGINNING}-generation"


class Size(NamedTuple):
    """The size of a StatefulSet of workers."""

    pods: int  # that its specification asks for
    engines: int  # that these make
    beginning: int  # of them, those that begin requests
    generation: int  # of the specification


def size_of(workers: WorkerSet, pods_per_engine: int) -> Size:
    """Reads a StatefulSet's size."""
    engines, written = workers.replicas // pods_per_engine, workers.annotations.get(BEGINNING, "")
    counts = workers.annotations.get(GENERATION) == str(workers.generation) and written.isdecimal()
    return Size(workers.replicas, engines, min(int(written), engines) if counts else engines, workers.generation)


def marks(size: Size, beginning: int) -> Mapping[str, str]:
    """Makes the annotations that have the first engines begin requests, and the others finish."""
    return {BEGINNING: str(beginning), GENERATION: str(size.generation)}
