"""The timed model as a family. Imports numpy only to load a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orca_common.adapters import Adapter
from orca_common.bounded_file import shown
from orca_common.checkpoint import Checkpoint
from orca_common.errors import FailedPrecondition

from ...iteration.model import Compute, Loading, Model, ReadAdapter
from ...partition import Place, RankShare, Types

if TYPE_CHECKING:
    import torch


class TimedFamily:
    """`Family` of `model_type` "orca_timed"."""

    needs_torch = False
    modules = ("orca_worker.models.timed.model",)

    def check(self, checkpoint: Checkpoint, tensor_parallel: int, pipeline_parallel: int) -> None:
        """Checks `seconds`: the model can be cut in any way."""
        for adapter in checkpoint.adapters:
            self.adapter(checkpoint, adapter)
        seconds = checkpoint.config.get("seconds", 0)
        if type(seconds) not in (int, float) or not 0 <= seconds < 3600:
            raise FailedPrecondition(
                f"model: config.json of {checkpoint.name} gives seconds {shown(seconds)}, not a number from 0 to 3600"
            )

    def adapter(self, checkpoint: Checkpoint, adapter: Adapter) -> ReadAdapter:
        raise FailedPrecondition(f"adapter {adapter.name}: a model that waits has no weights to change")

    def check_weights(self, checkpoint: Checkpoint) -> None:
        """Does nothing: the model has no weights."""

    def share(self, checkpoint: Checkpoint, place: Place, types: Types) -> RankShare:
        return RankShare(place.stage, place.tensor_rank, range(0), {}, weight_bytes=0, slot_bytes=0)

    def load(
        self,
        checkpoint: Checkpoint,
        place: Place,
        types: Types,
        device: torch.device | None,
        compute: Compute,
        loading: Loading,
    ) -> tuple[Model, int]:
        from .model import TimedModel

        return TimedModel(checkpoint, place), 0
