"""The models, by `model_type` of their config.json.

family       file      what it is
gpt2         gpt2.py   GPT-2
orca_timed   timed.py  no model: waits, for experiments with the control plane; needs no torch
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from orca_common.checkpoint import Checkpoint
from orca_common.errors import FailedPrecondition

from ..batch import Batch
from ..kv import KVManager, KVShape

if TYPE_CHECKING:
    import torch

MODEL_TYPES = ("gpt2", "orca_timed")


class Output(NamedTuple):
    """What an iteration made: one token a request, in the batch's order."""

    token_ids: list[int]
    logprobs: list[float]  # NaN where it was not asked for


class Model(Protocol):
    """A rank's slice of a model, ready to run. One thread calls it."""

    @property
    def kv_shape(self) -> KVShape | None:
        """What it keeps for each token; None: nothing."""
        ...

    def run(self, batch: Batch, kv: KVManager) -> Output:
        """One iteration: all layers, and a token for each request. Returns when the tokens are on the host."""
        ...


def check_model_type(checkpoint: Checkpoint) -> None:
    """Raises FailedPrecondition when no file here knows the model."""
    if checkpoint.model_type not in MODEL_TYPES:
        known = ", ".join(MODEL_TYPES)
        raise FailedPrecondition(f"model: {checkpoint.name} is of type {checkpoint.model_type}; Orca has {known}")


def needs_torch(checkpoint: Checkpoint) -> bool:
    return checkpoint.model_type != "orca_timed"


def load_model(checkpoint: Checkpoint, dtype: str, device: torch.device | None) -> Model:
    """Loads a model. `device` may be None for one that needs no torch. Raises FailedPrecondition with a sentence."""
    check_model_type(checkpoint)
    if checkpoint.model_type == "orca_timed":
        from .timed import TimedModel

        return TimedModel(checkpoint)
    import torch

    from ..sampling import SamplingModel
    from .gpt2 import GPT2

    assert device is not None
    return SamplingModel(GPT2(checkpoint, getattr(torch, dtype), device))
