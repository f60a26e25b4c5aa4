"""The control lane: the Run call over which the engine's master and this rank speak."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TypeVar

from orca.v1 import worker_pb2
from orca_common.errors import Aborted, FailedPrecondition, InvalidArgument, OrcaError
from orca_common.lanes.server import parsed
from orca_common.protocol import TERM_METADATA
from orca_common.statuses import internal

SILENCE = 5.0  # seconds without a message from the master, who sends two a second, until the lane counts as not held
TERM_AHEAD = 86_400e6  # microseconds that a term may lie ahead of this machine's clock: the pool makes terms of its own
MAX_TIMES = 256  # iterations whose times are kept for the next heartbeat


M = TypeVar("M", worker_pb2.ControlMessage, worker_pb2.Iteration)
log = logging.getLogger(__name__)

Over = asyncio.Future[OrcaError | None]  # ends with the error that ended a stream; None: it ended in order


def end(over: Over, error: OrcaError | None) -> None:
    """Ends a stream. The first end counts."""
    if not over.done():
        over.set_result(error)


def hearer(kind: type[M], take: Callable[[M], None], over: Over) -> Callable[[bytes], None]:
    """Gives a stream's messages to `take`, until the stream is over. What `take` raises ends it.

    A message that comes twice in a row counts once. gRPC doubles none. Where something between two processes does, an
    iteration that came twice would otherwise look like one of another time, and cost the engine its epoch.
    """
    before = b""

    def heard(raw: bytes) -> None:
        nonlocal before
        if over.done() or raw == before:
            return
        before = raw
        try:
            take(parsed(kind, raw))
        except OrcaError as error:
            log.warning("%s refused: %s", kind.DESCRIPTOR.name, error)
            end(over, error)
        except Exception as error:  # without an end, the other side would only find this rank silent
            end(over, internal(error))

    return heard


class Lane:
    """One Run call: `send` writes a report, without waiting."""

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send = send
        self._times = worker_pb2.Times()  # of iterations that went well; they wait so that tokens go first
        self.over: Over = asyncio.get_running_loop().create_future()
        self.ended = asyncio.Event()  # the call is over
        # What the status port's thread reads too: when the master was last heard, by time.monotonic(), and the epoch
        # under which it says that the engine runs. 0: it does not run.
        self.heard = time.monotonic()
        self.epoch = 0

    def put(self, report: worker_pb2.Report) -> None:
        if not self.over.done():
            self._send(report.SerializeToString())

    def keep_times(self, times: worker_pb2.StageTimes, idle: bool) -> None:
        """Sends an iteration's times at the next heartbeat, or at once when many are kept or the rank is idle."""
        self._times.stages.append(times)
        if idle or len(self._times.stages) >= MAX_TIMES:
            self._put_times()

    def answer(self, heartbeat: worker_pb2.Heartbeat, iteration: int) -> None:
        """Sends the times that are kept, then the heartbeat back, with the last iteration that was run."""
        self.epoch = heartbeat.epoch
        self._put_times()
        self.put(worker_pb2.Report(heartbeat=worker_pb2.Heartbeat(number=heartbeat.number, iteration=iteration)))

    def _put_times(self) -> None:
        if self._times.stages:
            self.put(worker_pb2.Report(times=self._times))
            self._times = worker_pb2.Times()

    def not_held(self, epoch: int) -> str | None:
        """Why no master runs this epoch over the lane; None: one does. Callable from any thread."""
        silent = time.monotonic() - self.heard
        if silent > SILENCE:
            return f"its master has been silent for {silent:.0f} s"
        if self.epoch == epoch:
            return None
        return "its master waits for the engine's other ranks"

    def end(self, error: OrcaError | None) -> None:
        """Ends the call after everything that was put, with an error or, with None, in order. The first end counts."""
        end(self.over, error)


class Lanes:
    """Chooses the lane that counts: the newest one, of the master with the highest term. A newer one ends the older."""

    def __init__(self) -> None:
        self.term = 0  # the highest that this rank has seen
        self.current: Lane | None = None

    def observe_term(self, term: int, lane: Lane | None = None) -> bool:
        """Checks the term of a message, which `lane` has brought. True: it is higher than any before.

        Raises FailedPrecondition when it is old, and for one that no pool has given: it would shut all masters out.
        """
        if term < self.term:
            raise FailedPrecondition(f"term {term} is old: this rank has seen {self.term}")
        if term > time.time() * 1e6 + TERM_AHEAD:
            raise FailedPrecondition(f"term {term} is none that a pool gives: it is a day ahead of the clock")
        if term == self.term:
            return False
        self.term = term
        if self.current is not lane:
            self.end(FailedPrecondition(f"term {term} has taken over"))
        return True

    def open(self, lane: Lane, term: str | bytes | None) -> None:
        """Makes a lane the current one. `term`: its call's TERM_METADATA, if there was any."""
        if term is not None:
            if not term.isdigit():
                raise InvalidArgument(TERM_METADATA, "is not a number")
            self.observe_term(int(term))
        self.end(Aborted("a newer Run took over"))
        self.current = lane

    def check_current(self, lane: Lane) -> None:
        if self.current is not lane:
            raise Aborted("a newer Run took over")

    def end(self, error: OrcaError) -> None:
        """Ends the current lane, if there is one."""
        if self.current is not None:
            self.current.end(error)
            self.current = None

    def closed(self, lane: Lane) -> None:
        """Forgets a lane whose call is over."""
        lane.ended.set()
        if self.current is lane:
            self.current = None
