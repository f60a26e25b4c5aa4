"""Discovery's messages to Kubernetes: conditions of pods, annotations of the StatefulSet, Events of both.

Every scheduler says the same, under the same names, so that nothing is said twice. Nothing depends on whether it is
heard: who may not say it logs that once, and goes on.
"""

import asyncio
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any, Never

from .engines import Engine, why_spare
from .kubernetes import Kubernetes, Trouble
from .pods import IN_ENGINE, REFUSED, SHAPE, Condition, Manifest, WorkerPod, WorkerSet
from .rollout import Rollout, Standing, State, standing
from .size import Size

log = logging.getLogger(__name__)

LOOK = 1.0  # seconds between two looks at what ranks refuse
SAY_AGAIN = 30.0  # seconds: what was not heard, or has changed, is said again after this time
REFRESH = 600.0  # seconds: an Event expires after an hour, but what it says may still be so


@dataclass(frozen=True, slots=True)
class View:
    """All that discovery knows at a moment."""

    workers: WorkerSet
    pods_per_engine: int
    engines: tuple[Engine, ...]
    spares: tuple[WorkerPod, ...]
    rollout: Rollout


@dataclass(frozen=True, slots=True)
class Event:
    """Something to say about a pod or the StatefulSet. Two with the same name are the same Event."""

    name: str
    about: Manifest  # the object reference
    reason: str
    message: str
    warning: bool = False


@dataclass(frozen=True, slots=True)
class Tried:
    """The last message about an object."""

    what: object  # None: it was not heard
    at: float


def pod_event(pod: WorkerPod, reason: str, message: str) -> Event:
    about = {"apiVersion": "v1", "kind": "Pod", "name": pod.name, "uid": pod.uid}
    return Event(_event_name(pod.name, pod.uid, reason), about, reason, message, warning=True)


