"""A scheduler's metrics of an engine (the table is in `orca_common.metrics`)."""

import time
from collections.abc import Sequence

from orca.v1 import worker_pb2 as pb
from orca_common.metrics import CAUSES, Metrics

from ..core.core import ScheduleBatch

SECOND = 1e9  # nanoseconds


class Flight:
    """An iteration until its tokens and the times of all its ranks are back, on the wall's clock in nanoseconds."""

    __slots__ = ("returned", "sent", "times")

    def __init__(self, sent: int) -> None:
        self.sent, self.returned = sent, 0
        self.times: Sequence[pb.StageTimes] | None = None


class EngineMetrics:
    """One engine's values. The counters are the process's: they go on when this scheduler masters the engine again."""

    def __init__(self, metrics: Metrics, engine: str, stages: int, decodes: bool = False) -> None:
        """decodes: it goes on with what other engines have begun."""
        self._batch = metrics.histogram("orca_batch_size", engine)
        self._positions = metrics.histogram("orca_iteration_positions", engine)
        self._cached = metrics.counter("orca_cached_tokens_total", engine)
        self._preemptions = metrics.counter("orca_preemptions_total", engine)
        self._handed_over = metrics.counter("orca_handed_over_total", engine)
        self._pulls = {
            outcome: metrics.counter("orca_pulls_total", engine, outcome) for outcome in ("done", "failed", "skipped")
        }
        self._pulled_bytes = metrics.counter("orca_pulled_bytes_total", engine)
        self._begun_again = metrics.counter("orca_decode_initiations_total", engine)
        self._decodes = decodes
        self._scheduler, self._control, self._data, self._compute = (
            metrics.histogram("orca_iteration_seconds", engine, part)
            for part in ("scheduler", "control", "data", "compute")
        )
        self._active = metrics.counter("orca_engine_active_seconds_total", engine)
        self._busy = [metrics.counter("orca_stage_busy_seconds_total", engine, str(n)) for n in range(stages)]
        self._tokens = metrics.counter("orca_engine_tokens_total", engine)
        self._commit = metrics.histogram("orca_commit_seconds", engine)
        self._violations = metrics.counter("orca_invariant_violations_total", engine)
        self._recoveries = {cause: metrics.counter("orca_recoveries_total", engine, cause) for cause in CAUSES}
        self._flights: dict[int, Flight] = {}
        self._in_flight = 0
        self._since = 0.0  # until when the active time is counted, while a batch is in flight

    def scheduled(self, action: ScheduleBatch, now: float) -> None:
        """A batch is sent. now: on the loop's clock."""
        self._batch.observe(len(action.members))
        self._positions.observe(action.positions)
        self._preemptions.add(len(action.preempted))
        if action.admitted:
            self._cached.add(sum(member.start for member in action.members[: action.admitted]))
            if self._decodes:
                self._begun_again.add(action.admitted)  # what is pulled has its row before
        if not self._in_flight:
            self._since = now
        self._in_flight += 1
        self._flights[action.iteration] = Flight(time.time_ns())

    def returned(self, iteration: int, ago: float, stepped: float, now: float) -> None:
        """A batch's tokens came at `now` on the loop's clock, `ago` seconds before this call.

        stepped: the seconds that the core took to make the next batch.
        """
        self._scheduler.observe(stepped)
        self._active.add(max(now - self._since, 0.0))
        self._since, self._in_flight = now, self._in_flight - 1
        flight = self._flights.get(iteration)
        if flight is not None:
            flight.returned = time.time_ns() - round(ago * SECOND)
            self._complete(iteration, flight)

    def timed(self, iteration: int, times: Sequence[pb.StageTimes]) -> None:
        """All ranks have reported their times."""
        flight = self._flights.get(iteration)
        if flight is not None:
            flight.times = times
            self._complete(iteration, flight)

    def _complete(self, iteration: int, flight: Flight) -> None:
        """Observes an iteration once both are there."""
        times = flight.times
        if times is None or not flight.returned:
            return
        del self._flights[iteration]
        stages = len(self._busy)
        computed, handed_on = [0] * stages, [0] * stages  # by the slowest rank of each stage
        received, sent = 0, 0  # by the first stage's controller, and by the last rank of the last stage
        for rank in times:
            stage = rank.stage
            computed[stage] = max(computed[stage], rank.computed - rank.started)
            handed_on[stage] = max(handed_on[stage], rank.sent - rank.computed)
            if stage == 0 and rank.tensor_rank == 0:
                received = rank.received
            if stage == stages - 1:
                sent = max(sent, rank.sent)
        for counter, busy in zip(self._busy, computed, strict=True):
            counter.add(busy / SECOND)
        self._compute.observe(sum(computed) / SECOND)
        self._data.observe(sum(handed_on) / SECOND)
        # Clocks of different machines may disagree by more than a message takes.
        there, back = max(received - flight.sent, 0), max(flight.returned - sent, 0)
        self._control.observe((there + back) / SECOND)

    def handed_over(self, requests: int) -> None:
        """Requests leave with their first token."""
        self._handed_over.add(requests)

    def pulled(self, size: int, done: bool) -> None:
        """The pull of a request has ended on all ranks, which took this number of bytes."""
        self._pulls["done" if done else "failed"].add()
        self._pulled_bytes.add(size)

    def not_pulled(self, requests: int) -> None:
        """Requests begin here, and none of their pulls was tried."""
        self._pulls["skipped"].add(requests)

    def committed(self, seconds: float, tokens: int) -> None:
        """The pool has answered a commit, by which it has this many tokens more."""
        self._commit.observe(seconds)
        self._tokens.add(tokens)

    def lost(self, cause: str) -> None:
        """The running engine's ranks were given up: what is in flight will not return."""
        self._flights.clear()
        self._in_flight = 0
        self._recoveries[cause].add()

    def violated(self, count: int) -> None:
        """The core has broken invariants."""
        self._violations.add(count)
