"""Live systems for the lab: a stack of this machine serves a workload, as the simulator does, and a guard looks on.

`Live.serve` takes a workload and returns a `Result`, so the lab's experiments run on it as on a simulation.
"""

import asyncio
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import psutil

from orca_common.checkpoint import Checkpoint, read_checkpoint, resolve_model
from orca_common.errors import FailedPrecondition, InvalidArgument
from orca_lab.baseline.engine import WholeBatches, slots_for
from orca_lab.baseline.selections import CELLS, is_baseline
from orca_lab.calibration import Calibration, disturbed, measured
from orca_lab.recording import Recording
from orca_lab.simulator import Result, Served
from orca_lab.workload import Workload
from orca_local.pod import Program
from orca_local.settings import ServeSettings, StackSettings
from orca_local.stack import DEMO_MODEL, Stack
from orca_scheduler.master.journal import read, scheduled
from orca_worker.iteration.model import Compute
from orca_worker.machine import available_bytes
from orca_worker.models.dtype import choose_dtype
from orca_worker.models.families import topology
from orca_worker.partition import Types
from orca_worker.rank.app import open_device

from .cases import fixed, vocabulary_of
from .control_plane import processes
from .drive import closed_case, open_loop
from .grpc_door import GrpcDoor
from .load import with_prompts
from .measures import lag
from .serve import complain, warm_up

BLOCK_SIZE = 16
PATIENCE = 600.0  # seconds for a request
PROBES = 12  # requests by which the ways from and to the client are measured
BESIDE, BESIDE_TOKENS = 3, 400  # streams that run meanwhile, and the tokens of each at most
REPORTS = 5.0  # seconds until the reports of a run's last iterations have come
Span = tuple[float, float]  # a begin and an end, in seconds
LAB = "orca_lab.baseline.app"  # the scheduler's program for selections of the lab


@dataclass(frozen=True)
class Layout:
    """The model that is served, its number of engines, and that of the ranks of each.

    `memory`: bytes of a rank for weights, keys and values; None: all that is free on this machine, divided by the
    ranks.
    """

    model: str | None = None
    dtype: str = "auto"
    tp: int = 1
    pp: int = 1
    memory: int | None = None
    engines: int = 1

    def __str__(self) -> str:
        return f"{self.engines} x (tp {self.tp}, pp {self.pp})"

    @property
    def checkpoint(self) -> Checkpoint:
        """Raises FailedPrecondition when there is no such model."""
        return read_checkpoint(resolve_model(self.model) if self.model else DEMO_MODEL)

    def check_memory(self, max_bs: int) -> None:
        """Raises FailedPrecondition where keys and values of `max_bs` longest sequences do not fit beside the weights
        of a rank."""
        checkpoint, ranks = self.checkpoint, self.tp * self.pp * self.engines
        dtype = choose_dtype(self.dtype, open_device("cpu", 0), Compute(1))
        there = self.memory if self.memory is not None else available_bytes() // ranks
        slots = slots_for(max_bs, checkpoint.max_positions, BLOCK_SIZE)
        need = max(
            s.weight_bytes + slots * s.slot_bytes for s in topology(checkpoint, self.tp, self.pp, Types.of(dtype))
        )
        if need > there:
            raise FailedPrecondition(
                f"memory: {max_bs} sequences of {checkpoint.max_positions} tokens take {need / 1e9:.3g} GB of a rank "
                f"with the weights; {there / 1e9:.3g} GB can be used"
            )


@dataclass(frozen=True)
class Setting:
    """A system of the figures. `mbs` 0: Orca; otherwise request-level batches. `selection`: of the lab, or a policy.
    `delay`: seconds for which a request-level batch that is not full waits for more requests."""

    max_bs: int
    mbs: int = 0
    selection: str = "paper"
    delay: float = 0.0

    @classmethod
    def read(cls, text: str) -> "Setting":
        """Reads a system's label: orca(8), ft(8,4), ft(8,4,0.5) with a queue delay in seconds, or a selection of
        BatchMaker's. Raises InvalidArgument."""
        if text in CELLS:
            return cls(32, selection=text)
        if found := re.fullmatch(r"orca\((\d+)\)|ft\((\d+),(\d+)(?:,(\d{1,3}(?:\.\d{1,3})?))?\)", text):
            *numbers, delay = found.groups()
            orca, max_bs, mbs = (int(group or 0) for group in numbers)
            if orca:
                return cls(orca)
            if 0 < mbs <= max_bs:
                return cls(max_bs, mbs, delay=float(delay or 0))
        raise InvalidArgument("system", f"is {text!r}; there are orca(8), ft(8,4), ft(8,4,0.05) and {', '.join(CELLS)}")

    @property
    def label(self) -> str:
        if self.mbs:
            return f"ft({self.max_bs},{self.mbs}{f',{self.delay:g}' if self.delay else ''})"
        return f"orca({self.max_bs})" if self.selection == "paper" else self.selection


