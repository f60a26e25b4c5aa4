"""The types of a rank's weights, keys, values and activations: what is asked for, or what is fastest on its machine."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from orca_common.errors import FailedPrecondition

from ..iteration.model import Compute
from ..partition import Types

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)


def choose_dtype(asked: str, device: torch.device | None, compute: Compute) -> str:
    """The type for `asked`, which may be "auto". Raises FailedPrecondition when the device cannot use it.

    auto     on a GPU     bfloat16, which GPUs since compute capability 8.0 multiply; float16 on older ones
             on a CPU     bfloat16 with the compiled kernels: half the bytes of float32, and decoding waits for memory.
                          Where the processor does not multiply it, they widen it in registers.
             plain torch  bfloat16 where the processor multiplies it, else float32: emulated, it is 2 to 3 times slower
    """
    if device is None:
        return "float32" if asked == "auto" else asked
    if device.type == "cpu" and asked == "float16":
        raise FailedPrecondition("dtype: on a CPU the weights are bfloat16 or float32, not float16")
    if asked != "auto":
        return asked
    import torch

    if device.type == "cuda":
        return "bfloat16" if torch.cuda.get_device_capability(device) >= (8, 0) else "float16"
    return "bfloat16" if kernels_are_used(compute) or torch.cpu._is_avx512_bf16_supported() else "float32"


def choose_types(asked: str, kv: str | None, device: torch.device | None, compute: Compute) -> Types:
    """The types for a `dtype` that is asked for, as `choose_dtype` finds it, and keys and values in `kv`; in the same
    if it is None. Raises FailedPrecondition when the device cannot use them."""
    if kv is not None and device is not None and device.type != "cpu":
        raise FailedPrecondition(f"kv_dtype: {kv} is read on a CPU alone, and this rank has a GPU")
    return Types.of(choose_dtype(asked, device, compute), kv)


def kernels_are_used(compute: Compute) -> bool:
    """Whether the compiled kernels run a model on this CPU. Where they cannot be built, the log says why.

    Raises FailedPrecondition when an instruction set was asked for by name and nothing is built.
    """
    from orca_kernels.cpu.build import CannotBuild
    from orca_kernels.cpu.library import best, library

    if compute.kernels in ("torch", "device-loop"):
        return False
    try:
        library(best() if compute.kernels == "auto" else compute.kernels)
    except CannotBuild as error:
        if compute.kernels != "auto":
            raise FailedPrecondition(f"kernels: {compute.kernels} cannot be had: {error}") from None
        log.warning("no compiled kernels, plain torch runs the model: %s", error)
        return False
    return True
