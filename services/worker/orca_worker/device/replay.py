"""Graphs without a GPU: the calls of a recording are kept with their tensors, and run again on the same tensors.

A replay does as a CUDA graph does, which is less than to call the iteration again: no Python of the iteration runs, and
each result goes to where it lay first. So a number that was read while recording, an address that has moved, or a
tensor that no call fills any more gives wrong tokens here, as it would on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..data_plane.plane import DataPlane, Loopback

T = TypeVar("T")

# Calls in which Python reads a tensor's numbers or gives its own. A device cannot do them while a graph is captured.
OF_THE_HOST = [
    *(getattr(Tensor, name) for name in ("item", "tolist", "numpy", "nonzero")),
    *(getattr(Tensor, name) for name in ("__bool__", "__int__", "__float__", "__index__", "__array__")),
    *(torch.from_numpy, torch.tensor, torch.nonzero),
]


class Call(NamedTuple):
    again: Callable[[], Any]
    places: list[Tensor | None]  # of its results; None: it lies in an argument's memory, as a view of it does


class Calls(TorchFunctionMode):
    """Keeps torch's functions that are called inside `with`."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: list[Call] = []
        self._in_kernel = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._in_kernel:
            return func(*args, **(kwargs or {}))
        if func in OF_THE_HOST:
            raise RuntimeError(f"{func.__name__}: not permitted while a graph is captured")
        return self._keep(func, args, kwargs or {})

    def kernel(self, twin: Callable[..., T], args: tuple[Any, ...]) -> T:
        """Keeps a kernel's twin as one call."""
        self._in_kernel = True
        try:
            return self._keep(twin, args, {})
        finally:
            self._in_kernel = False

    def _keep(self, function: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
        results = function(*args, **kwargs)
        given = {_memory(x) for x in _tensors([args, kwargs])}
        places = [None if _memory(x) in given else x for x in _tensors(results)]
        self._kept.append(Call(partial(function, *args, **kwargs), places))
        return results

    def poison(self) -> None:
        """Makes all results unusable, until a replay fills them."""
        for call in self._kept:
            for x in call.places:
                if x is not None and x.dtype != torch.bool:
                    x.fill_(torch.nan if x.dtype.is_floating_point else torch.iinfo(x.dtype).min)

    def replay(self) -> None:
        """Runs the calls again, each with the tensors that it had."""
        for call in self._kept:
            for place, result in zip(call.places, _tensors(call.again()), strict=True):
                if place is not None:
                    place.copy_(result)


class Kept(Loopback):
    """A `DataPlane` whose operations inside a stage are calls of a recording, as launches are."""

    def __init__(self, plane: DataPlane, recorder: Replayed) -> None:
        self._plane, self._recorder = plane, recorder

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._recorder.launch(self._plane.all_reduce, x)

    def gather(self, x: Tensor, widths: list[int]) -> Tensor | None:
        return self._recorder.launch(self._plane.gather, x, widths)


class Replayed:
    """`Recorder` of a CPU."""

    bytes = 0

    def __init__(self) -> None:
        self._calls: Calls | None = None  # while recording

    def begin(self) -> None:
        pass

    def kept(self, plane: DataPlane) -> DataPlane:
        return Kept(plane, self)

    def record(self, run: Callable[[], T]) -> Callable[[], T]:
        """Raises RuntimeError when `run` reads the numbers of a tensor."""
        run()  # of padding alone, as the calls before a capture
        self._calls = calls = Calls()
        try:
            with calls:
                results = run()
        finally:
            self._calls = None
        calls.poison()

        def replay() -> T:
            calls.replay()
            return results

        return replay

    def launch(self, twin: Callable[..., T], *args: Any) -> T:
        """Calls the twin of a kernel. It may read numbers: a kernel reads them on the device, at each replay."""
        return twin(*args) if self._calls is None else self._calls.kernel(twin, args)


def _tensors(values: object) -> Iterator[Tensor]:
    """The tensors in nested lists, tuples and dictionaries."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, dict):
        yield from _tensors(list(values.values()))
    elif isinstance(values, list | tuple):
        for each in values:
            yield from _tensors(each)


def _memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()
