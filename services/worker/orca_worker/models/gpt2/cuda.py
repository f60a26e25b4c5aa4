"""GPT-2 on a CUDA device: attention, norms and activations are Triton kernels, linear operations stay with torch.

**Not run on a GPU yet.** tests/kernels/triton_kernels/test_gpt2.py runs it in Triton's interpreter.
"""

from __future__ import annotations

import logging
import shutil
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from orca_kernels.triton.activation import bias_act
from orca_kernels.triton.attention import split_attention
from orca_kernels.triton.norm import Norm, add_norm
from orca_kernels.triton.write_kv import write_kv

from ...data_plane.plane import DataPlane
from ...device.graphs import CudaGraphs
from ...device.model import DeviceModel, Head, Inputs
from ...iteration.kv import KVManager, KVShape
from ...iteration.model import Compute, Model
from ...partition import Place
from ...sampling.sampling import HiddenModel, SamplingModel
from . import layers
from .layers import Layer, LayerNorm
from .model import GPT2

MAX_HEAD_SIZE = 256  # a row of a tile is in registers

log = logging.getLogger(__name__)


def on_cuda(model: GPT2, place: Place, compute: Compute) -> Model:
    """The `Model` of a place, with the kernels, or without where this machine cannot run them. The log says which."""
    problem = obstacle(model)
    if problem is not None:
        log.warning("no Triton kernels: plain torch", extra={"reason": problem})
        return SamplingModel(model) if place.is_last else HiddenModel(model)
    log.info("Triton kernels", extra={"gpu": torch.cuda.get_device_name(model.device)})
    return DeviceModel(FusedGPT2(model), place, partial(CudaGraphs, model.device) if compute.graphs else None)


def obstacle(model: GPT2) -> str | None:
    """Why the kernels cannot run this model here; None if they can."""
    if torch.cuda.get_device_capability(model.device) < (8, 0):
        return "the GPU is older than sm_80"
    if model.config.head_size > MAX_HEAD_SIZE:
        return f"a head of {model.config.head_size} elements is larger than {MAX_HEAD_SIZE}"
    if not (shutil.which("gcc") or shutil.which("clang")):
        return "there is no C compiler, with which Triton builds its launcher"
    return None


class FusedLayer:
    """A layer of `GPT2` and what the kernels need of it."""

    def __init__(self, layer: Layer, activation: str) -> None:
        self.norm_1, self.norm_2 = norm(layer.norm_1), norm(layer.norm_2)
        self.qkv, self.merge, self.up, self.down = layer.qkv, layer.merge, layer.up, layer.down
        self.scale, self.activation = layer.scale, activation


class FusedGPT2:
    """`DeviceLayers`: the weights are those of a `GPT2`."""

    kernels = "triton"
    group = 1

    def __init__(self, model: GPT2) -> None:
        self._model = model
        self.device, self.max_positions = model.device, model.config.positions
        self.vocabulary_shares = model.vocabulary_shares
        self.layers = [FusedLayer(layer, model.config.activation) for layer in model.layers]
        self.head = model.head

    @property
    def kv_shape(self) -> KVShape:
        return self._model.kv_shape

    def incoming(self, tokens: int) -> tuple[tuple[int, ...], torch.dtype]:
        return self._model.incoming(tokens)

    def forward(self, inputs: Inputs, ids: Tensor, kv: KVManager, plane: DataPlane, x: Tensor | None) -> Tensor | Head:
        """`x` is the sum without its last term `update`, which the next norm's kernel adds."""
        plan, update = inputs.plan, None
        if self._model.embedding is not None:
            x = self._model.embedding(ids, plan.positions.clamp(min=0), plane.all_reduce)
        assert x is not None
        for layer, keys, values in zip(self.layers, kv.keys, kv.values, strict=True):
            y, x = add_norm(x, update, layer.norm_1)
            q = write_kv(layer.qkv(y), keys, values, plan)
            out = split_attention(q, keys, values, plan, layer.scale)
            y, x = add_norm(x, plane.all_reduce(layer.merge(out.flatten(1))), layer.norm_2)
            up = bias_act(functional.linear(y, layer.up.weight), layer.up.bias, layer.activation)
            update = plane.all_reduce(layer.down(up))
        if self.head is None:
            return x if update is None else x + update
        return partial(self._logits, self.head, x, update)

    def _logits(self, head: layers.Head, x: Tensor, update: Tensor | None, at: Tensor | None) -> Tensor:
        """Logits [n, V of this rank] of the tokens that follow flat indexes at [n]; None: all of them."""
        if at is not None:
            x, update = x[at], None if update is None else update[at]
        y, _ = add_norm(x, update, norm(head.norm))
        return functional.linear(y, head.weight)


def norm(of: LayerNorm) -> Norm:
    return Norm(of.weight, of.bias, of.epsilon)
