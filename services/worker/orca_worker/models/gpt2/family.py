"""GPT-2 as a family of models: what the rest of a rank asks of it. Imports torch only to load a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orca_common.checkpoint import Checkpoint

from ...iteration.model import Compute, Loading, Model
from ...partition import ITEM_BYTES, Place, RankShare
from ..dtype import kernels_are_used
from .configuration import GPT2Config
from .slices import check_cut, slices_of

if TYPE_CHECKING:
    import torch


class GPT2Family:
    """`Family` of `model_type` "gpt2"."""

    needs_torch = True
    modules = ("orca_worker.sampling.sampling", "orca_worker.models.gpt2.model", "orca_worker.models.gpt2.cpu")

    def check(self, checkpoint: Checkpoint, tensor_parallel: int, pipeline_parallel: int) -> None:
        check_cut(GPT2Config.read(checkpoint), tensor_parallel, pipeline_parallel)

    def share(self, checkpoint: Checkpoint, place: Place, dtype: str) -> RankShare:
        config, item = GPT2Config.read(checkpoint), ITEM_BYTES[dtype]
        layers, slices = place.layers(config.layers), slices_of(config, place)
        heads = config.heads // place.tensor_parallel
        return RankShare(
            place.stage,
            place.tensor_rank,
            layers,
            slices,
            weight_bytes=item * sum(part.elements for part in slices.values()),
            slot_bytes=item * 2 * len(layers) * heads * config.head_size,
        )

    def load(
        self,
        checkpoint: Checkpoint,
        place: Place,
        dtype: str,
        device: torch.device | None,
        compute: Compute,
        loading: Loading,
    ) -> tuple[Model, int]:
        import torch

        from ...sampling.sampling import HiddenModel, SamplingModel
        from ..weights import Weights
        from .model import GPT2

        assert device is not None
        config, kind = GPT2Config.read(checkpoint), getattr(torch, dtype)
        weights = Weights(checkpoint.folder, "transformer.", slices_of(config, place), kind, device, loading)
        if device.type == "cpu" and kernels_are_used(compute):
            from .cpu import GPT2OnCPU

            return GPT2OnCPU(config, place, weights, kind, compute), weights.bytes_read
        model = GPT2(config, place, weights, kind, device)
        if device.type == "cuda" and torch.cuda.is_available() and compute.kernels != "torch":
            from .cuda import on_cuda

            return on_cuda(model, place, compute), weights.bytes_read
        return (SamplingModel(model) if place.is_last else HiddenModel(model)), weights.bytes_read