def stack_of(layout: Layout, setting: Setting, **more: object) -> tuple[StackSettings, Program | None]:
    """The settings of `orca serve` for a system, and the program that schedules: None is the scheduler's own.

    Raises FailedPrecondition where a request-level engine's memory does not fit.
    """
    values: dict[str, Any] = {"model": layout.model, "dtype": layout.dtype, "device": "cpu", **more}
    values |= {"tp": layout.tp, "pp": layout.pp, "engines": layout.engines}
    values |= {"max_batch_size": setting.max_bs, "block_size": BLOCK_SIZE}
    if setting.mbs:
        layout.check_memory(setting.max_bs)
        longest = layout.checkpoint.max_positions
        policy = WholeBatches(mbs=setting.mbs, longest=longest, delay=setting.delay)
        values["slots"] = slots_for(setting.max_bs, longest, BLOCK_SIZE)
        return ServeSettings.load(**values), Program(LAB, ["--lab-selection", policy.name])
    if is_baseline(setting.selection):
        return ServeSettings.load(**values), Program(LAB, ["--lab-selection", setting.selection])
    return ServeSettings.load(**values, policy=setting.selection), None


class Usage(NamedTuple):
    """Seconds of processor time so far: of all processes of the machine, and of a run's own."""

    busy: float
    ours: float


def usage_of(processes: Iterable[int]) -> Usage:
    """Seconds that the machine and these processes, by their pids, have used so far."""
    times = psutil.cpu_times()
    busy = sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0)
    ours = 0.0
    for pid in processes:
        spent = psutil.Process(pid).cpu_times()
        ours += spent.user + spent.system
    return Usage(busy, ours)


def foreign(before: Usage, after: Usage, seconds: float) -> float:
    """The share of the cores' time that other processes took in `seconds`."""
    others = (after.busy - before.busy) - (after.ours - before.ours)
    return max(0.0, others) / (seconds * (os.cpu_count() or 1))


def ways_between(spans: Sequence[Span], moments: Iterable[Span]) -> Span:
    """Median seconds from a client to a scheduler and back. spans: when requests were sent and had ended, at their
    client; moments: when they were claimed and had returned, of these requests and of earlier ones."""
    pairs = list(zip(spans, sorted(moments)[-len(spans) :], strict=True))
    way_in = statistics.median(claimed - sent for (sent, _), (claimed, _) in pairs)
    way_out = statistics.median(ended - returned for (_, ended), (_, returned) in pairs)
    return max(0.0, way_in), max(0.0, way_out)


