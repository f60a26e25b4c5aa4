"""Times the iterations of one rank's shard of a big model, without the other ranks.

    python -m orca_lab.shards --model gpt3-175b --batch 1 8 32 --prompt 128    on this machine's device
    python -m orca_lab.shards --model gpt3-175b --floors                       computed for known GPUs; runs nothing

The code that serves is timed: `Stage` and all that it drives, with real control messages, on tensor rank 0 of the first
stage, of a middle one and of the last one. Three things are replaced:

the checkpoint       random weights, made on the device
the stage before     random hidden states
the other ranks      torch's fake process groups, whose operations return at once

No number contains communication: neither that of tensors, whose bytes are shown instead, nor the way of the control
message and of the tokens, since an iteration begins when the GPU thread takes it.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch._C._distributed_c10d import FakeProcessGroup, Store

from orca.v1 import worker_pb2
from orca_scheduler.ranks.members import increment, initiation, put_members
from orca_worker.data_plane.backends import Group
from orca_worker.data_plane.plane import Loopback
from orca_worker.data_plane.process_groups import ProcessGroups, open_store
from orca_worker.iteration.model import Compute, Model
from orca_worker.models.families import topology
from orca_worker.models.gpt2.configuration import GPT2Config
from orca_worker.models.gpt2.layers import record
from orca_worker.models.plain import TorchStage
from orca_worker.models.random_weights import RandomWeights
from orca_worker.models.recorded import obstacle
from orca_worker.partition import ITEM_BYTES, Place, RankShare, Types
from orca_worker.rank.app import open_device
from orca_worker.sampling.sampling import HiddenModel, SamplingModel
from orca_worker.stage.stage import Stage

from .roofline import IN_TABLES, Work, accelerator, work
from .shapes import SHAPES, Shape

BLOCK_SIZE = 16
INITIATION, INCREMENT = "initiation", "increment"
DEFAULT = Compute()
WARM_UP = 3  # iterations: libraries are loaded and kernels chosen in the first


def load_random(
    config: GPT2Config, place: Place, dtype: str, device: torch.device, compute: Compute
) -> tuple[Model, int]:
    """A model with random weights, and the bytes of its weights. The counterpart of `load_model`."""
    kind = getattr(torch, dtype)
    recording = record(config, place)
    weights = RandomWeights(0, recording.slices, kind, device)
    stage = TorchStage(recording, weights, Types.of(dtype), device)
    if device.type == "cuda" and obstacle(recording, device, compute, has_adapters=False) is None:
        from orca_worker.models.cuda import on_cuda

        return on_cuda(stage, compute), weights.bytes_made
    return (SamplingModel(stage) if place.is_last else HiddenModel(stage)), weights.bytes_made


class Fake:
    """`Backend` of torch's backend "fake": operations return at once and leave their tensors as they are."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.in_streams = device, device.type == "cuda"

    def group(self, store: Store, rank: int, size: int) -> Group:
        return FakeProcessGroup._create_internal(rank, size)

    def meet(self, group: Group, rank: int, size: int, sums: bool) -> None:
        """There is no other rank to meet."""

    def leave(self, group: Group) -> None:
        """No thread waits in a group."""


class FakeGroups(ProcessGroups):
    """Process groups of this rank alone, which receives random hidden states in place of an earlier stage's."""

    def __init__(self, place: Place, device: torch.device) -> None:
        self._own_store = open_store("127.0.0.1")
        super().__init__(place, 1, ("127.0.0.1", self._own_store.port), Fake(device), returns_tokens=False)

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        x = super().receive(shape, dtype)
        return x.normal_() if x is not None else None


