"""Waits until all engines of a release have ready pods of the current revision. `orca wait`, and in a pod:

    python -m orca_scheduler.discovery.wait orca --timeout 600 --patience 30

Exit codes: 0; 1 with a sentence on standard error; 2 for a wrong command line. Helm's hook and `helm test` run it. It
says nothing else, since Helm shows the whole log, and Helm 4 as one line. Helm waits until the pod of its hook has
succeeded. Kubelet reports that 1.2 s or more after the process has ended; where ORCA_OWN_POD names the pod, the process
reports it. A variable and not an argument: an image that is older than the chart does not read it, and goes on.
It judges the objects itself, so it needs no scheduler, and nothing that was written before the last change misleads it.
"""

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress

from orca_common.environment import own_pod
from orca_common.errors import DeadlineExceeded, FailedPrecondition, OrcaError, Unavailable

from .engines import engines
from .kubernetes import Collection, Kubernetes, own_namespace
from .pods import PODS_PER_ENGINE, Manifest, worker_pod, worker_set
from .rollout import Standing, State, standing

RULES = (  # as those of the scheduler: all that is asked
    ("apps", "statefulsets", ("list",)),
    ("", "pods", ("list",)),
    ("", "events", ("list",)),
)
OWN_RULES = (("", "pods/status", ("patch",)),)  # of its own pod alone, which ORCA_OWN_POD names
TIMEOUT, PATIENCE = 600.0, 30.0  # seconds
LOOK = 0.2  # seconds between two looks: what a good install waits for at most
BOUNDS = "wait.timeoutSeconds and wait.patienceSeconds of the chart are the bounds; wait.enabled=false turns this off"

List = Callable[[Collection], Awaitable[Iterable[Manifest]]]


async def look(list_of: List, release: str, now: float) -> Standing:
    """The standing of the current revision of a release's workers; `now` in seconds since 1970.

    Raises FailedPrecondition when there are no workers of it, Unavailable when Kubernetes does not tell.
    """
    labels = f"app.kubernetes.io/instance={release},app.kubernetes.io/component=worker"
    found = list(await list_of(Collection("statefulsets", labels=labels)))
    if not found:
        raise FailedPrecondition(f"release {release}: it has no workers in this namespace")
    workers = worker_set(found[0])
    size = workers.annotations.get(PODS_PER_ENGINE, "")
    if not size.isdecimal() or not int(size):
        raise FailedPrecondition(f"{workers.name}: the annotation {PODS_PER_ENGINE} is missing; upgrade the chart")
    pods = [worker_pod(manifest, workers) for manifest in await list_of(Collection("pods", labels=workers.selector))]
    wanted = engines(workers, [pod for pod in pods if pod is not None], int(size))
    stands = standing(workers, wanted, now)
    if stands.state is State.PROGRESSING and any(pod is None for engine in wanted for pod in engine.pods):
        about = f"involvedObject.name={workers.name},reason=FailedCreate"  # a quota, say, has no room for a pod
        refusals = list(await list_of(Collection("events", fields=about)))
        if refusals:
            newest = max(refusals, key=lambda event: event.get("lastTimestamp") or "")
            return Standing(State.STOPPED, f"{workers.revision}: {newest.get('message', '')}")
    return stands


class Waiting:
    """Decides after each look whether to go on. Times are seconds on any one clock."""

    def __init__(self, begun: float, timeout: float, patience: float) -> None:
        self._until, self._timeout, self._patience = begun + timeout, timeout, patience
        self._stopped: float | None = None  # since when the rollout has been seen as stopped

    def over(self, stands: Standing, now: float) -> bool:
        """Whether the rollout has finished.

        Raises FailedPrecondition when it has been stopped for `patience` seconds: a registry may fail once, and a node
        may be on its way. Raises DeadlineExceeded at the end of `timeout`.
        """
        if stands.state is State.FINISHED:
            return True
        if stands.state is State.PROGRESSING:
            self._stopped = None
        elif self._stopped is None:
            self._stopped = now
        if self._stopped is not None and now - self._stopped >= self._patience:
            raise FailedPrecondition(f"the rollout has stopped: {stands.message}")
        if now >= self._until:
            raise DeadlineExceeded(f"the rollout has not finished after {self._timeout:g} s: {stands.message}")
        return False


async def wait(list_of: List, release: str, timeout: float, patience: float, *, quiet: bool = False) -> None:
    """Returns when the rollout has finished. Raises as `look` and `Waiting.over` do.

    Prints each new sentence about it, unless it is to be quiet. A server that does not answer is asked again until
    `timeout`.
    """
    loop, said = asyncio.get_running_loop(), ""
    waiting = Waiting(loop.time(), timeout, patience)
    while True:
        try:
            stands = await look(list_of, release, time.time())
        except Unavailable as error:
            stands = Standing(State.PROGRESSING, str(error))
        if stands.message != said and not quiet:
            said = stands.message
            print(said, flush=True)
        if waiting.over(stands, loop.time()):
            return
        await asyncio.sleep(LOOK)


async def _wait(release: str, namespace: str | None, timeout: float, patience: float, pod: str | None) -> None:
    kubernetes = Kubernetes(namespace or own_namespace())

    async def list_of(collection: Collection) -> Iterable[Manifest]:
        return (await kubernetes.list(collection)).objects.values()

    try:
        await wait(list_of, release, timeout, patience, quiet=True)
        if pod is not None:
            with suppress(Unavailable):  # kubelet says it later
                await kubernetes.patch_pod_status(pod, {"status": {"phase": "Succeeded"}})
    finally:
        await kubernetes.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m orca_scheduler.discovery.wait", description=__doc__)
    parser.add_argument("release", help="name of the release")
    parser.add_argument("--namespace", help="its namespace (default: that of the pod)")
    parser.add_argument("--timeout", type=float, default=TIMEOUT, help="seconds for all (default: %(default)g)")
    parser.add_argument("--patience", type=float, default=PATIENCE, help="of a stop (default: %(default)g)")
    given = parser.parse_args(arguments)
    try:
        asyncio.run(_wait(given.release, given.namespace, given.timeout, given.patience, own_pod()))
    except OrcaError as error:
        print(f"{error} ({BOUNDS})", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # Helm waits for the end, and an interpreter takes 0.15 s to be taken apart
