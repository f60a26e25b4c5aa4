"""Divides a pipeline's time: the stages of a run, from the journals of its engine masters (paper Figure 8).

Each rank reports five moments of an iteration on its own wall clock (one machine, or clocks that NTP keeps together):
`received`, the control message came; `taken`, the GPU thread took it; `started`, the batch was built and its data had
come; `computed`; `sent`. It also reports how long it `waited` for data before `started`. A rank's time is divided into
four shares, which add up to 1:

busy                    from taken to sent without the wait: building the batch, the layers, sending their output
waiting for upstream    the `waited` of each iteration: its control message had come, another rank's data had not
waiting for scheduler   idle while the next batch was ready (see below) and had not been taken
no work                 idle otherwise: no request was waiting, or n_workers batches were in flight

The batch of an iteration is ready as soon as one of its requests is waiting or returned, and fewer than n_workers
batches are in flight. A request is returned when the last stage has sent its token. So the token's way to the
scheduler, the selection and the control message's way count as waiting for the scheduler, not as lack of work. With a
run-ahead, one batch more may be in flight, and a request counts as returned when its batch is the oldest in flight.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from orca_scheduler.core.core import Arrived
from orca_scheduler.master.journal import CoreStep, Heading, Line, Note, files_in, read, request_names, scheduled


class Times(NamedTuple):
    """One rank's part in one iteration.

    Moments in ns of the wall clock, bytes of the control message and of the data that it sent, and the wait in ns."""

    stage: int
    tensor_rank: int
    received: int
    taken: int
    started: int
    computed: int
    sent: int
    control_bytes: int
    data_bytes: int
    waited: int

    @property
    def prepared(self) -> int:
        """When the batch was built, and the wait for data began. (Stage 0 waits for tokens before it builds the batch;
        the sums are the same.)"""
        return self.started - self.waited


class Member(NamedTuple):
    """A request's part in an iteration."""

    claim: int
    phase: str
    tokens: int  # rows of the flat batch


@dataclass
class Iteration:
    number: int
    members: tuple[Member, ...]
    times: dict[tuple[int, int], Times] = field(default_factory=dict)  # by stage and tensor rank

    @property
    def returned(self) -> int:
        """When the last stage had sent the tokens, in ns of the wall clock."""
        return self.times[max(self.times)[0], 0].sent


@dataclass
class Life:
    """An engine from a formation to its loss or end, with the iterations that all ranks have reported."""

    epoch: int
    formed: int  # ns of the wall clock
    tp: int
    pp: int
    n_workers: int
    run_ahead: int
    iterations: list[Iteration] = field(default_factory=list)
    arrived: dict[int, int] = field(default_factory=dict)  # claim -> ns of the wall clock
    lost: str | None = None  # the verdict

    def ready(self) -> dict[int, int]:
        """The moment at which each iteration's batch could have been scheduled, in ns of the wall clock."""
        back: dict[int, int] = {}  # claim -> when its token was sent
        ready: dict[int, int] = {}
        most = self.n_workers + self.run_ahead  # batches in flight
        for n, iteration in enumerate(self.iterations):
            waiting = [back.get(m.claim, self.arrived.get(m.claim, self.formed)) for m in iteration.members]
            room = self.iterations[n - most].returned if n >= most else self.formed
            ready[iteration.number] = max(min(waiting, default=self.formed), room)
            before = n - self.run_ahead  # when this one has returned, the requests may be scheduled again
            returned = self.iterations[before].returned if before >= 0 else self.formed
            back |= {m.claim: returned for m in iteration.members}
        return ready


@dataclass
class Run:
    engine: str
    lives: list[Life]
    names: dict[int, str]  # claim -> request id

    @property
    def last(self) -> Life | None:
        """The last life with an iteration; None without such a life."""
        return next((life for life in reversed(self.lives) if life.iterations), None)


def read_run(run_dir: Path, engine: str = "engine-0") -> Run:
    """Reads a run from its folder, which may still be written. A run without a journal of the engine has no lives."""
    run = Run(engine, [], {})
    for file in files_in(run_dir):
        if file.engine == engine:
            _read(read(file.path), run)
    return run


