"""The thread that drives this rank's GPU. It does its work in order, one piece at a time.

It may wait for the data plane, never for the control plane.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import NamedTuple, TypeVar

from orca.v1 import worker_pb2
from orca_common.errors import OrcaError, Unavailable

from .data_plane import PeerLost
from .stage import Stage

T = TypeVar("T")

log = logging.getLogger(__name__)


class Accepted(NamedTuple):
    """A queued iteration, and when the controller received it (ns of the wall clock)."""

    iteration: worker_pb2.Iteration
    received: int


class GpuThread:
    """Runs iterations and calls. `report` is called in this thread with the result of each iteration.

    A failed iteration is the last one, unless a neighbour was lost: then the rank can form again.
    """

    def __init__(self, stage: Stage, report: Callable[[worker_pb2.Report], None]) -> None:
        self._stage, self._report = stage, report
        self._queue: SimpleQueue[Accepted | Callable[[], None] | None] = SimpleQueue()  # bounded by MAX_WAITING
        self.failed = False
        self._stopped = False
        self.iteration = 0  # number of the last one that was run
        self._thread = threading.Thread(target=self._main, name="gpu", daemon=True)
        self._thread.start()

    def submit(self, iteration: worker_pb2.Iteration, received: int) -> None:
        """Queues an iteration that the controller received at `received` (ns of the wall clock)."""
        self._queue.put(Accepted(iteration, received))

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Queues a call after all iterations. The future raises Unavailable when an iteration has failed by then,
        or when the thread was stopped before.
        """
        future: Future[T] = Future()
        if self._stopped:
            future.set_exception(Unavailable("this rank is leaving"))
            return future

        def work() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                if self.failed:
                    raise Unavailable("this rank has failed and is about to end")
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        self._queue.put(work)
        return future

    def stop(self) -> None:
        """Ends the thread after everything that is queued."""
        self._stopped = True
        self._queue.put(None)

    def join(self, timeout: float) -> bool:
        """Waits for the end of the thread. False: it still runs after `timeout` seconds."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _main(self) -> None:
        come: deque[Accepted | Callable[[], None] | None] = deque()  # taken from the queue, not done yet
        while True:
            while not come or not self._queue.empty():
                come.append(self._queue.get())
            work, following = come.popleft(), come[0] if come else None
            if isinstance(work, Accepted):
                self._run(*work, following.iteration if isinstance(following, Accepted) else None)
            elif work is not None:
                work()
            else:
                return

    def _run(self, iteration: worker_pb2.Iteration, received: int, following: worker_pb2.Iteration | None) -> None:
        if self.failed:
            return
        report = worker_pb2.Report()
        result, times = report.iteration, report.iteration.times
        result.epoch, result.number = iteration.epoch, iteration.number
        times.iteration, times.received, times.taken = iteration.number, received, time.time_ns()
        times.control_bytes = iteration.ByteSize()
        where = {"epoch": iteration.epoch, "iteration": iteration.number}
        try:
            output = self._stage.run(iteration, times, following)
        except PeerLost as error:
            log.warning("iteration abandoned: %s", error, extra=where)
            result.error, result.peer_lost = str(error), True
        except Exception as error:
            # The rank's memory cannot be trusted any more: the master hears why, and the process ends.
            self.failed = True
            log.exception("iteration failed", extra=where)
            result.error = str(error) if isinstance(error, OrcaError) else f"{type(error).__name__}: {error}"
        else:
            self.iteration = iteration.number
            result.token_ids.extend(output.token_ids)
            result.logprobs.extend(output.logprobs)
            result.not_finite.extend(output.not_finite)
            for one in output.scores:
                result.scores.add(member=one.member, top=one.top, prompt=one.prompt)
        if result.error:
            times.sent = time.time_ns()
        self._report(report)
