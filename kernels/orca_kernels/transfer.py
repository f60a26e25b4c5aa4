"""From the host to a device."""

import torch
from torch import Tensor


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """x of the host, on a device, in the order of its stream; the host goes on at once.

    A copy from pageable memory makes the host wait until the device has come so far: behind all layers of the iteration
    before. One from pinned memory does not, and torch keeps that memory until the copy is done.
    """
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x
