"""Times the process groups of one node: all-reduces by size, formations and aborts, and a rank that is killed.

    python -m orca_lab.groups --ranks 2 --device cuda

A process for each rank, as tensor ranks of one stage, with the data plane that serves: NCCL on GPUs, gloo on a CPU. It
prints JSON lines:

all_reduce   microseconds of an operation of `bytes`, the median of a rank; `operations` follow each other in a run
formation    of epoch n: seconds until all ranks have met, until an abort has ended, and the device's free bytes
killed       a rank was killed in the middle of an all-reduce: seconds until the others have left, and until all, with a
             new process, have met again

**Not run on a GPU yet.**
"""

import argparse
import json
import os
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch

from orca_common.environment import take
from orca_worker.data_plane.plane import PeerLost
from orca_worker.data_plane.process_groups import open_store
from orca_worker.data_plane.rendezvous import Rendezvous
from orca_worker.machine import free_bytes
from orca_worker.partition import Place
from orca_worker.processes.beginning import ENVIRONMENT
from orca_worker.rank.app import open_device
from orca_worker.rank.epoch import LEAVE

T = TypeVar("T")
HOST = "127.0.0.1"
SIZES = [2**n for n in range(12, 27, 2)]  # bytes
OPERATIONS, RUNS = 20, 7
PATIENCE = 120.0  # seconds for any answer of a rank
CONTEXT = get_context("spawn")


class Member:
    """One rank, in its own process. Its calls come from `Ranks`, and each one returns what is sent back."""

    def __init__(self, rank: int, ranks: int, device: str) -> None:
        self._device = open_device(device, rank)
        self._place = Place(ranks, 1, 0, rank)
        self._rendezvous = Rendezvous(HOST, self._device)
        self._gpu = ThreadPoolExecutor(1)  # waits in operations, as a GPU thread
        self._begun: Future[None] | None = None

    def form(self, epoch: int, port: int) -> float:
        self._plane = self._rendezvous.plane(self._place, epoch, f"{HOST}:{port}", False)
        started = time.perf_counter()
        self._plane.join()
        self._check()
        return time.perf_counter() - started

    def _check(self) -> None:
        x = self._plane.all_reduce(torch.full((4,), 1.0 + self._place.tensor_rank, device=self._device))
        ranks = self._place.tensor_parallel
        assert x.tolist() == [ranks * (ranks + 1) / 2] * 4

    def sweep(self, size: int) -> float:
        """The median seconds of an all-reduce of `size` bytes."""
        x, times = torch.zeros(size // 4, device=self._device), []
        for _ in range(RUNS):
            self._synchronize()
            started = time.perf_counter()
            for _ in range(OPERATIONS):
                self._plane.all_reduce(x)
            self._synchronize()
            times.append((time.perf_counter() - started) / OPERATIONS)
        return statistics.median(times)

    def begin(self) -> None:
        """Begins an all-reduce that another rank will not take part in."""
        x = torch.zeros(1 << 20, device=self._device)
        self._begun = self._gpu.submit(lambda: (self._plane.all_reduce(x), self._synchronize(), None)[-1])

    def leave(self) -> tuple[float, int]:
        """The seconds until an abort has ended, and then the free bytes of the device."""
        started = time.perf_counter()
        self._plane.abort("the epoch is over")
        while not self._plane.left:
            if time.perf_counter() - started > LEAVE:
                raise TimeoutError(f"the groups were not left within {LEAVE:g} s: a rank would start again")
            time.sleep(0.001)
        if self._begun is not None:
            failure = self._begun.exception(PATIENCE)  # NCCL's operations end without one
            assert failure is None or isinstance(failure, PeerLost)
            self._begun = None
        return time.perf_counter() - started, free_bytes(self._device, modest=False)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _serve(connection: Connection, rank: int, ranks: int, device: str) -> None:
    """The process of a rank."""
    torch.set_num_threads(1)
    member = Member(rank, ranks, device)
    while (call := connection.recv()) is not None:
        name, arguments = call
        connection.send(getattr(member, name)(*arguments))
    os._exit(0)  # a thread may still be in a group


class Ranks:
    """All ranks, as processes."""

    def __init__(self, ranks: int, device: str) -> None:
        self.size, self._device, self._epoch = ranks, device, 0
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(ranks):
            self._start(rank)

    def _start(self, rank: int) -> None:
        ours, its = CONTEXT.Pipe()
        process = CONTEXT.Process(target=_serve, args=(its, rank, self.size, self._device), daemon=True)
        process.start()
        self._pipes[rank:] = [ours, *self._pipes[rank + 1 :]]
        self._processes[rank:] = [process, *self._processes[rank + 1 :]]

    def each(self, call: Callable[..., T], *arguments: Any, but: int | None = None) -> list[T]:
        """The answers of all ranks, or of all but one, to a call of `Member`."""
        pipes = [pipe for rank, pipe in enumerate(self._pipes) if rank != but]
        for pipe in pipes:
            pipe.send((call.__name__, arguments))
        answers = []
        for pipe in pipes:
            if not pipe.poll(PATIENCE):
                raise TimeoutError(f"{call.__name__}: a rank does not answer")
            answers.append(pipe.recv())
        return answers

    def form(self) -> float:
        """The seconds that the slowest rank took."""
        self._epoch += 1
        store = open_store(HOST)
        return max(self.each(Member.form, self._epoch, store.port))

    def kill(self, rank: int) -> None:
        os.kill(self._processes[rank].pid, signal.SIGKILL)
        self._processes[rank].join()
        self._start(rank)

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(5)


def measure(ranks: Ranks, sizes: Sequence[int], epochs: int) -> None:
    """Prints the lines."""

    def show(kind: str, **numbers: float) -> None:
        print(json.dumps({"kind": kind, "ranks": ranks.size, **numbers}), flush=True)

    formed = ranks.form()
    for size in sizes:
        show("all_reduce", bytes=size, microseconds=max(ranks.each(Member.sweep, size)) * 1e6, operations=OPERATIONS)
    for epoch in range(epochs):
        left = ranks.each(Member.leave)
        show(
            "formation",
            epoch=epoch + 1,
            formed_seconds=formed,
            left_seconds=max(seconds for seconds, _ in left),
            free_bytes=min(free for _, free in left),
        )
        formed = ranks.form()
    victim = ranks.size - 1
    ranks.each(Member.begin, but=victim)
    ranks.kill(victim)
    left = ranks.each(Member.leave, but=victim)
    show("killed", left_seconds=max(seconds for seconds, _ in left), formed_seconds=ranks.form())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--bytes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--epochs", type=int, default=20, help="how often they leave and form again")
    given = parser.parse_args(arguments)
    take(ENVIRONMENT)  # as a fork server does for its ranks
    ranks = Ranks(given.ranks, given.device)
    try:
        measure(ranks, given.bytes, given.epochs)
    finally:
        ranks.close()


if __name__ == "__main__":
    main()
