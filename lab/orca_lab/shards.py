"""One rank's shard of a big model alone: what its iterations take when nobody is at the other end.

    python -m orca_lab.shards --model gpt3-175b --batch 1 8 32 --prompt 128    on this machine's device
    python -m orca_lab.shards --model gpt3-175b --floors                       computed for known GPUs; runs nothing

What serves is what is timed: `Stage` and all that it drives, from real control messages, on tensor rank 0 of the first
stage, of the last one, and of a middle one. Three things are not there:

the checkpoint       weights are random, made on the device
the stage before     hidden states are random
the other ranks      the process groups are torch's fake ones, whose operations return at once

So the time of communication is in no number; the bytes that the rank would have sent are shown. Nor is the way of the
control message and of the tokens: an iteration begins when the GPU thread takes it.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
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
from orca_worker.data_plane import Loopback
from orca_worker.models.families import topology
from orca_worker.models.gpt2.configuration import GPT2Config
from orca_worker.models.gpt2.model import GPT2
from orca_worker.models.gpt2.slices import slices_of
from orca_worker.models.model import Model
from orca_worker.partition import ITEM_BYTES, Place, RankShare, Slice
from orca_worker.process_groups import Group, ProcessGroups, open_store
from orca_worker.rank import open_device
from orca_worker.sampling import HiddenModel, SamplingModel
from orca_worker.stage import Stage
from orca_worker.weights import WeightSource

from .roofline import ACCELERATORS, Work, accelerator, work
from .shapes import SHAPES, Shape

BLOCK_SIZE = 16
INITIATION, INCREMENT = "initiation", "increment"
WARM_UP = 3  # iterations: libraries are loaded and kernels chosen in the first


class RandomWeights(WeightSource):
    """`WeightSource` without a checkpoint. `spread`: standard deviation; GPT-2's training begins with 0.02."""

    def __init__(
        self, slices: Mapping[str, Slice], dtype: torch.dtype, device: torch.device, spread: float = 0.02
    ) -> None:
        self._slices, self._dtype, self._device, self._spread = slices, dtype, device, spread
        self.bytes_made = 0

    def find(self, name: str) -> Tensor | None:
        part = self._slices.get(name)
        if part is None:
            return None
        tensor = torch.empty(part.size, dtype=self._dtype, device=self._device).normal_(std=self._spread)
        self.bytes_made += tensor.nbytes
        return tensor + 1 if name.endswith(("ln_1.weight", "ln_2.weight", "ln_f.weight")) else tensor


def load_random(config: GPT2Config, place: Place, dtype: str, device: torch.device) -> tuple[Model, int]:
    """As `load_model`, without a checkpoint: the model, and how many bytes of weights were made."""
    kind = getattr(torch, dtype)
    weights = RandomWeights(slices_of(config, place), kind, device)
    model = GPT2(config, place, weights, kind, device)
    return (SamplingModel(model) if place.is_last else HiddenModel(model)), weights.bytes_made


class FakeGroups(ProcessGroups):
    """`ProcessGroups` whose groups are torch's backend "fake": an operation returns at once and leaves its tensors as
    they are. What a stage before would have sent is made up."""

    def __init__(self, place: Place, device: torch.device) -> None:
        self._own_store = open_store()
        super().__init__(place, 1, ("127.0.0.1", self._own_store.port), "127.0.0.1", device, returns_tokens=False)

    def _new_group(self, purpose: str, store: Store, rank: int, size: int) -> Group:
        return FakeProcessGroup._create_internal(rank, size)

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        x = super().receive(shape, dtype)
        return x.normal_() if x is not None else None


