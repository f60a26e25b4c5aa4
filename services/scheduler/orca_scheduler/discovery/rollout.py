"""Whose turn it is to get pods of a new revision (docs/design.md, "Updates by engine"). Pure.

Every scheduler computes this from the same objects, so that at most one engine is down by a rollout, without a lock.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from .engines import Engine
from .pods import WorkerPod, WorkerSet


@dataclass(frozen=True, slots=True)
class Rollout:
    """How far a revision has come."""

    revision: str  # "" as long as it is not known which one the pods should have
    outdated: tuple[Engine, ...]  # engines that have older pods
    turn: Engine | None  # the one of them whose pods are to be replaced now
    awaited: Engine | None  # an engine of new pods that is not up: nobody's turn comes before it is


def rollout(workers: WorkerSet, engines: Sequence[Engine]) -> Rollout:
    """Judges the engines that are wanted.

    A pod that is being deleted, or that does not exist, counts as one of the new revision that is not up yet: this is
    what its successor will be.
    """
    if not workers.revision:
        return Rollout("", (), None, None)
    outdated = tuple(engine for engine in engines if outdated_pods(engine, workers))
    awaited = next((engine for engine in engines if engine not in outdated and not engine.up), None)
    turn = None
    if awaited is None:
        down = [engine for engine in outdated if not engine.up]
        turn = next(iter([*down, *outdated]), None)
    return Rollout(workers.revision, outdated, turn, awaited)


def outdated_pods(engine: Engine, workers: WorkerSet) -> list[WorkerPod]:
    """The engine's pods that are of an older revision and stay so until they are deleted."""
    return [
        pod for pod in engine.pods if pod is not None and not pod.leaving and pod.revision not in ("", workers.revision)
    ]


def gets_other_model(engine: Engine, workers: WorkerSet) -> bool:
    """Whether its outdated pods have another model than those that follow them."""
    return any(pod.model != workers.model for pod in outdated_pods(engine, workers))


def progress(state: Rollout) -> str:
    """What an update does now, as a sentence; "" when there is none."""
    if not state.outdated:
        return ""
    count = "1 engine has" if len(state.outdated) == 1 else f"{len(state.outdated)} engines have"
    older = f"the update to {state.revision}: {count} older pods"
    if state.awaited is not None:
        return f"{older}, and the next one waits until {state.awaited.name} is up: {state.awaited.trouble}"
    return f"{older}, and it is the turn of {state.turn.name}" if state.turn else older
