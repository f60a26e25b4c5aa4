"""NCCL's ways over gloo: a third kind of process groups, for ranks that compute behind a stream.

An operation begins when the stream comes to it, in a thread of its group, and a wait for it holds up the stream, not
the host. Ranks meet in a group's first operation. A peer that is gone raises no error: the operation spins on, until an
abort ends it as if it had succeeded, with garbage in its tensors.
"""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store
from worker.streams import CPU, Event, Stream, poisoned

from orca_worker.data_plane.backends import Gloo, Group, first_operation

GLOO = Gloo("127.0.0.1")


class Garbage:
    """`Backend` of a rank that computes behind a stream."""

    device, in_streams = CPU, True

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.meeting = [threading.Event() for _ in range(3)]  # for each group: its ranks begin to meet

    def group(self, store: Store, rank: int, size: int) -> Group:
        return Spinning(self.stream, partial(GLOO.group, store, rank, size))

    def meet(self, group: Group, rank: int, size: int, sums: bool) -> None:
        next(begun for begun in self.meeting if not begun.is_set()).set()
        first_operation(group, torch.zeros(1), rank, size, sums)
        self.stream.event().synchronize()

    def leave(self, group: Group) -> None:
        group.abort()


class Died(Exception):
    """A rank ended while it joined."""


class Dying(Garbage):
    """`Backend` of a rank that dies, or freezes, after `steps` steps of joining."""

    def __init__(self, stream: Stream, steps: int, freezes: bool) -> None:
        super().__init__(stream)
        self._steps, self._freezes = steps, freezes
        self.came, self.over = threading.Event(), threading.Event()

    def group(self, store: Store, rank: int, size: int) -> Group:
        self._step()
        return super().group(store, rank, size)

    def meet(self, group: Group, rank: int, size: int, sums: bool) -> None:
        self._step()
        super().meet(group, rank, size, sums)

    def _step(self) -> None:
        if not self._steps:
            self.came.set()
            if self._freezes:
                self.over.wait()
            raise Died
        self._steps -= 1


class Job(NamedTuple):
    """An operation that was put into the stream."""

    ready: Event | None  # the stream has come to it; None: it is a part of what the stream runs now
    run: Callable[[Any], Any]
    outputs: Sequence[Tensor]
    done: threading.Event


class Work:
    """The result of a call that has put an operation into the stream."""

    def __init__(self, stream: Stream, done: threading.Event) -> None:
        self._stream, self._done = stream, done

    def wait(self) -> None:
        self._stream.put(self._done.wait)


class Spinning:
    """A group of NCCL over one of gloo, which is made in its first operation."""

    def __init__(self, stream: Stream, connect: Callable[[], Any]) -> None:
        self._stream, self._connect = stream, connect
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._lock = threading.Lock()  # no job comes behind the abort
        self._gloo: Any = None
        self._aborted = threading.Event()
        self._connected = threading.Event()  # or aborted
        self._thread: threading.Thread | None = None  # from the first operation on

    def allreduce(self, tensors: list[Tensor]) -> Work:
        return self._put(lambda gloo: gloo.allreduce(tensors), tensors)

    def send(self, tensors: list[Tensor], to: int, tag: int) -> Work:
        return self._put(lambda gloo: gloo.send(tensors, to, tag), [])

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Work:
        return self._put(lambda gloo: gloo.recv(tensors, source, tag), tensors)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], options: Any) -> Work:
        return self._put(lambda gloo: gloo.gather(outputs, inputs, options), [x for part in outputs for x in part])

    def abort(self) -> None:
        with self._lock:
            self._aborted.set()
            self._jobs.put(None)
        self._connected.set()
        if self._gloo is not None:
            GLOO.leave(self._gloo)

    def _put(self, run: Callable[[Any], Any], outputs: Sequence[Tensor]) -> Work:
        within = self._stream.runs_here  # a replay has the operation
        job = Job(None if within else self._stream.event(), run, outputs, threading.Event())
        if within:
            self._do(job)
            return Work(self._stream, job.done)
        with self._lock:
            if self._aborted.is_set():
                self._stream.put(partial(self._do, job))
            else:
                self._jobs.put(job)
                if self._thread is None:
                    self._thread = threading.Thread(target=self._main, name="spinning", daemon=True)
                    self._thread.start()
        return Work(self._stream, job.done)

    def _main(self) -> None:
        with torch.inference_mode():
            while (job := self._jobs.get()) is not None:
                self._do(job)

    def _do(self, job: Job) -> None:
        try:
            if job.ready is not None:
                job.ready.synchronize()
            self._meet()
            if not self._aborted.is_set():
                job.run(self._gloo).wait()
        except Exception:  # gloo, or the stream, knows that somebody has ended; NCCL would not
            self._aborted.wait()
        if self._aborted.is_set():
            for x in job.outputs:
                poisoned(x)
        job.done.set()

    def _meet(self) -> None:
        if self._gloo is not None or self._aborted.is_set():
            return

        def connect() -> None:
            try:
                self._gloo = self._connect()
            except Exception:  # the store has closed
                self._aborted.wait()
            self._connected.set()

        threading.Thread(target=connect, name="connecting", daemon=True).start()
        self._connected.wait()
