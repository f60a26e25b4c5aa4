"""A device on a CPU that computes behind its host: each operation of torch is put into a stream, which a thread
carries out in order. As on a GPU the host goes on, and what it reads too early are no numbers.
"""

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from orca_common.checkpoint import Checkpoint
from orca_worker.data_plane.plane import DataPlane
from orca_worker.data_plane.process_groups import ProcessGroups
from orca_worker.device.replay import Kept, Replayed
from orca_worker.iteration.kv import KVManager
from orca_worker.iteration.model import Compute, Loading, Model
from orca_worker.models.device_loop import attend, on_cpu
from orca_worker.models.families import family_of
from orca_worker.models.plain import TorchStage
from orca_worker.models.recorded import RecordedFamily
from orca_worker.models.weights import Weights
from orca_worker.partition import Place, Types
from orca_worker.stage.stage import Launched, Stage

T = TypeVar("T")

PATIENCE = 60  # seconds until a wait for the stream counts as a hang
CPU = torch.device("cpu")


class Stream:
    """Work in its order. After a failure all that follows fails too, as on a GPU after an assertion of a kernel."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._left: int | None = None  # pieces of work until it dies
        self.given = 0  # pieces of work
        self.failure: Exception | None = None
        self.died = threading.Event()
        self.waits: list[str] = []  # operations for which the host has waited
        self._thread = threading.Thread(target=self._main, name="stream", daemon=True)
        self._thread.start()

    @property
    def runs_here(self) -> bool:
        """Whether the calling thread carries out a piece of work."""
        return threading.current_thread() is self._thread

    def put(self, work: Callable[[], object]) -> None:
        self.given += 1
        self._queue.put(work)

    def event(self) -> "Event":
        """Is passed when all is done that was put before."""
        event = Event(self)
        self.put(event.passed.set)
        return event

    def die(self, after: int = 0) -> None:
        """Ends the stream, as a process's end does, `after` pieces of work. None is under way now."""
        self._left = after
        self.put(lambda: None)

    def _main(self) -> None:
        with torch.inference_mode():
            while self._left != 0:
                work = self._queue.get()
                try:
                    if self.failure is None:
                        work()
                except Exception as error:
                    self.failure = error
                if self._left:
                    self._left -= 1
        self.died.set()


class Event:
    """`torch.cuda.Event` of a stream, recorded already."""

    def __init__(self, stream: Stream) -> None:
        self._stream, self.passed = stream, threading.Event()

    def query(self) -> bool:
        return self.passed.is_set()

    def synchronize(self) -> None:
        """Raises RuntimeError when the device has failed, or died."""
        for _ in range(PATIENCE * 20):
            if self._stream.failure is not None:
                raise RuntimeError(f"device-side assert triggered: {self._stream.failure}")
            if self._stream.died.is_set():
                raise RuntimeError("the process has ended")
            if self.passed.wait(0.05):
                return
        raise RuntimeError("the device hangs")


CURRENT = threading.local()  # .stream: that of a thread which is `behind` one


@contextmanager
def behind(stream: Stream) -> Iterator[None]:
    """Puts all operations of this thread into a stream."""
    CURRENT.stream = stream
    try:
        with Put(stream):
            yield
    finally:
        CURRENT.stream = None


# Held by the thread that is behind a stream. Below a dispatch mode torch makes the object of an operation when it is
# first called. Where two threads do so at once, it frees the one that the other thread still uses: an AttributeError,
# or a crash. (A real rank has a process of its own.)
ALONE = threading.Lock()


class Put(TorchDispatchMode):
    """Puts operations into the stream. Their results are there at once, with numbers that mean nothing yet."""

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self._stream = stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if not given:  # a new tensor, which only this thread has
            made = func(*args, **kwargs)
            return poisoned(made) if func.name().startswith("aten::empty") else made
        shapes = Shapes()
        try:
            shaped = func(*tree_map(shapes.of, args), **tree_map(shapes.of, kwargs))
        except (RuntimeError, NotImplementedError):  # the result's shape, or Python's number, is in the data
            self._stream.waits.append(func.name())
            self._stream.event().synchronize()
            return func(*args, **kwargs)
        results = [x for x in tree_leaves(shaped) if isinstance(x, Tensor)]
        if all(shapes.lies_in_argument(x) and shapes.argument(x) is None for x in results):
            return func(*args, **kwargs)  # views, which need no numbers

        def place(x: Any) -> Any:
            argument = shapes.argument(x)
            return empty_like(x) if argument is None else argument

        made = tree_map(place, shaped)
        self._stream.put(partial(run_into, partial(func, *args, **kwargs), made))
        return made


