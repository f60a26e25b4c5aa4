"""The engine alone: the scheduler core and a worker's stage in one process, without a network and without a pool.

A case is timed whole, from the first selection to the last token, initiations included. All requests are there at the
start, decoding is greedy, and no request ends before its length.
"""

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from orca.v1 import worker_pb2
from orca_common.checkpoint import Checkpoint, read_checkpoint, resolve_model
from orca_common.errors import FailedPrecondition, InvalidArgument
from orca_kernels.cpu.cores import cores
from orca_lab.baseline.attention import By, batching
from orca_local.stack import DEMO_MODEL
from orca_scheduler.core.core import Core, ScheduleBatch
from orca_scheduler.ranks.members import put_members
from orca_worker.data_plane.plane import DataPlane
from orca_worker.iteration.model import Compute, Output
from orca_worker.models.dtype import choose_types
from orca_worker.models.formats.table import FORMATS
from orca_worker.partition import ITEM_BYTES, SINGLE, Place, Types
from orca_worker.rank.app import open_device
from orca_worker.stage.stage import Stage

from .cases import WARM_UP_SEED, Case, fixed, own_cases, pick, read_cases, vocabulary_of
from .machine import isa, resident_bytes
from .schedule import BLOCK_SIZE, Schedule, Shape, shape_of, slots_for


@dataclass(frozen=True)
class Step:
    """One iteration: its shape, and its seconds from the end of the one before to the scheduler's next batch."""

    shape: Shape
    seconds: float


@dataclass(frozen=True)
class Run:
    """One run of a case."""

    case: Case
    seconds: float
    steps: Sequence[Step]
    tokens: Sequence[Sequence[int]]  # of each request

    @property
    def full_decode_ms(self) -> float | None:
        """The median iteration of increments alone, among those with the most requests; None: there was none."""
        decodes = [step for step in self.steps if not step.shape.initiations]
        most = max((step.shape.requests for step in decodes), default=0)
        times = [step.seconds for step in decodes if step.shape.requests == most]
        return statistics.median(times) * 1e3 if times else None

    @property
    def initiation_seconds(self) -> float:
        """Seconds of all iterations in which a request began."""
        return sum(step.seconds for step in self.steps if step.shape.initiations)


@dataclass(frozen=True)
class EngineOptions:
    """The options of a measured engine; dtype "auto" becomes the type that it stands for. Raises InvalidArgument."""

    model: str | None = None  # folder or hub name; None: the demo model
    dtype: str = "auto"
    device: str = "cpu"
    threads: int = 0  # 0: one for each core
    max_batch_size: int = 32
    kernels: str = "auto"
    quantize: str | None = None
    kv_dtype: str | None = None
    attention: By = By.KERNELS

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise InvalidArgument("dtype", f"is {self.dtype}; there are {', '.join(ITEM_BYTES)}")
        if self.quantize not in FORMATS:
            raise InvalidArgument("quantize", f"is {self.quantize}; there are {', '.join(filter(None, FORMATS))}")
        if self.kv_dtype not in (None, "int8"):
            raise InvalidArgument("kv_dtype", f"is {self.kv_dtype}; there is int8")
        if self.kv_dtype is not None and self.attention is By.TORCH:
            raise InvalidArgument("kv_dtype", f"is {self.kv_dtype}, which torch's attention does not read")
        types = choose_types(self.dtype, self.kv_dtype, open_device(self.device, 0), self.compute)
        object.__setattr__(self, "dtype", types.weights)

    @property
    def compute(self) -> Compute:
        return Compute(self.threads or cores(), self.kernels)

    def block_size_of(self, checkpoint: Checkpoint) -> int:
        """Slots of a block: where torch batches attention, those of a longest sequence."""
        return checkpoint.max_positions if self.attention is By.TORCH else BLOCK_SIZE

    def checkpoint(self) -> Checkpoint:
        """Raises FailedPrecondition when there is no such model."""
        return read_checkpoint(resolve_model(self.model) if self.model else Path(DEMO_MODEL), self.quantize)


class Runs(Protocol):
    """An engine that runs iterations: a stage alone, or ranks."""

    def run(self, iteration: worker_pb2.Iteration) -> Output: ...