@dataclass(frozen=True)
class Case:
    """`batch` requests of `prompt` tokens each: their first iteration, or one that comes after it."""

    phase: str
    batch: int
    prompt: int

    @property
    def requests(self) -> list[tuple[int, int]]:
        """(tokens before the iteration, tokens in it) of each."""
        return [(self.prompt, 1) if self.phase == INCREMENT else (0, self.prompt)] * self.batch

    @property
    def blocks(self) -> int:
        """Of a request: for its prompt and one token more."""
        return -(-(self.prompt + 1) // BLOCK_SIZE)

    @property
    def slots(self) -> int:
        return self.batch * self.blocks * BLOCK_SIZE

    def message(self, vocab_size: int) -> worker_pb2.Iteration:
        """One that may come again and again: initiations forget their rows first, increments stay where they are."""
        chance, rows = random.Random(self.batch), range(self.batch)
        if self.phase == INCREMENT:
            return worker_pb2.Iteration(
                increment_rows=rows,
                increment_positions=[self.prompt] * self.batch,
                increment_tokens=[chance.randrange(vocab_size) for _ in rows],
            )
        iteration = worker_pb2.Iteration(free_rows=rows)
        for row in rows:
            iteration.initiations.add(
                row=row,
                claim=row + 1,
                token_ids=[chance.randrange(vocab_size) for _ in range(self.prompt)],
                blocks=range(row * self.blocks, (row + 1) * self.blocks),
            )
        return iteration


def cases(batches: Sequence[int], prompts: Sequence[int]) -> list[Case]:
    """A batch's initiation comes right before its increments, which need its rows."""
    return [Case(phase, b, p) for p in prompts for b in batches for phase in (INITIATION, INCREMENT)]


def places(tp: int, pp: int) -> list[Place]:
    """One of each kind: tensor rank 0, which has the most, of the first stage, a middle one and the last."""
    stages = sorted({0, min(1, pp - 1), pp - 1})
    return [Place(tp, pp, stage) for stage in stages]


@dataclass(frozen=True)
class Row:
    """What was found for a place and a case. Seconds are those of each repetition, ascending."""

    place: Place
    case: Case
    weight_bytes: int
    kv_bytes: int  # of the slots in use
    sent_bytes: int  # what the rank would have sent in the iteration
    seconds: list[float]
    work: Work
    floor: float | None  # seconds; None: the device is not in roofline.py

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


@contextmanager
def formed(shape: Shape, place: Place, dtype: str, device: torch.device, slots: int) -> Iterator[Stage]:
    """A rank that is a member of an engine of nobody else. Raises SystemExit when its memory is too small."""
    config = shape.config
    load = partial(load_random, config, dtype=dtype, device=device)
    stage = Stage(config.checkpoint(shape.name), dtype, device, slots, 0, load)
    plane = FakeGroups(place, device) if place.ranks > 1 else Loopback()
    try:
        memory = stage.form(BLOCK_SIZE, place, plane)
        if memory.slots < slots:
            raise SystemExit(f"{slots} slots of {memory.slot_bytes} bytes are needed; the memory holds {memory.slots}")
        stage.allocate(slots, BLOCK_SIZE)
        yield stage
    finally:
        plane.abort("the shard is done")  # ends its threads


def measure(stage: Stage, iteration: worker_pb2.Iteration, device: torch.device, repetitions: int) -> list[float]:
    """Seconds of each repetition, ascending: from the control message to the end of the device's work."""
    seconds = []
    for n in range(WARM_UP + repetitions):
        synchronize(device)
        started = time.perf_counter()
        stage.run(iteration)
        synchronize(device)
        if n >= WARM_UP:
            seconds.append(time.perf_counter() - started)
    return sorted(seconds)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_place(
    shape: Shape, place: Place, dtype: str, device: torch.device, todo: Sequence[Case], repetitions: int
) -> list[Row]:
    share = share_of(shape, place, dtype)
    on = accelerator(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    rows = []
    with formed(shape, place, dtype, device, max(case.slots for case in todo)) as stage:
        for case in todo:
            times = worker_pb2.StageTimes()
            iteration = case.message(shape.config.vocab_size)
            stage.run(iteration, times)
            seconds = measure(stage, iteration, device, repetitions)
            needed = work_of(shape, share, dtype, case)
            floor = needed.floor(on, dtype) if on is not None else None
            kv_bytes = case.slots * share.slot_bytes
            rows.append(Row(place, case, share.weight_bytes, kv_bytes, times.data_bytes, seconds, needed, floor))
    return rows


def share_of(shape: Shape, place: Place, dtype: str) -> RankShare:
    checkpoint = shape.config.checkpoint(shape.name)
    return topology(checkpoint, place.tensor_parallel, place.pipeline_parallel, dtype)[place.index]


def work_of(shape: Shape, share: RankShare, dtype: str, case: Case) -> Work:
    return work(shape.config, share, ITEM_BYTES[dtype], case.requests)


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
    columns = ("median, ms", "fastest to slowest, ms", "floor, ms", "floor / median", "would send")
    table = head_of(title, *columns)
    for row in rows:
        table.add_row(
            *cells(row.place, row.weight_bytes, row.case),
            f"{row.median * 1e3:.2f}",
            f"{row.seconds[0] * 1e3:.2f} to {row.seconds[-1] * 1e3:.2f}",
            f"{row.floor * 1e3:.2f}" if row.floor is not None else "-",
            f"{row.floor / row.median:.0%}" if row.floor is not None else "-",
            f"{row.sent_bytes / 1e6:.2f} MB",
        )
    return table


def floor_table(title: str, shape: Shape, dtype: str, whom: Sequence[Place], todo: Sequence[Case]) -> Table:
    table = head_of(title, "bytes", "TFLOP", *(f"{one.name}, ms" for one in ACCELERATORS))
    for place in whom:
        share = share_of(shape, place, dtype)
        for case in todo:
            needed = work_of(shape, share, dtype, case)
            table.add_row(
                *cells(place, share.weight_bytes, case),
                f"{needed.bytes / 1e9:.2f} GB",
                f"{needed.flop / 1e12:.2f}",
                *(f"{needed.floor(one, dtype) * 1e3:.2f}" for one in ACCELERATORS),
            )
    return table


def record(shape: Shape, dtype: str, device: torch.device, rows: Sequence[Row]) -> str:
    """JSON: the circumstances, and every repetition."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    circumstances = {"model": asdict(shape), "dtype": dtype, "device": name, "torch": torch.__version__}
    return json.dumps(circumstances | {"rows": [asdict(row) for row in rows]}, indent=1) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="gpt3-175b")
    parser.add_argument("--tp", type=int, help="tensor ranks of a stage; the paper's without it")
    parser.add_argument("--pp", type=int, help="stages; the paper's without it")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, nargs="+", default=[128], help="tokens of a request: also its context")
    parser.add_argument("--dtype", choices=ITEM_BYTES, default="bfloat16")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--json", type=Path, help="a file for all that was measured")
    parser.add_argument("--floors", action="store_true", help="compute the floors of known GPUs and run nothing")
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
    rows: list[Row] = []
    for place in places(tp, pp):
        rows += measure_place(shape, place, given.dtype, device, todo, given.repetitions)
    console.print(measured_table(f"{title}, {given.repetitions} repetitions, without communication", rows))
    if given.json is not None:
        given.json.write_text(record(shape, given.dtype, device, rows))


if __name__ == "__main__":
    main()
