"""A CUDA device without a GPU: torch's fake tensors, which have a shape, a type and a device, but no data.

Fake tensors refuse operands of different devices, as a GPU would.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from orca_worker.models.plain import TorchStage

CUDA = torch.device("cuda", 0)


class Watch(TorchDispatchMode):
    """Notes operations that make the host wait for the device: blocking copies between the two."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self.current: torch.device | None = None  # of the thread

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        tensors = [x for x in tree_leaves((args, kwargs, result)) if isinstance(x, Tensor) and x.dim()]
        goes_on = kwargs.get("non_blocking") or (func is torch.ops.aten.copy_.default and args[2:] == (True,))
        if len({x.device.type for x in tensors}) > 1 and not goes_on:
            self.waits.append(str(func))
        return result


class Event:
    """A CUDA event that the device has not passed yet. A wait for it is noted."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        self._watch.waits.append("event")


@contextmanager
def fake_cuda(memory: int = 80 << 30) -> Iterator[Watch]:
    """Replaces all tensors by fake ones, and answers for the driver.

    memory: bytes of the device, of which 2 GiB are taken.
    """
    watch = Watch()

    def tolist(x: Tensor) -> Any:
        watch.waits.append("tolist")
        return zeros(x.shape)

    make = torch.empty

    def empty(*shape: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        return make(*shape, **options)

    with pytest.MonkeyPatch.context() as patch, FakeTensorMode(allow_non_fake_inputs=True):
        patch.setattr(FakeTensor, "tolist", tolist)
        patch.setattr(Tensor, "pin_memory", lambda x: make(x.shape, dtype=x.dtype))  # x itself may be a known number
        patch.setattr(torch, "empty", empty)
        patch.setattr(torch.cuda, "Event", lambda: Event(watch))
        patch.setattr(torch.cuda, "set_device", lambda device: setattr(watch, "current", device))
        patch.setattr(torch.cuda, "is_available", lambda: False)  # no Triton kernels: they would need the data
        patch.setattr(torch.cuda, "empty_cache", lambda: None)
        patch.setattr(torch.cuda, "mem_get_info", lambda device: (memory - (2 << 30), memory))
        yield watch


def zeros(shape: tuple[int, ...]) -> Any:
    """A list of lists."""
    return [zeros(shape[1:]) for _ in range(shape[0])] if shape else 0


def bytes_held(model: TorchStage) -> int:
    """The bytes of all weights. Each storage counts once, because tied embeddings are one."""
    found: dict[StorageWeakRef, int] = {}

    def look(x: object) -> None:
        if isinstance(x, Tensor):
            storage = x.untyped_storage()
            found[StorageWeakRef(storage)] = storage.nbytes()
        elif isinstance(x, list | tuple):
            for one in x:
                look(one)
        elif isinstance(x, partial):
            look(x.args)

    look([*model._steps, *model._of_head])
    return sum(found.values())