class Timed:
    """Times cases on an engine that holds memory for `slots` tokens."""

    def __init__(self, options: EngineOptions, checkpoint: Checkpoint, slots: int, runs: Runs) -> None:
        self.options, self.checkpoint, self.slots = options, checkpoint, slots
        self.device = open_device(options.device, 0)
        self._runs, self._rows = runs, set[int]()  # the rows that it has

    def run(self, case: Case, core: Core | None = None) -> Run:
        """Runs a case to its end, and checks that every request made the tokens that it asked for. core: as for
        `Schedule`."""
        steps: list[Step] = []
        started = before = time.perf_counter()
        schedule = Schedule(case, self.slots, self.options.max_batch_size, core)
        left, self._rows = self._rows, set()  # by the case before
        while (batch := schedule.batch) is not None:
            iteration = message(batch, case)
            self._rows.difference_update(batch.free_rows)
            self._rows.update(member.row for member in batch.members[: batch.admitted])
            iteration.free_rows.extend(left)
            left.clear()
            output = self._runs.run(iteration)
            schedule.returned(output.token_ids)
            now = time.perf_counter()
            steps.append(Step(shape_of(batch), now - before))
            before = now
        seconds = before - started
        tokens = [schedule.tokens[claim] for claim in range(1, len(case) + 1)]
        assert [len(made) for made in tokens] == [one.output for one in case], "a request made another number of tokens"
        return Run(case, seconds, steps, tokens)

    @property
    def where(self) -> dict[str, Any]:
        """The circumstances, which every line has."""
        device = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"
        options = self.options
        isa_used = isa(options.kernels)
        threads = options.compute.threads
        return {
            "dtype": options.dtype,
            "quantize": options.quantize,
            "kv_dtype": options.kv_dtype,
            "threads": threads,
            "device": device,
            "isa": isa_used,
        }

    def line(self, name: str, run: Run, number: int) -> dict[str, Any]:
        """The bench's line of a run."""
        outputs, decode = sum(one.output for one in run.case), run.full_decode_ms
        return {
            "engine": "orca",
            "case": name,
            "seconds": round(run.seconds, 4),
            "requests": len(run.case),
            "output_tokens": outputs,
            "output_tokens_per_s": round(outputs / run.seconds, 1),
            "iterations": len(run.steps),
            "iteration_ms": None if decode is None else round(decode, 3),
            "initiation_s": round(run.initiation_seconds, 4),
            "resident_MB": round(resident_bytes() / 1e6),
            "run": number,
            "max_batch_size": self.options.max_batch_size,
            **self.where,
        }


def form(
    stage: Stage,
    slots: int,
    place: Place = SINGLE,
    plane: DataPlane | None = None,
    block_size: int = BLOCK_SIZE,
) -> None:
    """Forms a stage, alone or with others. Raises FailedPrecondition when its memory does not hold `slots` tokens."""
    memory = stage.form(block_size, place, plane)
    if memory.slots < slots:
        raise FailedPrecondition(f"slots: {slots} are needed; the memory holds {memory.slots}")
    stage.allocate(slots, block_size)


def stage_of(options: EngineOptions, checkpoint: Checkpoint, slots: int) -> Stage:
    """A stage that has not formed."""
    types, device = Types.of(options.dtype, options.kv_dtype), open_device(options.device, 0)
    load = batching(checkpoint, types, options.compute) if options.attention is By.TORCH else None
    return Stage(checkpoint, types, device, slots, options.compute, load)


class Engine(Timed):
    """A stage that has formed alone."""

    def __init__(self, options: EngineOptions, checkpoint: Checkpoint, slots: int) -> None:
        """Raises FailedPrecondition when the model cannot be loaded, or the memory is too small."""
        self.stage = stage_of(options, checkpoint, slots)
        form(self.stage, slots, block_size=options.block_size_of(checkpoint))
        super().__init__(options, checkpoint, slots, self.stage)


def message(batch: ScheduleBatch, case: Case) -> worker_pb2.Iteration:
    """The control message of a batch, as an engine master makes it. A request's claim is its place in the case."""
    iteration = worker_pb2.Iteration(number=batch.iteration, free_rows=batch.free_rows)
    for member in batch.members[: batch.admitted]:
        iteration.admissions.add(row=member.row, claim=member.claim, token_ids=case[member.claim - 1].prompt)
    put_members(iteration, batch.members)
    return iteration


def chosen_cases(
    options: EngineOptions, cases: Path | None, names: Sequence[str]
) -> tuple[Checkpoint, dict[str, Case]]:
    """The model, and the cases of these names, or all that it can run. Raises FailedPrecondition.

    `cases`: a file of cases, instead of the bench's own.
    """
    checkpoint = options.checkpoint()
    known = read_cases(cases) if cases else own_cases(vocabulary_of(checkpoint.vocab_size))
    return checkpoint, pick(known, names, checkpoint.vocab_size, checkpoint.max_positions)


def lines(options: EngineOptions, cases: Path | None, names: Sequence[str], runs: int) -> Iterator[dict[str, Any]]:
    """Runs cases, chosen as by `chosen_cases`, each `runs` times, after a warm-up. Raises FailedPrecondition."""
    checkpoint, chosen = chosen_cases(options, cases, names)
    slots = max(slots_for(case, options.max_batch_size) for case in chosen.values())
    engine = Engine(options, checkpoint, slots)
    engine.run(warm_up(slots, options.max_batch_size, checkpoint))
    for name, case in chosen.items():
        for number in range(1, runs + 1):
            yield engine.line(name, engine.run(case), number)


def warm_up(slots: int, max_batch_size: int, checkpoint: Checkpoint) -> Case:
    """A case that uses about all slots at once.

    A machine's kernel may take long to hand out pages for the first time: a virtual one took 1.5 s for 1 GB. An engine
    that has run for a while has them, and other engines reserve theirs before they begin.
    """
    requests = min(max_batch_size, slots // BLOCK_SIZE)
    tokens = min(slots // requests // BLOCK_SIZE * BLOCK_SIZE, checkpoint.max_positions)
    outputs = min(8, tokens - 1)
    vocabulary = vocabulary_of(checkpoint.vocab_size)
    return fixed(requests, tokens - outputs, outputs, seed=WARM_UP_SEED, vocabulary=vocabulary)