def _read(lines: Iterable[Line], run: Run) -> None:
    """Adds a journal's lives. Its events have the core's clock; a note of each formation has both clocks."""
    n_workers, run_ahead, offset = 1, 0, 0
    arrived: dict[int, float] = {}  # on the core's clock
    open_iterations: dict[int, Iteration] = {}
    for line in lines:
        match line:
            case Heading(numbers):
                n_workers, run_ahead = numbers["n_workers"], numbers["run_ahead"]
            case Note({"formed": epoch, "wall": wall, "now": now, "tp": tp, "pp": pp}):
                offset = wall - round(now * 1e9)
                run.lives.append(Life(epoch, wall, tp, pp, n_workers, run_ahead))
                open_iterations.clear()
            case Note({"lost": verdict}) if run.lives:
                run.lives[-1].lost = verdict
            case Note({"iteration": number, "times": times}) if number in open_iterations and run.lives:
                iteration = open_iterations.pop(number)
                iteration.times = {(t.stage, t.tensor_rank): t for t in (Times(*values) for values in times)}
                life = run.lives[-1]
                life.iterations.append(iteration)
                life.arrived |= {
                    m.claim: round(arrived[m.claim] * 1e9) + offset for m in iteration.members if m.claim in arrived
                }
            case Note():
                run.names |= request_names([line])
            case CoreStep(event):
                if isinstance(event, Arrived):
                    arrived |= {arrival.claim: event.now for arrival in event.requests}
                for batch in scheduled([line]):
                    members = tuple(Member(m.claim, m.phase.value, m.count) for m in batch.members)
                    open_iterations[batch.iteration] = Iteration(batch.iteration, members)
            case _:
                pass


# -- shares


@dataclass(frozen=True)
class Shares:
    """The work of a stage in a window, as shares of the time. They add up to 1."""

    busy: float
    upstream: float
    scheduler: float
    no_work: float


def filled(life: Life) -> tuple[int, int]:
    """The window in which the pipeline was full: from the last stage's first iteration to the last token, in ns of the
    wall clock."""
    last = life.pp - 1, 0
    return life.iterations[0].times[last].started, life.iterations[-1].times[last].sent


def shares(life: Life, window: tuple[int, int] | None = None) -> list[Shares]:
    """The shares of each stage, the mean of its tensor ranks, in a window; in `filled` if none is given."""
    begin, end = window or filled(life)
    ready = life.ready()
    result = []
    for stage in range(life.pp):
        sums = [0.0] * 4
        for rank in range(life.tp):
            for kind, start, stop in _spans(life, (stage, rank), ready, end):
                sums[kind] += max(0, min(stop, end) - max(start, begin))
        whole = max(1, end - begin) * life.tp
        result.append(Shares(*(part / whole for part in sums)))
    return result


def _spans(life: Life, rank: tuple[int, int], ready: dict[int, int], end: int) -> Iterator[tuple[int, int, int]]:
    """A rank's time in spans without gaps: (index of the share, begin, end)."""
    before = life.formed
    for iteration in life.iterations:
        t = iteration.times[rank]
        due = min(max(ready[iteration.number], before), t.taken)
        yield 3, before, due
        yield 2, due, t.taken
        yield 0, t.taken, t.prepared
        yield 1, t.prepared, t.started
        yield 0, t.started, t.sent
        before = t.sent
    yield 3, before, end


# -- control and data


@dataclass(frozen=True)
class Planes:
    """The control plane and the data plane, apart.

    Bytes are an iteration's mean over all ranks. `hops` are the control message's seconds (p50, p99) from each stage's
    controller to the next one's, `whole_way` those from the first controller to the last."""

    control_bytes: float
    data_bytes: float
    hops: list[tuple[float, float]]
    whole_way: tuple[float, float]


def planes(life: Life) -> Planes:
    count = len(life.iterations)
    every = [t for iteration in life.iterations for t in iteration.times.values()]

    def way(first: int, last: int) -> tuple[float, float]:
        """The control message's seconds (p50, p99) between two stages' controllers."""
        delays = [(i.times[last, 0].received - i.times[first, 0].received) / 1e9 for i in life.iterations]
        return percentile(delays, 0.5), percentile(delays, 0.99)

    return Planes(
        sum(t.control_bytes for t in every) / count,
        sum(t.data_bytes for t in every) / count,
        [way(stage, stage + 1) for stage in range(life.pp - 1)],
        way(0, life.pp - 1),
    )


