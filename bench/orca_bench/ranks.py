"""The engine alone on several ranks: a process each on this machine, which are driven from here, without a scheduler.

Control messages go one of two ways (paper sections 4.1 and 6.1). Sent ahead, each rank gets its own from here, and has
prepared its batch when hidden states come. By broadcast, as FasterTransformer's workers exchange them, rank 0 gets it
and the others wait for it on the data plane, length and content, before they do anything.
"""

import contextlib
import multiprocessing
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from enum import StrEnum
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from orca.v1 import worker_pb2
from orca_common.errors import Unavailable
from orca_kernels.cpu.cores import cores
from orca_worker.data_plane.process_groups import open_store
from orca_worker.data_plane.rendezvous import Rendezvous
from orca_worker.iteration.model import Output
from orca_worker.partition import Place

from .engine import EngineOptions, form, stage_of

HOST, CPU = "127.0.0.1", torch.device("cpu")
PATIENCE = 120.0  # seconds for a start, or for an iteration
ENDED = "a rank has ended; its error is above"


class Control(StrEnum):
    """How control messages come to ranks."""

    AHEAD = "ahead"
    BROADCAST = "broadcast"


class Ranks:
    """A context manager; inside of it, `run` runs iterations as a `Stage` does."""

    def __init__(self, options: EngineOptions, slots: int, tp: int, pp: int, control: Control) -> None:
        """The cores are divided by the ranks, whatever `options.threads` is."""
        self._options, self._slots, self._tp, self._pp, self._control = options, slots, tp, pp, control
        self._opened = contextlib.ExitStack()

    def __enter__(self) -> Self:
        """Returns when all ranks have formed. Raises Unavailable when one has ended."""
        started = multiprocessing.get_context("spawn")
        with contextlib.ExitStack() as opened:
            store, pipes = open_store(HOST), list[Connection]()
            places = [Place(self._tp, self._pp, *divmod(n, self._tp)) for n in range(self._tp * self._pp)]
            for place in places:
                ours, theirs = started.Pipe()
                about = self._options, self._slots, place, store.port, self._control
                process = started.Process(target=serve, args=(theirs, *about), daemon=True)
                process.start()
                theirs.close()
                opened.callback(process.join)
                opened.callback(process.terminate)
                pipes.append(ours)
            self._heads = pipes if self._control is Control.AHEAD else pipes[:1]
            self._sampler = pipes[(self._pp - 1) * self._tp]
            starting = list(pipes)
            while starting:  # one that has ended is seen while others still start
                ready = wait(starting, PATIENCE)
                pipe = next((one for one in starting if one in ready), starting[0])
                answer(pipe)
                starting.remove(pipe)
            self._opened = opened.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._opened.close()

    def run(self, iteration: worker_pb2.Iteration) -> Output:
        """Runs one iteration to its end. Raises Unavailable when a rank has ended."""
        message = iteration.SerializeToString()
        try:
            for pipe in self._heads:
                pipe.send_bytes(message)
        except OSError:
            raise Unavailable(ENDED) from None
        return Output(answer(self._sampler), [])


def answer(pipe: Connection) -> list[int]:
    """The next tokens of a rank. Raises Unavailable."""
    try:
        if pipe.poll(PATIENCE):
            return pipe.recv()
    except (EOFError, OSError):
        raise Unavailable(ENDED) from None
    raise Unavailable(f"a rank has not answered for {PATIENCE:g} s")


def serve(pipe: Connection, options: EngineOptions, slots: int, place: Place, port: int, control: Control) -> None:
    """A rank's process, until it is terminated."""
    options = replace(options, threads=max(1, cores() // place.ranks))
    checkpoint = options.checkpoint()
    stage = stage_of(options, checkpoint, slots)
    plane = Rendezvous(HOST, CPU).plane(place, 1, f"{HOST}:{port}", returns_tokens=False)
    form(stage, slots, place, plane, options.block_size_of(checkpoint))
    take: Callable[[], bytes] = pipe.recv_bytes
    if control is Control.BROADCAST:
        store = TCPStore(HOST, port, is_master=False, timeout=timedelta(seconds=PATIENCE), wait_for_workers=False)
        store = PrefixStore("control", store)
        dist.init_process_group("gloo", store=store, rank=place.index, world_size=place.ranks)
        take = (lambda: broadcast(pipe.recv_bytes())) if place.index == 0 else broadcast
    pipe.send([])
    with contextlib.suppress(EOFError):
        while True:
            output = stage.run(worker_pb2.Iteration.FromString(take()))
            if place.samples:
                pipe.send(output.token_ids)


def broadcast(message: bytes = b"") -> bytes:
    """Sends rank 0's message to all others, or receives it."""
    size = torch.tensor([len(message)])
    dist.broadcast(size, 0)
    content = bytearray(message or int(size))
    dist.broadcast(torch.frombuffer(content, dtype=torch.uint8), 0)
    return bytes(content)