@dataclass(frozen=True)
class Case:
    """An iteration to time: `batch` requests of `prompt` tokens each, in their first iteration or in the second."""

    phase: str
    batch: int
    prompt: int

    @property
    def requests(self) -> list[tuple[int, int]]:
        """For each request, tokens before the iteration and tokens in it."""
        return [(self.prompt, 1) if self.phase == INCREMENT else (0, self.prompt)] * self.batch

    @property
    def blocks(self) -> int:
        """Blocks of one request, for its prompt and one token more."""
        return -(-(self.prompt + 1) // BLOCK_SIZE)

    @property
    def slots(self) -> int:
        return self.batch * self.blocks * BLOCK_SIZE

    def message(self, vocab_size: int) -> worker_pb2.Iteration:
        """A control message that can be repeated: initiations free their rows first, increments keep their position."""
        chance, rows = random.Random(self.batch), range(self.batch)
        if self.phase == INCREMENT:
            iteration = worker_pb2.Iteration()
            put_members(iteration, [increment(row, self.prompt, chance.randrange(vocab_size)) for row in rows])
            return iteration
        iteration = worker_pb2.Iteration(free_rows=rows)
        for row in rows:
            tokens = [chance.randrange(vocab_size) for _ in range(self.prompt)]
            iteration.admissions.add(row=row, claim=row + 1, token_ids=tokens)
        blocks = [range(row * self.blocks, (row + 1) * self.blocks) for row in rows]
        put_members(iteration, [initiation(row, self.prompt, blocks[row]) for row in rows])
        return iteration


def cases(batches: Sequence[int], prompts: Sequence[int]) -> list[Case]:
    """All cases, each initiation right before the increment that needs its rows."""
    return [Case(phase, b, p) for p in prompts for b in batches for phase in (INITIATION, INCREMENT)]


def places(tp: int, pp: int) -> list[Place]:
    """Tensor rank 0, which holds the most, of the first stage, of a middle one and of the last."""
    stages = sorted({0, min(1, pp - 1), pp - 1})
    return [Place(tp, pp, stage) for stage in stages]


@dataclass(frozen=True)
class Row:
    """The result for a place and a case. `seconds` and `host` have each repetition, in ascending order."""

    place: Place
    case: Case
    weight_bytes: int
    kv_bytes: int  # bytes of the slots in use
    sent_bytes: int  # bytes that the rank would have sent in the iteration
    seconds: list[float]
    host: list[float]  # until the iteration was launched
    work: Work
    floor: float | None  # seconds; None when roofline.py does not have the device

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


@contextmanager
def formed(
    shape: Shape, place: Place, dtype: str, device: torch.device, slots: int, compute: Compute = DEFAULT
) -> Iterator[Stage]:
    """A rank that has formed an engine alone. Raises SystemExit when its memory is too small."""
    config = shape.config
    load = partial(load_random, config, dtype=dtype, device=device, compute=compute)
    stage = Stage(config.checkpoint(shape.name), Types.of(dtype), device, slots, compute, load)
    plane = FakeGroups(place, device) if place.ranks > 1 else Loopback()
    try:
        memory = stage.form(BLOCK_SIZE, place, plane)
        if memory.slots < slots:
            raise SystemExit(f"{slots} slots of {memory.slot_bytes} bytes are needed; the memory holds {memory.slots}")
        stage.allocate(slots, BLOCK_SIZE)
        yield stage
    finally:
        plane.abort("the shard is done")  # ends the threads of the plane


def measure(
    stage: Stage, iteration: worker_pb2.Iteration, device: torch.device, repetitions: int
) -> tuple[list[float], list[float]]:
    """Seconds of each repetition, in ascending order: from the control message to the end of the device's work, and the
    host's part of them, until the iteration is launched."""
    seconds, host = [], []
    for n in range(WARM_UP + repetitions):
        synchronize(device)
        started = time.perf_counter()
        launched = stage.launch(iteration)
        launching = time.perf_counter() - started
        launched.read()
        synchronize(device)
        if n >= WARM_UP:
            seconds.append(time.perf_counter() - started)
            host.append(launching)
    return sorted(seconds), sorted(host)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_place(
    shape: Shape,
    place: Place,
    dtype: str,
    device: torch.device,
    todo: Sequence[Case],
    repetitions: int,
    compute: Compute = DEFAULT,
) -> list[Row]:
    share = share_of(shape, place, dtype)
    on = accelerator(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    rows = []
    with formed(shape, place, dtype, device, max(case.slots for case in todo), compute) as stage:
        for case in todo:
            times = worker_pb2.StageTimes()
            iteration = case.message(shape.config.vocab_size)
            stage.run(iteration, times)
            seconds, host = measure(stage, iteration, device, repetitions)
            needed = work_of(shape, place, dtype, case)
            floor = needed.floor(on, dtype) if on is not None else None
            kv_bytes = case.slots * share.slot_bytes
            rows.append(Row(place, case, share.weight_bytes, kv_bytes, times.data_bytes, seconds, host, needed, floor))
    return rows


def share_of(shape: Shape, place: Place, dtype: str) -> RankShare:
    checkpoint = shape.config.checkpoint(shape.name)
    return topology(checkpoint, place.tensor_parallel, place.pipeline_parallel, Types.of(dtype))[place.index]


def work_of(shape: Shape, place: Place, dtype: str, case: Case) -> Work:
    return work(record(shape.config, place), ITEM_BYTES[dtype], case.requests)


# What is shown

COLUMNS = ("stage", "weights", "phase", "batch", "prompt")


def head_of(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in (*COLUMNS, *columns):
        table.add_column(column, justify="left" if column == "phase" else "right")
    return table


def cells(place: Place, weight_bytes: int, case: Case) -> tuple[str, ...]:
    stage = f"{place.stage + 1} of {place.pipeline_parallel}"
    return stage, f"{weight_bytes / 1e9:.3f} GB", case.phase, str(case.batch), str(case.prompt)


def measured_table(title: str, rows: Sequence[Row]) -> Table:
    columns = ("median, ms", "fastest to slowest, ms", "host, ms", "floor, ms", "floor / median", "would send")
    table = head_of(title, *columns)
    for row in rows:
        table.add_row(
            *cells(row.place, row.weight_bytes, row.case),
            f"{row.median * 1e3:.2f}",
            f"{row.seconds[0] * 1e3:.2f} to {row.seconds[-1] * 1e3:.2f}",
            f"{statistics.median(row.host) * 1e3:.2f}",
            f"{row.floor * 1e3:.2f}" if row.floor is not None else "-",
            f"{row.floor / row.median:.0%}" if row.floor is not None else "-",
            f"{row.sent_bytes / 1e6:.2f} MB",
        )
    return table


def floor_table(title: str, shape: Shape, dtype: str, whom: Sequence[Place], todo: Sequence[Case]) -> Table:
    table = head_of(title, "bytes", "TFLOP", *(f"{one.name}, ms" for one in IN_TABLES))
    for place in whom:
        share = share_of(shape, place, dtype)
        for case in todo:
            needed = work_of(shape, place, dtype, case)
            table.add_row(
                *cells(place, share.weight_bytes, case),
                f"{needed.bytes / 1e9:.2f} GB",
                f"{needed.flop / 1e12:.2f}",
                *(f"{needed.floor(one, dtype) * 1e3:.2f}" for one in IN_TABLES),
            )
    return table


def as_json(shape: Shape, dtype: str, device: torch.device, rows: Sequence[Row]) -> str:
    """The circumstances and every repetition, as one line of JSON."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    circumstances = {"model": asdict(shape), "dtype": dtype, "device": name, "torch": torch.__version__}
    return json.dumps(circumstances | {"rows": [asdict(row) for row in rows]})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="gpt3-175b")
    parser.add_argument("--tp", type=int, help="tensor ranks of a stage; the paper's if not given")
    parser.add_argument("--pp", type=int, help="stages; the paper's if not given")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument(
        "--prompt", type=int, nargs="+", default=[128], help="tokens of each prompt, which are also the context"
    )
    parser.add_argument("--dtype", choices=ITEM_BYTES, default="bfloat16")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--no-graphs", action="store_true", help="on a GPU: launch every kernel by itself")
    parser.add_argument("--json", type=Path, help="file to write all results to; -: print them as one line")
    parser.add_argument("--floors", action="store_true", help="only compute the floors of known GPUs")
    given = parser.parse_args()
    shape: Shape = SHAPES[given.model]
    tp, pp = given.tp or shape.tensor_parallel, given.pp or shape.pipeline_parallel
    todo = cases(given.batch, given.prompt)
    console = Console(width=150)
    title = f"{shape.name}, tp {tp} x pp {pp}, {given.dtype}"
    if given.floors:
        console.print(floor_table(f"{title}: floors, computed", shape, given.dtype, places(tp, pp), todo))
        return
    device = open_device(given.device, 0)
    torch.manual_seed(0)
    compute = Compute(graphs=not given.no_graphs)
    rows: list[Row] = []
    for place in places(tp, pp):
        rows += measure_place(shape, place, given.dtype, device, todo, given.repetitions, compute)
    console.print(
        measured_table(
            f"{title}, {given.repetitions} repetitions, without communication{', without graphs' * given.no_graphs}",
            rows,
        )
    )
    if given.json == Path("-"):
        print(as_json(shape, given.dtype, device, rows), flush=True)
    elif given.json is not None:
        given.json.write_text(as_json(shape, given.dtype, device, rows) + "\n")


if __name__ == "__main__":
    main()
