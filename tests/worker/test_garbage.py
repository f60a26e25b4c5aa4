"""A GPU's data plane without a GPU: streams that run behind the host, and aborts that leave garbage and say nothing."""

import os
import random
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
import torch
from checkpoints import make_gpt2
from iterations import begins, iteration_of
from properties import PART, first
from reference import Reference
from worker.garbage import Dying, Garbage
from worker.streams import Arriving, Stream, StreamedStage

from orca.v1 import worker_pb2
from orca_common.checkpoint import Checkpoint, read_checkpoint
from orca_worker.data_plane.plane import PeerLost
from orca_worker.data_plane.process_groups import ProcessGroups, open_store
from orca_worker.device import model as device_model
from orca_worker.partition import Place
from orca_worker.stage.gpu_thread import GpuThread

HOST, PATIENCE = "127.0.0.1", 30
PROMPT, NEW, REQUESTS, BLOCK_SIZE, SLOTS = 5, 8, 3, 4, 120
JOINED = 20  # seconds


def places(tp: int, pp: int) -> list[Place]:
    return [Place(tp, pp, stage, rank) for stage in range(pp) for rank in range(tp)]


def started(call: Any) -> Future[Any]:
    """Calls in a thread of its own."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


# Joining

STEPS = [(victim, step) for victim, groups in enumerate((3, 3, 3, 2)) for step in range(2 * groups)]
JOINING = [  # one that dies and one that freezes in turn; `make fuzz`: both at each step
    (victim, step, freezes)
    for victim, step in STEPS
    for freezes in (False, True)
    if PART == 1 or freezes == ((step // 2 + step + victim) % 2 == 1)
]


@pytest.mark.parametrize(("victim", "step", "freezes"), JOINING)
def test_a_rank_is_lost_at_a_step_of_joining(victim: int, step: int, freezes: bool) -> None:
    """Before and after each group of it is made. The others can form again: nothing spins on."""
    streams = [Stream() for _ in range(4)]
    lost = Dying(streams[victim], step, freezes)

    def planes(epoch: int, port: int, backends: Sequence[Garbage]) -> list[ProcessGroups]:
        of = zip(places(2, 2), backends, strict=True)
        return [ProcessGroups(place, epoch, (HOST, port), one, returns_tokens=True) for place, one in of]

    store = open_store(HOST)
    backends = [lost if i == victim else Garbage(stream) for i, stream in enumerate(streams)]
    before = planes(1, store.port, backends)
    joining = [started(plane.join) for plane in before]
    assert lost.came.wait(JOINED)
    n = step // 2
    waiting = {0: [victim ^ 1], 1: [victim ^ 2], 2: sorted({0, 1, 2} - {victim})}  # for the victim, in its n-th group
    for i in waiting[n]:
        assert backends[i].meeting[n].wait(JOINED)
    for i, backend in enumerate(backends):  # each has found the store: a client looks for minutes for one that is gone
        assert i == victim or backend.meeting[0].wait(JOINED)
    for i, plane in enumerate(before):
        if i != victim:
            plane.abort("epoch 2 is being formed")
            assert isinstance(joining[i].exception(JOINED), PeerLost | None)  # it may have met all of its own
    streams[victim] = Stream()
    again_store = open_store(HOST)
    again = planes(2, again_store.port, [Garbage(stream) for stream in streams])
    for joined in [started(plane.join) for plane in again]:
        joined.result(JOINED)
    exchange(again, streams)
    lost.over.set()
    for plane in [*before, *again]:
        plane.abort("the end")
    for stream in [*streams, lost.stream]:
        stream.die()


def exchange(planes: Sequence[ProcessGroups], streams: Sequence[Stream]) -> None:
    """Every group of a 2 x 2 engine carries something."""
    sums = [plane.all_reduce(torch.tensor([1.0 + i])) for i, plane in enumerate(planes)]
    for i in (0, 1):
        planes[i].send(torch.tensor([10.0 + i]))
    received = [planes[i].receive((1,), torch.float32) for i in (2, 3)]
    planes[2].send_tokens([7, 8])
    for i in (0, 1):
        planes[i].expect_tokens(2)
    tokens = [planes[i].receive_tokens() for i in (0, 1)]
    for stream in streams:
        stream.event().synchronize()
    assert [x.item() for x in sums] == [3, 3, 7, 7]
    assert [x.item() for x in received if x is not None] == [10, 11]
    assert [x.tolist() for x in tokens] == [[7, 8]] * 2


# Whole engines


class Rank:
    """A rank of this process: a stage behind a stream, and its GPU thread."""

    def __init__(self, checkpoint: Checkpoint, graphs_tp: bool) -> None:
        self.reports: Queue[worker_pb2.Report] = Queue()
        self.stage = StreamedStage(checkpoint, SLOTS, graphs_tp)
        self.gpu = GpuThread(self.stage, self.reports.put)


class Engine:
    """Ranks, and a master of a few lines that runs ahead: it never sends a token to a rank."""

    def __init__(self, folder: Path, tp: int, pp: int, seed: int, graphs_tp: bool) -> None:
        self.checkpoint, self.places, self._graphs_tp = read_checkpoint(folder), places(tp, pp), graphs_tp
        self.ranks = [self.rank() for _ in self.places]
        self.sampler = (pp - 1) * tp
        self.chance, self.epoch, self.number = random.Random(seed), 0, 0
        self.planes: list[ProcessGroups] = []

    def rank(self) -> Rank:
        return Rank(self.checkpoint, self._graphs_tp)

    def requests(self) -> tuple[list[list[int]], list[list[int]]]:
        """Random prompts, and room for what is made of them."""
        return [[self.chance.randrange(97) for _ in range(PROMPT)] for _ in range(REQUESTS)], [
            [] for _ in range(REQUESTS)
        ]

    def form(self) -> None:
        self.epoch += 1
        for plane in self.planes:
            plane.abort(f"epoch {self.epoch} is being formed")
        self._store = open_store(HOST)
        at = HOST, self._store.port
        of = list(zip(self.ranks, self.places, strict=True))
        self.planes = [
            ProcessGroups(place, self.epoch, at, Garbage(rank.stage.stream), returns_tokens=True) for rank, place in of
        ]
        forming = [
            rank.gpu.call(partial(rank.stage.form, BLOCK_SIZE, place, plane))
            for (rank, place), plane in zip(of, self.planes, strict=True)
        ]
        assert {formed.result(PATIENCE).slots for formed in forming} == {SLOTS}
        for allocated in [rank.gpu.call(partial(rank.stage.allocate, SLOTS, BLOCK_SIZE)) for rank in self.ranks]:
            allocated.result(PATIENCE)

    def launch(self, made: Sequence[Sequence[int]], prompts: Sequence[Sequence[int]]) -> int:
        """Launches all that requests still need. Returns how many iterations these are."""
        tokens = [[*prompt, *more] for prompt, more in zip(prompts, made, strict=True)]
        steps, held, rows = NEW - len(made[0]), len(tokens[0]), range(REQUESTS)
        each = SLOTS // BLOCK_SIZE // REQUESTS
        new = [
            begins(row, tokens[row], range(row * each, (row + 1) * each), claim=row + 1, generated=len(made[row]))
            for row in rows
        ]
        for step in range(steps):
            self.number += 1
            message = iteration_of(rows=rows, starts=[held + step - 1] * REQUESTS) if step else iteration_of(new=new)
            message.epoch, message.number = self.epoch, self.number
            for rank in self.ranks:
                rank.gpu.submit(message, 0)
        return steps

    def lose(self, victim: int, freezes: bool) -> None:
        """The victim's process ends, or is frozen, and the others leave the epoch."""
        assert self.ranks[victim].stage.stream.died.wait(PATIENCE)
        for i, plane in enumerate(self.planes):
            if i != victim or not freezes:
                plane.abort("a peer is gone")

    def read(self, steps: int, made: Sequence[list[int]], victim: int | None) -> None:
        """Reads a report of each iteration and rank. Tokens of the sampler count up to its first error."""
        for i, rank in enumerate(self.ranks):
            reports = [rank.reports.get(timeout=PATIENCE).iteration for _ in range(steps if i != victim else 0)]
            assert all(report.peer_lost for report in reports if report.error), [report.error for report in reports]
            if i == victim:
                reports = [rank.reports.get_nowait().iteration for _ in range(rank.reports.qsize())]
            if i == self.sampler:
                for report in reports:
                    if report.error:
                        break
                    for request, token in zip(made, report.token_ids, strict=True):
                        request.append(token)

    def close(self) -> None:
        for plane in self.planes:
            plane.abort("the end")
        for rank in self.ranks:
            rank.gpu.stop()
            rank.stage.stream.die()


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Copies to the host are behind the stream. No thread is left, which would be in the middle of something when the
    interpreter ends."""
    monkeypatch.setattr(device_model, "Arriving", Arriving)
    monkeypatch.setattr(device_model, "BUCKETS", (4,))
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        thread.join(PATIENCE)
        assert not thread.is_alive(), thread.name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_gpt2(tmp_path_factory.mktemp("m"), heads=2, layers=3, hidden=16, vocab=97, positions=48, seed=5)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


def engine_of(folder: Path, tp: int, pp: int, seed: int, graphs_tp: bool) -> Iterator[Engine]:
    engine = Engine(folder, tp, pp, seed, graphs_tp)
    try:
        yield engine
    finally:
        engine.close()


@pytest.mark.parametrize(("tp", "pp", "graphs_tp"), first(2, [(1, 2, False), (2, 2, True), (2, 2, False)]))
def test_a_rank_is_lost_in_the_middle(folder: Path, reference: Reference, tp: int, pp: int, graphs_tp: bool) -> None:
    lose_ranks(folder, reference, tp, pp, graphs_tp, rounds=4)


@pytest.mark.long
@pytest.mark.parametrize(
    ("tp", "pp", "graphs_tp"),
    [(1, 2, False), (2, 1, False), (2, 2, False), (1, 3, False), (2, 1, True), (2, 2, True)],
)
def test_ranks_are_lost_in_many_rounds(folder: Path, reference: Reference, tp: int, pp: int, graphs_tp: bool) -> None:
    """ROUNDS of the environment says how many."""
    lose_ranks(folder, reference, tp, pp, graphs_tp, rounds=int(os.environ.get("ROUNDS", "60")))


def lose_ranks(folder: Path, reference: Reference, tp: int, pp: int, graphs_tp: bool, rounds: int) -> None:
    """A victim stops between two pieces of its device's work. The others form again, and all tokens are right."""
    for engine in engine_of(folder, tp, pp, rounds, graphs_tp):
        pieces, lost = undisturbed(engine, reference), 0
        for n in range(rounds):
            victim, freezes = n % len(engine.ranks), n // len(engine.ranks) % 2 == 1
            prompts, made = engine.requests()
            engine.form()
            # A host that has not seen a token in time does not read it then: some of these pieces may not come.
            engine.ranks[victim].stage.stream.die(after=engine.chance.randrange(3 * pieces[victim] // 4))
            steps = engine.launch(made, prompts)
            engine.lose(victim, freezes)
            engine.read(steps, made, victim)
            lost += len(made[0]) < NEW
            frozen, left = engine.planes.pop(victim), engine.ranks[victim]
            engine.ranks[victim] = engine.rank()
            engine.form()
            engine.read(engine.launch(made, prompts), made, None)
            assert made == [reference.greedy(prompt, NEW) for prompt in prompts], n
            frozen.abort("the end")
            left.gpu.stop()
        assert lost > rounds // 2


def undisturbed(engine: Engine, reference: Reference) -> list[int]:
    """Runs requests. Returns how many pieces of work each rank's device had; its host has waited for none of them."""
    engine.form()
    before = [rank.stage.stream.given for rank in engine.ranks]
    prompts, made = engine.requests()
    engine.read(engine.launch(made, prompts), made, None)
    assert made == [reference.greedy(prompt, NEW) for prompt in prompts]
    assert all(not rank.stage.stream.waits for rank in engine.ranks)
    return [rank.stage.stream.given - count for rank, count in zip(engine.ranks, before, strict=True)]