def set_event(workers: WorkerSet, reason: str, message: str, of: str = "", *, warning: bool = False) -> Event:
    """`of` tells apart Events of the same reason: a revision, an engine."""
    about = {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": workers.name, "uid": workers.uid}
    return Event(_event_name(workers.name, workers.uid, reason, of), about, reason, message, warning)


def conditions(view: View) -> Iterator[tuple[WorkerPod, Condition]]:
    """The condition IN_ENGINE that each pod should have."""
    for engine in view.engines:
        for number, pod in enumerate(engine.pods, 1):
            if pod is not None and not pod.leaving:
                place = f"pod {number} of {len(engine.pods)} of {engine.name}"
                yield pod, Condition("True", "WholeEngine", place)
    for pod in view.spares:
        yield pod, Condition("False", "SparePod", why_spare(pod, view.workers, view.pods_per_engine))


def refusals(view: View, reasons: Mapping[str, str | None]) -> Iterator[tuple[WorkerPod, Condition]]:
    """The condition REFUSED that pods should have. `reasons`: of the engines that this scheduler masters."""
    for engine in view.engines:
        for pod in engine.pods:
            if pod is None or pod.leaving or engine.name not in reasons:
                continue
            if why := reasons[engine.name]:
                yield pod, Condition("True", "RanksRefuse", why)
            elif pod.refused is not None:
                yield pod, Condition("False", "NoRefusal", "")


class Updates:
    """Follows updates: says when one begins, stops and ends."""

    def __init__(self) -> None:
        self._revision = ""  # that is being rolled out

    def news(self, view: View) -> list[Event]:
        """The Events since the last view."""
        workers, state = view.workers, view.rollout
        happened: list[Event] = []
        if state.outdated and state.revision != self._revision:
            self._revision = state.revision
            names = ", ".join(engine.name for engine in state.outdated)
            message = f"{state.revision} replaces the pods of {names}, one engine after the other"
            happened.append(set_event(workers, "RolloutStarted", message, state.revision))
        if self._revision and self._revision == state.revision and not state.outdated and state.awaited is None:
            self._revision = ""
            message = f"all engines have pods of {state.revision}"
            happened.append(set_event(workers, "RolloutFinished", message, state.revision))
        return happened

    def stopped(self, view: View, stands: Standing) -> Event | None:
        """The event of an update that has stopped; None as long as it goes on. Follows `news` of the same view."""
        revision = view.rollout.revision
        if stands.state is not State.STOPPED or self._revision != revision:
            return None
        of = f"{revision} {stands.engine}"
        return set_event(view.workers, "RolloutStopped", stands.message, of, warning=True)


class Teller:
    """Writes discovery's messages to Kubernetes, again and again."""

    def __init__(self, kubernetes: Kubernetes, shape: str, refused: Callable[[], Mapping[str, str | None]]) -> None:
        """`shape`: of this scheduler's engines, as the annotation SHAPE has it.

        `refused`: of the engines that this scheduler masters, why their ranks refuse to form; None: they do not.
        """
        self._kubernetes, self._shape, self._refused = kubernetes, shape, refused
        self._loop = asyncio.get_running_loop()
        self._view: View | None = None
        self._wake = asyncio.Event()
        self._updates = Updates()
        self._news: list[Event] = []  # to be said once
        self._tried: dict[str, Tried] = {}  # by what it is about: an Event, a pod's condition
        self._logged: set[int] = set()  # statuses of refused calls
        self.state: State | None = None  # of the rollout, as it was judged last

    def tell(self, view: View) -> None:
        """Takes the newest view."""
        self._view = view
        for event in self._updates.news(view):
            self._happened(event)
        self._wake.set()

    def replaced(self, workers: WorkerSet, engine: Engine, pods: Sequence[WorkerPod]) -> None:
        """Pods of an engine were deleted because of an update."""
        names = ", ".join(pod.name for pod in pods)
        message = f"{engine.name}: {names} deleted, to come back with {workers.revision}"
        self._happened(set_event(workers, "EngineReplaced", message, f"{workers.revision} {engine.name}"))

    def unfinished(self, workers: WorkerSet, engine: str, seconds: float) -> None:
        """An engine has lost pods of the old model before it had finished."""
        message = (
            f"{engine} has lost a pod before it had finished with the model of the revision before: what it had begun "
            f"waits {seconds:.0f} s for pods of that model, as a rollback brings them, and ends with MODEL_CHANGED then"
        )
        self._happened(set_event(workers, "UnfinishedWaits", message, f"{workers.revision} {engine}", warning=True))

    def scaled(self, workers: WorkerSet, seen: Size, pods: int, why: str) -> None:
        """The number of pods was changed, because of the load."""
        message = f"scaled from {seen.pods} to {pods} pods: {why}"
        self._happened(set_event(workers, "ScaledByLoad", message, str(seen.generation)))

    async def run(self) -> Never:
        """Sends new messages at once, and repeats later those that failed."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(SAY_AGAIN):
                    await self._wake.wait()
            self._wake.clear()
            if self._view is not None:
                try:
                    await self._say_all(self._view)
                except Trouble as trouble:  # there is no answer: the rest can wait
                    self._log(trouble)

    async def look(self) -> Never:
        """Has the ranks' refusals written soon."""
        known: Mapping[str, str | None] = {}
        while True:
            if (now := dict(self._refused())) != known:
                known = now
                self._wake.set()
            await asyncio.sleep(LOOK)

    def _happened(self, event: Event) -> None:
        log.info("change of the workers", extra={"what": event.reason, "why": event.message})
        self._news.append(event)
        self._wake.set()

    async def _say_all(self, view: View) -> None:
        stands = standing(view.workers, view.engines, time.time())
        self.state = stands.state
        if view.workers.annotations.get(SHAPE, self._shape) != self._shape:
            self.state = None  # the workers are of an update to other tp or pp: its own schedulers judge that
            return
        for pod, condition in conditions(view):
            await self._set(IN_ENGINE, pod, pod.in_engine, condition)
        for pod, condition in refusals(view, self._refused()):
            await self._set(REFUSED, pod, pod.refused, condition)
        for event in list(self._news):
            if await self._heard(partial(self._put, event)):
                self._news.remove(event)
        annotations = stands.annotations(view.workers)
        if annotations.items() - view.workers.annotations.items():
            patch = partial(self._kubernetes.annotate_set, view.workers.name, view.workers.uid, annotations)
            await self._try(" ".join(annotations.values()), annotations, SAY_AGAIN, patch)
        stopped = self._updates.stopped(view, stands)
        spare = [pod_event(p, "SparePod", why_spare(p, view.workers, view.pods_per_engine)) for p in view.spares]
        for event in [*spare, *([stopped] if stopped else [])]:
            await self._try(event.name, event.message, REFRESH, partial(self._put, event))

    async def _set(self, kind: str, pod: WorkerPod, old: Condition | None, new: Condition) -> None:
        if old != new:
            patch = partial(self._kubernetes.patch_pod_status, pod.name, _condition_patch(kind, pod, old, new))
            await self._try(f"{pod.uid} {kind} {new.message}", new, SAY_AGAIN, patch)

    async def _try(self, about: str, what: object, again: float, say: Callable[[], Awaitable[None]]) -> None:
        """Says something, unless the same was said less than `again` ago, or anything about it less than SAY_AGAIN."""
        now, last = self._loop.time(), self._tried.get(about)
        if last is not None and now - last.at < (again if last.what == what else SAY_AGAIN):
            return
        self._tried = {key: tried for key, tried in self._tried.items() if now - tried.at < REFRESH}
        self._tried[about] = Tried(None, now)
        if await self._heard(say):
            self._tried[about] = Tried(what, now)

    async def _heard(self, say: Callable[[], Awaitable[None]]) -> bool:
        """Whether Kubernetes took it. Raises Trouble when it does not answer at all."""
        try:
            await say()
        except Trouble as trouble:
            if trouble.status == 0:
                raise
            self._log(trouble)
            return False
        return True

    async def _put(self, event: Event) -> None:
        await self._kubernetes.put_event(event_manifest(event, self._kubernetes.namespace, _now()))

    def _log(self, trouble: Trouble) -> None:
        if trouble.status not in self._logged:
            self._logged.add(trouble.status)
            log.warning("Kubernetes was not told", extra={"why": str(trouble)})


def event_manifest(event: Event, namespace: str, now: str) -> Manifest:
    """The Event as Kubernetes takes it. `now` is a timestamp of RFC 3339."""
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": event.name, "namespace": namespace},
        "involvedObject": {**event.about, "namespace": namespace},
        "reason": event.reason,
        "message": event.message[:1024],  # Kubernetes refuses longer ones
        "type": "Warning" if event.warning else "Normal",
        "source": {"component": "orca-scheduler"},
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }


def _condition_patch(kind: str, pod: WorkerPod, old: Condition | None, new: Condition) -> dict[str, Any]:
    patch = {"type": kind, **asdict(new)}
    if old is None or old.status != new.status:
        patch["lastTransitionTime"] = _now()
    return {"metadata": {"uid": pod.uid}, "status": {"conditions": [patch]}}


def _event_name(*about: str) -> str:
    """Makes a name that is the same for each scheduler with the same message about the same object."""
    digest = hashlib.sha256(" ".join(about).encode()).hexdigest()
    return f"{about[0]}.{digest[:16]}"


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