class Live:
    """One system on a stack of this machine. A context manager; `serve` may be called again and again.

    `journal` stays readable inside of the context; `keep` gets a copy of it at the end.
    """

    def __init__(self, layout: Layout, setting: Setting, keep: Path | None = None, seed: int = 0) -> None:
        self.layout, self.setting, self._keep, self._seed = layout, setting, keep, seed
        self._served = 0  # workloads
        self._late = 0.0  # seconds by which arrivals of the last one lagged their plan
        self.pace: float | None = None  # of the last guarded run: what its iterations took over what is calibrated
        self._opened = ExitStack()

    def __enter__(self) -> Self:
        """Raises FailedPrecondition where it cannot be served."""
        with ExitStack() as opened:
            self._run_dir = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="orca-lab-")))
            settings, program = stack_of(self.layout, self.setting, port=0, http_port=0)
            self._runner = opened.enter_context(asyncio.Runner())
            stack = Stack(settings, self._run_dir, lambda step: None, scheduler=program)
            opened.callback(lambda: self._runner.run(stack.stop()))
            self._runner.run(stack.start())
            self._runner.run(self._connect(stack.grpc_addresses[0]))
            opened.callback(lambda: self._runner.run(self._door.__aexit__(None, None, None)))
            self._opened = opened.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._keep is not None:
            self._keep.write_bytes(self.journal.read_bytes())
        self._opened.close()

    async def _connect(self, address: str) -> None:
        self._door = await GrpcDoor(address).__aenter__()
        self._vocabulary = vocabulary_of(self._door.vocab_size)
        await warm_up(self._door, 8, 4, self._vocabulary, PATIENCE)

    @property
    def journal(self) -> Path:
        """The first engine's: engines are alike. It has all iterations that have returned, and the reports that have
        come."""
        return self._journals()[0]

    def _journals(self) -> list[Path]:
        """The journals of all engines."""
        return [next(self._run_dir.glob(f"journal-engine-{n}-*.jsonl")) for n in range(self.layout.engines)]

    def ways(self) -> Span:
        """Seconds from a client to the scheduler, and from the last stage's tokens to the client: medians of requests
        that find a place free while others run. On an idle machine both are shorter."""
        spans = self._runner.run(self._probe())
        return ways_between(spans, (moment for path in self._journals() for moment in Recording.of(path).moments))

    async def _probe(self) -> list[Span]:
        """When each of PROBES requests was sent and when it had ended, in seconds of the wall clock.

        A request-level engine takes none while it runs, so nothing runs beside them there.
        """
        places = 0 if self.setting.mbs else self.setting.max_bs - 1
        longest = min(BESIDE_TOKENS, self.layout.checkpoint.max_positions - 8)
        streams = fixed(min(BESIDE, places), 8, longest, vocabulary=self._vocabulary)
        beside = asyncio.ensure_future(closed_case(self._door, streams, patience=PATIENCE))
        spans = list[Span]()
        for _ in range(1 + PROBES):
            began = time.time()
            [answer] = await closed_case(self._door, fixed(1, 8, 4, vocabulary=self._vocabulary), patience=PATIENCE)
            complain([answer])
            spans.append((began + answer.sent, began + answer.ended))
        complain(await beside)
        return spans[1:]  # the first one came with the streams

    def recording(self) -> Recording:
        """The journal with the reports of all that has run. Raises FailedPrecondition where it has too little."""
        self._runner.run(self._reported())
        return Recording.read(self.journal)

    def serve(self, workload: Workload) -> Result:
        """Sends each request at its moment. Raises Unavailable when one fails. Moments are those of its client."""
        return self._runner.run(self._serve(workload))

    async def _serve(self, workload: Workload) -> Result:
        self._served += 1
        planned = with_prompts(workload, f"{self._seed} of {self._served}", self._vocabulary)
        before = [len(self._sizes(path)) for path in self._journals()]
        answers = await open_loop(self._door, planned, patience=PATIENCE)
        complain(answers)
        self._late = lag(answers) if workload[-1].at else 0.0  # one client sends those in turn that are due at once
        sizes = [size for path, ran in zip(self._journals(), before, strict=True) for size in self._sizes(path)[ran:]]
        served = [
            Served(asked, first=answer.came[0], ended=answer.ended, came=answer.came)
            for asked, answer in zip(workload, answers, strict=True)
        ]
        return Result(served, max(one.ended for one in served), len(sizes), sum(sizes), [])

    @staticmethod
    def _sizes(journal: Path) -> list[int]:
        """Requests of each iteration."""
        return [len(batch.members) for batch in scheduled(read(journal))]

    async def _reported(self) -> None:
        """Returns when the journal has the reports of all iterations, or REPORTS seconds have passed.

        Reports come with heartbeats, and are in the file when the engine rests: one request more brings them there.
        """
        loop = asyncio.get_running_loop()
        last = max((batch.iteration for batch in scheduled(read(self.journal))), default=0)
        due = loop.time() + REPORTS
        while loop.time() < due and last not in Recording.of(self.journal).times:
            await asyncio.sleep(0.3)
            await warm_up(self._door, 8, 1, self._vocabulary, PATIENCE)

    # -- the guard

    def guarded(
        self, workload: Workload, calibration: Calibration | None, attempts: int, say: Callable[[str], None]
    ) -> Result | None:
        """Serves a workload until a run was not disturbed; None: `attempts` of them were."""
        for attempt in range(1, attempts + 1):
            result, why = self._watched(workload, calibration)
            if not why:
                return result
            say(f"{self.setting.label}: run {attempt} of {attempts} was disturbed: {why}")
        return None

    def _watched(self, workload: Workload, calibration: Calibration | None) -> tuple[Result, str]:
        first = 1 + max((batch.iteration for batch in scheduled(read(self.journal))), default=0)
        before, began = self._usage(), time.monotonic()
        result = self.serve(workload)
        others = foreign(before, self._usage(), time.monotonic() - began)
        predicted = took = 0.0
        if calibration is not None:
            self._runner.run(self._reported())
            recording = Recording.of(self.journal)
            known = [n for n in recording.times.keys() & recording.loads.keys() if n >= first]
            predicted = calibration.predicted(recording.loads[n] for n in known)
            took = measured(recording.times[n] for n in known)
        self.pace = took / predicted if predicted else None
        return result, disturbed(predicted, took, others, self._late)

    def _usage(self) -> Usage:
        return usage_of((os.getpid(), *(pid for _, pid in processes(self._run_dir))))
