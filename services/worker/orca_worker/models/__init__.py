"""The models, by `model_type` of their config.json.

family       file      what it is
gpt2         gpt2.py   GPT-2
orca_timed   timed.py  no model: waits, for experiments with the control plane; a single rank needs no torch
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple, Protocol

from orca_common.checkpoint import Checkpoint
from orca_common.errors import FailedPrecondition

from ..batch import Batch
from ..kv import KVManager, KVShape

if TYPE_CHECKING:
    import torch

    from ..data_plane import DataPlane
    from ..partition import Place

MODEL_TYPES = ("gpt2", "orca_timed")


class Output(NamedTuple):
    """What an iteration made here: one token a request, in the batch's order, on the rank that samples; hidden states
    at every stage but the last."""

    token_ids: list[int]
    logprobs: list[float]  # NaN where it was not asked for
    hidden: torch.Tensor | None = None


class Model(Protocol):
    """A rank's slice of a model, ready to run. One thread calls it."""

    @property
    def kv_shape(self) -> KVShape | None:
        """What it keeps for each token; None: nothing."""
        ...

    def incoming(self, tokens: int) -> tuple[tuple[int, ...], torch.dtype] | None:
        """Shape and type of the hidden states of so many tokens that a stage before sends; None: it sends none."""
        ...

    def run(self, batch: Batch, kv: KVManager, plane: DataPlane, x: torch.Tensor | None) -> Output:
        """One iteration of this stage's layers. The rank that samples returns when the tokens are on the host; no other
        waits for its device."""
        ...


def check_model_type(checkpoint: Checkpoint) -> None:
    """Raises FailedPrecondition when no file here knows the model."""
    if checkpoint.model_type not in MODEL_TYPES:
        known = ", ".join(MODEL_TYPES)
        raise FailedPrecondition(f"model: {checkpoint.name} is of type {checkpoint.model_type}; Orca has {known}")


def needs_torch(checkpoint: Checkpoint) -> bool:
    return checkpoint.model_type != "orca_timed"


def import_modules(checkpoint: Checkpoint) -> None:
    """Imports at once what a rank of this model would import when it forms: torch alone takes 1 to 2 s. Nothing for a
    model that may do without."""
    if needs_torch(checkpoint):
        for name in ("..process_groups", "..sampling", ".gpt2"):
            import_module(name, __name__)


def load_model(checkpoint: Checkpoint, place: Place, dtype: str, device: torch.device | None) -> tuple[Model, int]:
    """Loads a rank's slice: the model, and how many bytes of weights were read. `device` may be None for one that
    needs no torch. Raises FailedPrecondition with a sentence."""
    check_model_type(checkpoint)
    if checkpoint.model_type == "orca_timed":
        from .timed import TimedModel

        return TimedModel(checkpoint, place), 0
    import torch

    from ..partition import gpt2_slices
    from ..sampling import HiddenModel, SamplingModel
    from ..weights import Weights
    from .gpt2 import GPT2
    from .gpt2_config import GPT2Config

    assert device is not None
    config, kind = GPT2Config.read(checkpoint), getattr(torch, dtype)
    weights = Weights(checkpoint.folder, "transformer.", gpt2_slices(config, place), kind, device)
    model = GPT2(config, place, weights, kind, device)
    return (SamplingModel(model) if place.is_last else HiddenModel(model)), weights.bytes_read
