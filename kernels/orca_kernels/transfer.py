"""Copies between the host and a device. Only `Arriving.wait` lets the host wait."""

import torch
from torch import Tensor


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copies x from the host to a device, in the order of the device's stream. The host does not wait.

    From pageable memory the host would wait until the device reaches the copy, after all layers of the iteration
    before. From pinned memory it does not wait, and torch keeps that memory until the copy is done.
    """
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x


def fill(x: Tensor, values: Tensor) -> None:
    """Copies values from the host into x, which stays where it is, as `to_device` does."""
    x.copy_(values.pin_memory() if x.device.type == "cuda" else values, non_blocking=True)


class Arriving:
    """A copy of x that is on its way from a device to the host: into pinned memory, with an event behind it.

    What happens to x afterwards, in the order of the device's stream, no longer counts. Any thread may ask and wait.
    """

    def __init__(self, x: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if x.device.type == "cuda":
            self._copy = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
            self._copy.copy_(x.contiguous(), non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._copy = x.clone()

    def is_there(self) -> bool:
        return self._event is None or self._event.query()

    def wait(self) -> Tensor:
        """The copy, on the host. Raises RuntimeError when the device has failed."""
        if self._event is not None:
            self._event.synchronize()
        return self._copy
