"""Whose turn it is to get pods of a new revision, and how far it has come (docs/engines.md, "Updates by engine"). Pure.

Every scheduler computes this from the same objects, so that at most one engine is down by a rollout, without a lock.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from .engines import Engine
from .pods import ROLLOUT, WorkerPod, WorkerSet

STOPPED_AFTER = 300.0  # seconds: weights may take minutes; an engine of new pods that takes longer stops an update


@dataclass(frozen=True, slots=True)
class Rollout:
    """The progress of a revision."""

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
    """Whether all its pods are outdated, and have another model than those that follow them.

    An engine that has lost one cannot go on: a StatefulSet makes it anew with the new model.
    """
    outdated = outdated_pods(engine, workers)
    return len(outdated) == len(engine.pods) and any(pod.model != workers.model for pod in outdated)


def progress(state: Rollout) -> str:
    """Says what an update does now; "" without an update."""
    if not state.outdated:
        return ""
    count = "1 engine has" if len(state.outdated) == 1 else f"{len(state.outdated)} engines have"
    older = f"the update to {state.revision}: {count} older pods"
    if state.awaited is not None:
        return f"{older}, and the next one waits until {state.awaited.name} is up: {state.awaited.trouble}"
    return f"{older}, and it is the turn of {state.turn.name}" if state.turn else older


class State(StrEnum):
    """The standing of a revision."""

    PROGRESSING = "Progressing"
    FINISHED = "Finished"  # all engines have ready pods of it
    STOPPED = "Stopped"  # it will not go on by mere waiting


@dataclass(frozen=True, slots=True)
class Standing:
    """The standing of the current revision, for tools that wait for it."""

    state: State
    message: str  # a sentence
    engine: str = ""  # the one that stops it

    def annotations(self, workers: WorkerSet) -> dict[str, str]:
        """The same on the StatefulSet. The generation says which specification was judged."""
        return {
            ROLLOUT: self.state.value,
            f"{ROLLOUT}-generation": str(workers.generation),
            f"{ROLLOUT}-message": self.message,
        }


def standing(workers: WorkerSet, engines: Sequence[Engine], now: float) -> Standing:
    """Judges the engines that are wanted; `now` in seconds since 1970.

    An engine that lost a rank counts as one that comes up, whether there was an update or not.
    """
    if not workers.revision:
        return Standing(State.PROGRESSING, f"Kubernetes has not looked at the last change of {workers.name} yet")
    outdated = rollout(workers, engines).outdated
    rising = [engine for engine in engines if engine not in outdated and not engine.up]
    for engine in rising:
        late = engine.since is not None and now - engine.since >= STOPPED_AFTER
        if engine.failing or late:
            after = "" if engine.failing else f" after {STOPPED_AFTER:g} s"
            message = f"{engine.name} of {workers.revision} is not up{after}: {engine.trouble}"
            if outdated:
                message += f"; until it is, {', '.join(old.name for old in outdated)} will keep older pods"
            return Standing(State.STOPPED, message, engine.name)
    ready = len(engines) - len(outdated) - len(rising)
    message = f"{workers.revision}: {ready} of {len(engines)} engines ready"
    if rising:
        return Standing(State.PROGRESSING, f"{message}; {rising[0].name}: {rising[0].trouble}")
    return Standing(State.PROGRESSING if outdated else State.FINISHED, message)
