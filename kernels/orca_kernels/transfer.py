"""Copies from the host to a device."""

import torch
from torch import Tensor


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copies x from the host to a device, in the order of the device's stream. The host does not wait.

    From pageable memory the host would wait until the device reaches the copy, after all layers of the iteration
    before. From pinned memory it does not wait, and torch keeps that memory until the copy is done.
    """
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x
