"""Candidates from the pods of a StatefulSet in Kubernetes."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Never

from .candidates import Candidate
from .engines import engines, spares, why_spare
from .following import Follower
from .kubernetes import Collection, Kubernetes, Trouble
from .pods import Manifest, WorkerPod, WorkerSet, worker_pod, worker_set
from .rollout import State, gets_other_model, outdated_pods, progress, rollout
from .size import Size, marks, size_of
from .telling import Teller, View


class StatefulSetDiscovery:
    """Ordinal o of the StatefulSet belongs to engine o // pods_per_engine.

    Its candidates change only with what Kubernetes was seen to say: an API server that is away, and a StatefulSet that
    is not there, leave them as they are.
    """

    def __init__(
        self,
        kubernetes: Kubernetes,
        statefulset: str,
        pods_per_engine: int,
        port: int,
        shape: str = "",
        refused: Callable[[], Mapping[str, str | None]] = dict,
        scales: bool = False,
    ) -> None:
        """`port` is that of the supervisors, `shape` that of the engines, as the annotation SHAPE has it.

        `refused` tells of the engines that this scheduler masters why their ranks refuse to form; None: they do not.
        scales: schedulers take engines away, which finish before (`size`).
        """
        self._scales = scales
        self._kubernetes, self._pods_per_engine, self._port = kubernetes, pods_per_engine, port
        self._one = Collection("statefulsets", fields=f"metadata.name={statefulset}")
        self._described = f"StatefulSet {kubernetes.namespace}/{statefulset}"
        self._sets = Follower(kubernetes, lambda: self._one, self._look)
        self._pods = Follower(kubernetes, self._pods_of_set, self._look)
        self._teller = Teller(kubernetes, shape, refused)
        self._workers: WorkerSet | None = None  # as it was seen last
        self._found = asyncio.Event()  # there was a StatefulSet
        self._deleted: set[str] = set()  # uids of pods whose deletion Kubernetes has accepted
        self._candidates: list[Candidate] | None = None
        self._discovered: Callable[[Sequence[Candidate]], None] = lambda _: None
        self._notices: tuple[str, ...] = ()

    @property
    def unready(self) -> str | None:
        if self._candidates is not None:
            return None
        return next(iter(self._notices), f"{self._described} has not been read yet")

    @property
    def notices(self) -> Sequence[str]:
        return self._notices

    async def run(self, discovered: Callable[[Sequence[Candidate]], None]) -> Never:
        self._discovered = discovered
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._sets.run())
            tasks.create_task(self._teller.run())
            tasks.create_task(self._teller.look())
            await self._found.wait()
            tasks.create_task(self._pods.run())
        raise AssertionError("none of the tasks ends by itself")

    async def replace(self, engine: str) -> None:
        """Deletes the engine's outdated pods, if a fresh look at all objects says that it is its turn.

        Otherwise `run` will soon tell another candidate.
        """
        sets = (await self._kubernetes.list(self._one)).objects
        if not sets:
            raise Trouble(f"{self._described} is not there")
        workers = worker_set(next(iter(sets.values())))
        pods = await self._kubernetes.list(Collection("pods", labels=workers.selector))
        turn = self._view(workers, pods.objects).rollout.turn
        if turn is None or turn.name != engine:
            return
        outdated = outdated_pods(turn, workers)
        try:
            for pod in outdated:
                await self._kubernetes.delete_pod(pod.name, pod.uid)
                self._deleted.add(pod.uid)
        finally:
            self._look()
        self._teller.replaced(workers, turn, outdated)

    def unfinished(self, engine: str, seconds: float) -> None:
        assert self._workers is not None, "an engine is known before it loses a pod"
        self._teller.unfinished(self._workers, engine, seconds)

    @property
    def stopped(self) -> bool | None:
        """Whether an update of the workers has stopped; None before that is known."""
        state = self._teller.state
        return None if state is None else state is State.STOPPED

    @property
    def size(self) -> Size | None:
        """The number of engines that there are to be, as it was seen last; None before."""
        return None if self._workers is None else size_of(self._workers, self._pods_per_engine)

    async def resize(self, seen: Size, engines: int, beginning: int, why: str) -> None:
        workers = self._workers
        assert workers is not None, "the size was seen before it is changed"
        pods = engines * self._pods_per_engine
        if pods == seen.pods:
            await self._kubernetes.annotate_set(workers.name, workers.uid, marks(seen, beginning))
        elif await self._kubernetes.scale_set(workers.name, workers.uid, seen.pods, pods):
            self._teller.scaled(workers, seen, pods, why)

    async def close(self) -> None:
        await self._kubernetes.close()

    def _pods_of_set(self) -> Collection:
        assert self._workers is not None, "pods are followed once a StatefulSet was found"
        return Collection("pods", labels=self._workers.selector)

    def _look(self) -> None:
        """Computes the candidates and the messages from the objects as they are known now."""
        sets, pods, notices = self._sets.objects, self._pods.objects, list[str]()
        if sets:
            self._workers = worker_set(next(iter(sets.values())))
            self._found.set()
        elif sets is not None:
            notices.append(f"{self._described} is not there: its engines stay as they are")
        notices += dict.fromkeys(str(one.trouble) for one in (self._sets, self._pods) if one.trouble)
        if sets and pods is not None and self._workers is not None:
            self._deleted &= pods.keys()
            view = self._view(self._workers, pods)
            notices += [why_spare(pod, view.workers, self._pods_per_engine) for pod in view.spares]
            notices += [sentence for sentence in [progress(view.rollout)] if sentence]
            self._teller.tell(view)
            turn = view.rollout.turn
            begin = size_of(view.workers, self._pods_per_engine).beginning if self._scales else len(view.engines)
            candidates = [
                engine.candidate(
                    self._port,
                    engine == turn,
                    engine == turn and gets_other_model(engine, view.workers),
                    ending=number >= begin,
                )
                for number, engine in enumerate(view.engines)
            ]
            if candidates != self._candidates:
                self._candidates = candidates
                self._discovered(candidates)
        self._notices = tuple(notices)

    def _view(self, workers: WorkerSet, manifests: dict[str, Manifest]) -> View:
        read = (worker_pod(manifest, workers) for manifest in manifests.values())
        pods = [self._as_deleted(pod) for pod in read if pod is not None]
        wanted = engines(workers, pods, self._pods_per_engine)
        left = spares(workers, pods, self._pods_per_engine)
        return View(workers, self._pods_per_engine, tuple(wanted), tuple(left), rollout(workers, wanted))

    def _as_deleted(self, pod: WorkerPod) -> WorkerPod:
        """The pod, as a deleted one if that is known before a watch has said so: no master may dial it any more."""
        if pod.uid not in self._deleted:
            return pod
        return replace(pod, ip="", leaving=True, ready=False, trouble="is being deleted", failing=False)
