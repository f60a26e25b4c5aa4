"""Which pods make which engine, and which make none (docs/engines.md, "Discovery"). Pure."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from orca_common.address import join_address

from .candidates import Candidate
from .pods import WorkerPod, WorkerSet


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine that the StatefulSet's replicas suffice for."""

    name: str
    names: tuple[str, ...]  # of its pods, in ordinal order, whether they exist or not
    pods: tuple[WorkerPod | None, ...]  # the same; None: it does not exist

    @property
    def up(self) -> bool:
        """Whether all its pods are ready."""
        return all(pod is not None and pod.ready for pod in self.pods)

    @property
    def trouble(self) -> str:
        """Why it is not up, as a sentence; "" when it is."""
        return _sentence(self, lambda pod: not pod.ready)

    @property
    def failing(self) -> bool:
        """Whether it will not be up by mere waiting."""
        return any(pod is not None and pod.failing for pod in self.pods)

    @property
    def since(self) -> float | None:
        """Since when a pod that exists is not ready, in seconds since 1970; None where that is not known."""
        return max((pod.since for pod in self.pods if pod and not pod.ready and pod.since), default=None)

    def candidate(self, port: int, replace: bool, other_model: bool = False, ending: bool = False) -> Candidate:
        """The engine as the scheduler knows it; supervisors listen on `port`."""
        addresses = tuple(join_address(pod.ip, port) if pod is not None and pod.ip else "" for pod in self.pods)
        absent = _sentence(self, lambda pod: not pod.ip)
        return Candidate(self.name, addresses, absent, replace, other_model, ending)


def engine_name(number: int) -> str:
    """The name of an engine by its number, from 0 on in the order of its pods' ordinals."""
    return f"engine-{number}"


def engines(workers: WorkerSet, pods: Iterable[WorkerPod], pods_per_engine: int) -> list[Engine]:
    """The engines whose ordinals are all below the number of replicas."""
    by_ordinal = {pod.ordinal: pod for pod in pods}
    whole = workers.replicas // pods_per_engine
    return [
        Engine(
            engine_name(number),
            tuple(f"{workers.name}-{ordinal}" for ordinal in ordinals),
            tuple(by_ordinal.get(ordinal) for ordinal in ordinals),
        )
        for number in range(whole)
        for ordinals in [range(number * pods_per_engine, (number + 1) * pods_per_engine)]
    ]


def spares(workers: WorkerSet, pods: Iterable[WorkerPod], pods_per_engine: int) -> list[WorkerPod]:
    """The pods that the StatefulSet keeps and that make no whole engine, in ordinal order."""
    first = workers.replicas // pods_per_engine * pods_per_engine
    kept = range(first, workers.replicas)
    return sorted((pod for pod in pods if pod.ordinal in kept and not pod.leaving), key=lambda pod: pod.ordinal)


def why_spare(pod: WorkerPod, workers: WorkerSet, pods_per_engine: int) -> str:
    """Why a spare pod idles, and what to do about it."""
    whole = workers.replicas // pods_per_engine
    replicas = "1 replica makes" if workers.replicas == 1 else f"{workers.replicas} replicas make"
    made = f"{whole or 'no'} {'engine' if whole < 2 else 'engines'}"
    return (
        f"{pod.name} idles: {replicas} {made} of {pods_per_engine} pods; "
        f"scale to {(whole + 1) * pods_per_engine} for {'another' if whole else 'one'}"
    )


def _sentence(engine: Engine, lacking: Callable[[WorkerPod], bool]) -> str:
    """Says why the engine lacks pods."""
    troubles = [
        (name, pod.trouble if pod is not None else "does not exist yet")
        for name, pod in zip(engine.names, engine.pods, strict=True)
        if pod is None or lacking(pod)
    ]
    before = ["", *(trouble for _, trouble in troubles)]
    parts = [
        f"{name} too" if trouble == told else f"{name} {trouble}"
        for (name, trouble), told in zip(troubles, before, strict=False)
    ]
    return "; ".join(parts)