def percentile(values: Sequence[float], p: float) -> float:
    """The smallest value that is not below a share `p` of all values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -int(-p * len(ordered) // 1) - 1))]


# -- Figure 8


def letters(claims: Iterable[int]) -> dict[int, str]:
    """A letter for each request, in the order of their claims, as in the paper's figures: A to Z, then AA, AB, ..."""
    result: dict[int, str] = {}
    for n, claim in enumerate(sorted(set(claims))):
        first, second = divmod(n, 26)
        result[claim] = (chr(64 + first) if first else "") + chr(65 + second)
    return result


def label(iteration: Iteration, names: dict[int, str]) -> str:
    return "".join(names[member.claim] for member in iteration.members)


@dataclass(frozen=True)
class Block:
    """An iteration on a stage, in columns of a drawing."""

    first: int
    last: int  # the column behind it
    iteration: Iteration


def drawable(life: Life, count: int, width: int) -> list[Iteration]:
    """The last `count` iterations, or fewer: no column of `width` may stand for more time than a typical one of them
    took, so that a block is as long as its iteration and a pause as long as it was."""
    end = max(t.sent for t in life.iterations[-1].times.values())
    drawn: list[Iteration] = []
    lengths: list[int] = []  # of the blocks of stage 0, in ns, sorted
    for iteration in reversed(life.iterations[-count:]):
        first = iteration.times[0, 0]
        insort(lengths, first.sent - first.started)
        begin = min(t.started for t in iteration.times.values())
        if drawn and end - begin > width * lengths[len(lengths) // 2]:
            break
        drawn.append(iteration)
    return drawn[::-1]


def blocks(life: Life, stage: int, begin: int, end: int, width: int) -> list[Block]:
    """A stage's line of the drawing: `width` columns from `begin` to `end` (ns). A block has at least one column."""
    scale = width / max(1, end - begin)
    found: list[Block] = []
    first = bisect_left(life.iterations, begin, key=lambda i: i.times[stage, 0].sent)
    for iteration in life.iterations[first:]:
        t = iteration.times[stage, 0]
        if t.started >= end:
            break
        left = max(round((t.started - begin) * scale), found[-1].last if found else 0)
        right = min(width, max(round((t.sent - begin) * scale), left + 1))
        if left < right:
            found.append(Block(left, right, iteration))
    return found


# -- Perfetto


def trace_events(run: Run) -> dict[str, Any]:
    """The whole run in Chrome's trace format: a process a stage, a thread a tensor rank; microseconds."""
    events: list[dict[str, Any]] = []
    ranks = {(stage, rank) for life in run.lives for stage in range(life.pp) for rank in range(life.tp)}
    for stage, rank in sorted(ranks):
        names = ("process_name", f"{run.engine} stage {stage}"), ("thread_name", f"rank {rank}")
        for kind, name in names:
            events.append({"ph": "M", "name": kind, "pid": stage, "tid": rank, "args": {"name": name}})
    for life in run.lives:
        names = letters(m.claim for iteration in life.iterations for m in iteration.members)
        for iteration in life.iterations:
            requests = [run.names.get(m.claim, str(m.claim)) for m in iteration.members]
            for t in iteration.times.values():
                common = {"ph": "X", "pid": t.stage, "tid": t.tensor_rank}
                args = {
                    "iteration": iteration.number,
                    "epoch": life.epoch,
                    "requests": requests,
                    "rows": sum(m.tokens for m in iteration.members),
                    "control_us": (t.taken - t.received) / 1000,
                    "control_bytes": t.control_bytes,
                    "data_bytes": t.data_bytes,
                }
                parts = (
                    ("prepare", t.taken, t.prepared, {}),
                    ("wait for upstream", t.prepared, t.started, {}),
                    (label(iteration, names), t.started, t.computed, args),
                    ("send", t.computed, t.sent, {}),
                )
                events += [
                    {**common, "name": name, "ts": begin / 1000, "dur": (end - begin) / 1000, "args": more}
                    for name, begin, end, more in parts
                    if end > begin
                ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}
