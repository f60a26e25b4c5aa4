"""CUDA graphs of iterations: a few sizes of batch are captured at start, and each batch runs in the next larger one.

An iteration of increments launches ten kernels a layer, most of them for a few microseconds; a graph launches them all
at once. What a graph reads and writes lies at fixed places: inputs in `Inputs`, keys and values in the memory
of the epoch, all else in one private pool that the graphs share. They may share it, because they are replayed one
after the other on one stream, and each one's results stay allocated.

**Never run on a GPU: none was at hand.** All but `CudaGraphs` runs in the tests, with the recorder of `replay.py`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

from ..data_plane.plane import DataPlane

T = TypeVar("T")

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)  # requests; larger batches run without a graph
WARM_UP = 2  # calls before a capture, in which Triton compiles and cuBLAS takes its memory


def bucket_of(requests: int) -> int | None:
    """The smallest bucket that holds this number of requests."""
    i = bisect_left(BUCKETS, requests)
    return BUCKETS[i] if i < len(BUCKETS) else None


class Recorder(Protocol):
    """Records a call, so that it can run again on the device, over the tensors at the same addresses."""

    @property
    def bytes(self) -> int:
        """Memory of the device that all recordings take."""
        ...

    def begin(self) -> None:
        """Follows the drop of all earlier recordings: they no longer count."""

    def kept(self, plane: DataPlane) -> DataPlane:
        """The plane as a recorded call uses it, so that its operations are a part of the recording."""
        ...

    def record(self, run: Callable[[], T]) -> Callable[[], T]:
        """Calls `run` a few times -> a replay, which returns the same tensors each time, with new contents.

        All ranks that `run` exchanges tensors with record the same at the same time.
        """
        ...


class CudaGraphs:
    """`Recorder` of one CUDA device. Its stream stays: cuBLAS keeps a workspace for each stream that it has seen."""

    def __init__(self, device: torch.device) -> None:
        self._device, self.bytes = device, 0
        self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)

    def begin(self) -> None:
        self._pool, self.bytes = torch.cuda.graph_pool_handle(), 0

    def kept(self, plane: DataPlane) -> DataPlane:
        """NCCL puts its operations into the stream, so a capture of the stream has them."""
        return plane

    def record(self, run: Callable[[], T]) -> Callable[[], T]:
        """Raises RuntimeError when something in `run` cannot be captured."""
        before, current = torch.cuda.memory_reserved(self._device), torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UP):
                run()
        graph = torch.cuda.CUDAGraph()
        # Other threads may call CUDA meanwhile: a process group's watchdog asks for its events.
        with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
            results = run()
        current.wait_stream(self._stream)
        self.bytes += torch.cuda.memory_reserved(self._device) - before

        def replay() -> T:
            graph.replay()
            return results

        return replay
