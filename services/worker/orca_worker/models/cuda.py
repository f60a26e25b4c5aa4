"""A recorded stage on a CUDA device: attention, norms, activations and products with codes are Triton kernels, other
products torch's.

**Not run on a GPU yet.** tests/kernels/triton_kernels/test_stage.py runs it in Triton's interpreter.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from orca_kernels.cpu.program import Operand, Packed, Program
from orca_kernels.triton.activation import bias_act, gate_act
from orca_kernels.triton.attention import split_attention
from orca_kernels.triton.codes import Coded
from orca_kernels.triton.linear import linear
from orca_kernels.triton.norm import Norm, add_norm
from orca_kernels.triton.plan import Plan
from orca_kernels.triton.rope import Rope
from orca_kernels.triton.sampling import sample
from orca_kernels.triton.write_kv import HeadNorms, write_kv

from ..data_plane.plane import DataPlane
from ..device.graphs import CudaGraphs
from ..device.model import DeviceModel, Head
from ..iteration.kv import KVManager, KVShape
from ..iteration.model import Compute, Model
from ..partition import Place
from .formats.table import Reader, Weight
from .plain import Kernels, LoadedAttention, LoadedNorm, Pass, TorchStage
from .recording import Matrix, Recording
from .weights import WeightSource

MAX_HEAD_SIZE = 256  # a row of a tile is in registers

log = logging.getLogger(__name__)


def on_cuda(stage: TorchStage, compute: Compute) -> Model:
    """The `Model` of a place, with the kernels."""
    place = stage.recording.place
    log.info("Triton kernels", extra={"gpu": torch.cuda.get_device_name(stage.device)})
    recorder = CudaGraphs(stage.device) if wants_graphs(place, compute) else None
    return DeviceModel(FusedStage(stage, TritonKernels), place, recorder, sample)


def wants_graphs(place: Place, compute: Compute) -> bool:
    """Whether increments run as graphs. With several tensor ranks only on demand: no NCCL was ever seen in a graph."""
    return compute.graphs and (place.tensor_parallel == 1 or compute.graphs_tp)


def unfit(recording: Recording, device: torch.device, has_adapters: bool) -> str | None:
    """Why the kernels cannot run this model here; None if they can."""
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "the GPU is older than sm_80"
    if recording.has_encoder:
        return "the model has an encoder"
    if has_adapters:
        return "there are adapters"
    if recording.head_size > MAX_HEAD_SIZE:
        return f"a head of {recording.head_size} elements is larger than {MAX_HEAD_SIZE}"
    if not (shutil.which("gcc") or shutil.which("clang")):
        return "there is no C compiler, with which Triton builds its launcher"
    return failure(device)


def failure(device: torch.device) -> str | None:
    """Why a kernel cannot be compiled or run on a device; None if it can. Triton's errors are of many kinds."""
    try:
        x = torch.ones(2, 64, device=device)
        y, _ = add_norm(x, x, Norm(x[0], None, 0.0, centered=False))
        right = torch.allclose(y, torch.ones_like(y))
    except Exception as error:
        return f"a kernel fails: {error}"
    return None if right else "a kernel computes something else than it should"


class FusedStage:
    """`DeviceLayers`: the weights are those of a `TorchStage`."""

    kernels = "triton"

    def __init__(self, stage: TorchStage, kernels: Callable[[Plan, KVManager], Kernels]) -> None:
        self._stage, self._kernels, recording = stage, kernels, stage.recording
        self.device, self.max_positions = stage.device, recording.positions
        self.vocabulary_shares, self.group = stage.vocabulary_shares, recording.group

    @property
    def kv_shape(self) -> KVShape:
        return self._stage.kv_shape

    def incoming(self, tokens: int) -> tuple[tuple[int, ...], torch.dtype] | None:
        return self._stage.incoming(tokens)

    def prepare(self, kv: KVManager) -> None:
        self._stage.prepare(kv)

    def forward(self, plan: Plan, ids: Tensor, kv: KVManager, plane: DataPlane, x: Tensor | None) -> Tensor | Head:
        return self._stage.run(Pass(self._kernels(plan, kv), plane.all_reduce, ids, plan.positions.clamp(min=0), x))


class TritonKernels:
    """`Kernels` of Triton."""

    def __init__(self, plan: Plan, kv: KVManager) -> None:
        self._plan, self._kv = plan, kv

    def add_norm(self, x: Tensor, update: Tensor | None, norm: LoadedNorm) -> tuple[Tensor, Tensor]:
        return add_norm(x, update, Norm(norm.weight, norm.bias, norm.epsilon, centered=norm.bias is not None))

    def activated(self, x: Tensor, weight: Weight, bias: Tensor | None, activation: str) -> Tensor:
        return bias_act(weight.linear(x, None), bias, activation)

    def gated(self, gate_up: Tensor, activation: str) -> Tensor:
        return gate_act(gate_up, activation)

    def attend(self, qkv: Tensor, a: LoadedAttention) -> Tensor:
        keys, values = self._kv.keys[a.of.layer], self._kv.values[a.of.layer]
        rope = Rope(*a.rotary) if a.rotary is not None else None
        norms = None
        if a.query_norm is not None and a.key_norm is not None:
            norms = HeadNorms(a.query_norm.weight, a.key_norm.weight, a.key_norm.epsilon)
        q = write_kv(qkv, keys, values, self._plan, rope, norms=norms)
        return split_attention(q, keys, values, self._plan, a.of.scale, a.of.window).flatten(1)


class OnGPU(NamedTuple):
    """`Weight` in codes, which Triton's kernels multiply."""

    of: Coded

    def joined(self, other: OnGPU, join: Callable[[Tensor, Tensor], Tensor]) -> OnGPU:
        return OnGPU(self.of.joined(other.of, join))

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return linear(x, self.of, bias)

    def pack(self, program: Program, bias: Tensor | None) -> Packed:
        raise NotImplementedError("it is packed for a GPU")

    def coded(self, device: torch.device) -> Coded:
        return self.of


class GPUReader(NamedTuple):
    """`Reader` of any format: weights in codes come for Triton's kernels, numbers as they are."""

    of: Reader
    device: torch.device

    def load(self, weights: WeightSource, matrix: Matrix) -> Weight:
        weight = self.of.load(weights, matrix)
        coded = weight.coded(self.device)
        return weight if coded is None else OnGPU(coded)

    def operand(self, program: Program, width: int) -> Operand:
        return self.of.operand(program, width)