class Shapes:
    """Tensors without numbers in place of others, with the same memory shared among them."""

    def __init__(self) -> None:
        self._memory: dict[int, Tensor] = {}  # by the true memory
        self._arguments: list[tuple[Tensor, Tensor]] = []  # the one in its place, and the true one

    def of(self, x: Any) -> Any:
        if isinstance(x, torch.device):
            return torch.device("meta")
        if not isinstance(x, Tensor):
            return x
        storage = x.untyped_storage()
        memory = self._memory.setdefault(
            storage._cdata, torch.empty(-(-storage.nbytes() // 16) * 16, dtype=torch.uint8, device="meta")
        )
        shape = memory.view(x.dtype).as_strided(x.shape, x.stride(), x.storage_offset())
        self._arguments.append((shape, x))
        return shape

    def argument(self, x: Any) -> Tensor | None:
        """The true tensor, if x stands in its place."""
        return next((true for shape, true in self._arguments if shape is x), None)

    def lies_in_argument(self, x: Tensor) -> bool:
        return any(x.untyped_storage()._cdata == memory.untyped_storage()._cdata for memory in self._memory.values())


def empty_like(x: Any) -> Any:
    """A tensor of this shape on the CPU, poisoned."""
    return poisoned(torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)) if isinstance(x, Tensor) else x


def poisoned(x: Tensor) -> Tensor:
    """x with numbers that spoil each token which they come into."""
    if x.dtype.is_floating_point:
        return x.fill_(torch.nan)
    return x.fill_(torch.iinfo(x.dtype).max) if x.dtype != torch.bool else x


def run_into(function: Callable[[], Any], made: Any) -> None:
    """Calls a function, whose results go to where they were promised."""
    for place, result in zip(tree_leaves(made), tree_leaves(function()), strict=True):
        if isinstance(place, Tensor) and place is not result:
            place.copy_(result)


class Arriving:
    """`orca_kernels.transfer.Arriving` of a stream."""

    def __init__(self, x: Tensor) -> None:
        self._copy, self._event = x.clone(), CURRENT.stream.event()

    def is_there(self) -> bool:
        return self._event.query()

    def wait(self) -> Tensor:
        self._event.synchronize()
        return self._copy


class Streamed(Replayed):
    """`Recorder` of a stream: a replay, and the launch of a kernel, are one piece of work."""

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self._stream = stream

    def kept(self, plane: DataPlane) -> DataPlane:
        """With its groups, whatever becomes of them: a captured operation asks no host before it runs."""
        captured: Any = copy.copy(plane)
        if isinstance(plane, ProcessGroups):
            captured._groups = dict(plane._groups)
        return Kept(captured, self)

    def record(self, run: Callable[[], T]) -> Callable[[], T]:
        again = super().record(run)
        results = again()

        def replay() -> T:
            self._stream.put(again)
            return results

        return replay

    def launch(self, twin: Callable[..., T], *args: Any) -> T:
        # A launch takes the addresses of keys and values with it.
        args = tuple(copy.copy(x) if isinstance(x, KVManager) else x for x in args)
        if getattr(CURRENT, "stream", None) is None:  # before the epoch begins, nothing is behind
            return super().launch(twin, *args)
        made: Any
        if twin is attend:
            qkv, *_, a = args
            made = qkv.new_empty(len(qkv), a.of.heads * a.of.head_size)
        else:
            made = args[0].new_empty(len(args[0]), dtype=torch.int64), args[0].new_empty(len(args[0]))
        self._stream.put(partial(run_into, partial(twin, *args), made))
        return made


class StreamedStage(Stage):
    """A stage with the loop of a GPU, whose iterations are behind a stream."""

    def __init__(self, checkpoint: Checkpoint, slots: int, graphs_tp: bool = False) -> None:
        self.stream = Stream()
        compute = Compute(1, graphs_tp=graphs_tp)
        super().__init__(
            checkpoint, Types.of("float32"), CPU, slots, compute, partial(_load, checkpoint, self.stream, compute)
        )

    def launch(self, *args: Any, **kwargs: Any) -> Launched:
        with ALONE, behind(self.stream):
            return super().launch(*args, **kwargs)


def _load(checkpoint: Checkpoint, stream: Stream, compute: Compute, place: Place) -> tuple[Model, int]:
    family = family_of(checkpoint)
    assert isinstance(family, RecordedFamily)
    recording = family.record(family.read(checkpoint), place)
    weights = Weights(checkpoint.folder, family.prefix, recording.slices, torch.float32, CPU, Loading())
    stage = TorchStage(recording, weights, Types.of("float32"), CPU)
    return on_cpu(stage, Streamed(stream), compute), weights.bytes_read
