"""The thread that drives this rank's GPU. It does its work in order, one piece at a time.

It may wait for the data plane, never for the control plane. On a GPU it launches an iteration and goes on. Another
thread, the reader, waits for the tokens and reports them, so that the next iteration is launched meanwhile.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import Queue, SimpleQueue
from typing import NamedTuple, TypeVar

from orca.v1 import worker_pb2
from orca_common.errors import Unavailable, reason_of

from ..data_plane.plane import PeerLost
from ..iteration.model import Output
from .stage import Stage

T = TypeVar("T")

log = logging.getLogger(__name__)


class Accepted(NamedTuple):
    """A queued iteration, and when the controller received it (ns of the wall clock)."""

    iteration: worker_pb2.Iteration
    received: int


class GpuThread:
    """Runs iterations and calls. `report` is called with the result of each iteration, in their order: in this thread,
    or in the reader.

    A failed iteration is the last one, unless a neighbour was lost: then the rank can form again.
    """

    def __init__(self, stage: Stage, report: Callable[[worker_pb2.Report], None]) -> None:
        self._stage, self._report = stage, report
        self._queue: SimpleQueue[Accepted | Callable[[], None] | None] = SimpleQueue()  # bounded by MAX_WAITING
        self.failed = False  # nothing is launched any more
        self._reported_failure = False  # nothing is reported any more
        self._stopped = False
        self.iteration = 0  # number of the last one that was run
        self._reader: Reader | None = None  # from the first output that came later
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
                if self._reader is not None:
                    self._reader.wait_idle()
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
                if self._reader is not None:
                    self._reader.end()
                return

    def _run(self, iteration: worker_pb2.Iteration, received: int, following: worker_pb2.Iteration | None) -> None:
        if self.failed:
            return
        report = worker_pb2.Report()
        result, times = report.iteration, report.iteration.times
        result.epoch, result.number = iteration.epoch, iteration.number
        times.iteration, times.received, times.taken = iteration.number, received, time.time_ns()
        times.control_bytes = iteration.ByteSize()
        try:
            launched = self._stage.launch(iteration, times, following)
            read, comes_later = launched.read, launched.output.later is not None
        except Exception as error:
            self.failed = not isinstance(error, PeerLost)
            read, comes_later = partial(fail, error), False
        if comes_later and self._reader is None:
            self._reader = Reader()
        finish = partial(self._finish, read, report)
        if self._reader is None:
            finish()
        else:
            self._reader.put(finish)

    def _finish(self, read: Callable[[], Output], report: worker_pb2.Report) -> None:
        """Reads an iteration's output and reports. In the reader, if there is one."""
        if self._reported_failure:
            return
        result = report.iteration
        where = {"epoch": result.epoch, "iteration": result.number}
        try:
            output = read()
            put_output(result, output)
        except PeerLost as error:
            log.warning("iteration abandoned: %s", error, extra=where)
            result.error, result.peer_lost = str(error), True
        except Exception as error:
            # The rank's memory cannot be trusted any more: the master hears why, and the process ends.
            self.failed = self._reported_failure = True
            log.exception("iteration failed", extra=where)
            result.error = reason_of(error)
        else:
            self.iteration = result.number
        if result.error:
            result.times.sent = time.time_ns()
        self._report(report)


def put_output(result: worker_pb2.IterationReport, output: Output) -> None:
    """Writes what an iteration has made into its report."""
    result.token_ids.extend(output.token_ids)
    result.logprobs.extend(output.logprobs)
    if output.not_finite:
        result.not_finite.extend(output.not_finite)
    if output.stuck:
        result.stuck.extend(output.stuck)
    if output.waiting:
        result.waiting.extend(output.waiting)
    if output.made:
        result.made.extend(output.made)
    for index, scores in output.tops.items():
        result.tops.add(index=index, scores=scores)
    for index, scores in output.prompts.items():
        result.prompts.add(index=index, scores=scores)


def fail(error: Exception) -> Output:
    raise error


class Reader:
    """Carries out calls one after the other, in a thread of its own. They wait for the device, and for nothing else."""

    def __init__(self) -> None:
        self._queue: Queue[Callable[[], None] | None] = Queue()  # bounded by MAX_WAITING
        self._thread = threading.Thread(target=self._main, name="reader", daemon=True)
        self._thread.start()

    def put(self, read: Callable[[], None]) -> None:
        self._queue.put(read)

    def wait_idle(self) -> None:
        """Waits until everything that was put is done."""
        self._queue.join()

    def end(self) -> None:
        """Ends the thread after everything that was put."""
        self._queue.put(None)
        self._thread.join()

    def _main(self) -> None:
        while (read := self._queue.get()) is not None:
            try:
                read()
            except Exception:  # the next ones must be done too, or `wait_idle` never returns
                log.exception("an iteration was not reported")
            finally:
                self._queue.task_done()
