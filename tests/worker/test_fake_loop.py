"""The GPU loop of big models at their true sizes, without a GPU: on fake tensors, with kernels that are only counted.

These tests check the path, not its numbers: shapes, types and devices fit, no captured iteration waits for the host or
copies from it, and the memory that is left free holds all intermediate tensors.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from worker.fake_cuda import CUDA, Watch, fake_cuda

from orca_common.checkpoint import Checkpoint
from orca_kernels.triton import activation, attention, norm, sampling, write_kv
from orca_lab.shapes import SHAPES
from orca_lab.shards import BLOCK_SIZE, INCREMENT, INITIATION, Case, FakeGroups
from orca_worker.data_plane.plane import DataPlane, Loopback
from orca_worker.device import model as device_model
from orca_worker.device.graphs import BUCKETS
from orca_worker.device.model import PIECE, DeviceModel
from orca_worker.iteration.model import Compute, Model
from orca_worker.machine import GPU_SHARE
from orca_worker.models.cuda import FusedStage, TritonKernels, wants_graphs
from orca_worker.models.families import family_of
from orca_worker.models.plain import TorchStage
from orca_worker.models.recorded import RecordedFamily
from orca_worker.models.weights import WeightSource
from orca_worker.partition import Place, Slice, Types
from orca_worker.stage.stage import Stage

T = TypeVar("T")
LAUNCHING = (activation, attention, norm, sampling, write_kv)  # modules that launch kernels
LAYERS = 2  # of a stage
LLAMA = {"model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 500000.0}
LLAMAS = {
    "llama-8b": {
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "intermediate_size": 14336,
    },
    "llama-70b": {
        "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
        "intermediate_size": 28672,
    },
}  # fmt: skip


def checkpoint_of(name: str) -> Checkpoint:
    if name in SHAPES:
        return SHAPES[name].config.checkpoint(name)
    return Checkpoint(Path(name), name, LLAMA | LLAMAS[name], "llama", 128256, 8192, (), digest="")


def shallow(checkpoint: Checkpoint, layers: int) -> Checkpoint:
    """The same model with few layers. All of them are alike, and each costs as much as the first."""
    of_layers = "n_layer" if "n_layer" in checkpoint.config else "num_hidden_layers"
    return replace(checkpoint, config=checkpoint.config | {of_layers: layers})


def corners(tp: int, pp: int) -> list[Place]:
    """Places that differ: the first stage, a middle one and the last, of tensor rank 0 and of the last one."""
    return [Place(tp, pp, stage, rank) for stage in sorted({0, min(1, pp - 1), pp - 1}) for rank in sorted({0, tp - 1})]


SAMPLE = {"gpt3-13b": (1, 1), "gpt3-175b": (8, 2), "llama-70b": (4, 2)}
OTHERS = [
    *((shape.name, (shape.tensor_parallel, shape.pipeline_parallel)) for shape in SHAPES.values()),
    *(("llama-8b", (1, 1)), ("llama-8b", (2, 1)), ("llama-70b", (8, 1))),
]


def in_tests() -> list[Any]:
    """Model and place. `make distributed` runs what is not of the sample, in which tensor rank 0 stands for all."""
    every = [(name, place) for name, of in [*SAMPLE.items(), *OTHERS] for place in corners(*of)]
    sample = [(name, place) for name, of in SAMPLE.items() for place in corners(*of) if place.tensor_rank == 0]
    rest = [pytest.param(*each, marks=pytest.mark.long) for each in dict.fromkeys(every) if each not in sample]
    return [*sample, *rest]


class EmptyWeights(WeightSource):
    """`WeightSource` of a device that computes nothing."""

    def __init__(self, slices: Mapping[str, Slice]) -> None:
        self._slices, self.bytes_made = slices, 0

    def find(self, name: str, dtype: torch.dtype | None = None) -> Tensor | None:
        if name not in self._slices:
            return None
        tensor = torch.empty(self._slices[name].size, dtype=torch.bfloat16, device=CUDA)
        self.bytes_made += tensor.nbytes
        return tensor


class Strict:
    """`Recorder` that refuses a call in which the host waits for the device, or copies from it or to it."""

    bytes = 0

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def begin(self) -> None:
        pass

    def kept(self, plane: DataPlane) -> DataPlane:
        return plane

    def record(self, run: Callable[[], T]) -> Callable[[], T]:
        run()
        self._watch.waits.clear()
        with self._watch:
            results = run()
        assert not self._watch.waits
        return lambda: results


class Peak(TorchDispatchMode):
    """Counts the bytes of the tensors that are alive among those made inside `with`."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.now = 0
        self._tensors: Counter[int] = Counter()  # by their storage

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {self._key(x) for x in tree_leaves((args, kwargs or {})) if isinstance(x, Tensor)}
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and (self._key(x) in self._tensors or self._key(x) not in given):
                self._keep(x)
        return result

    def _key(self, x: Tensor) -> int:
        return x.untyped_storage()._cdata

    def _keep(self, x: Tensor) -> None:
        key, size = self._key(x), x.untyped_storage().nbytes()
        if not self._tensors[key]:
            self.now += size
            self.bytes = max(self.bytes, self.now)
        self._tensors[key] += 1
        weakref.finalize(x, self._drop, key, size)

    def _drop(self, key: int, size: int) -> None:
        self._tensors[key] -= 1
        if not self._tensors[key]:
            del self._tensors[key]
            self.now -= size


def kind_of(x: Any) -> object:
    """An argument as Triton tells it from others: its type, and of an integer whether it is 1, or a multiple of 16."""
    if isinstance(x, Tensor):
        return x.dtype
    return (x == 1, x % 16 == 0) if isinstance(x, int) else type(x)


class Device:
    """A rank's stage on a device that computes nothing: its kernels are counted by their names."""

    def __init__(self, checkpoint: Checkpoint, place: Place, watch: Watch, patch: pytest.MonkeyPatch) -> None:
        self.checkpoint, self._place, self._watch = checkpoint, place, watch
        self.launched: Counter[str] = Counter()
        self.compiled: set[tuple[Any, ...]] = set()  # what Triton would compile
        self.weight_bytes = 0
        for module in LAUNCHING:
            patch.setattr(module, "launch", self._launch)

    def _launch(self, kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        assert {x.device for x in args if isinstance(x, Tensor)} == {CUDA}
        assert all(0 < n < 1 << 31 for n in grid[:1])
        assert all(0 < n < 1 << 16 for n in grid[1:]), "CUDA's bound of the second and third dimension"
        self.launched[kernel.__name__] += 1
        kinds = (kind_of(x) for x, named in zip(args, kernel.params, strict=False) if not named.do_not_specialize)
        self.compiled.add((kernel.__name__, *kinds, *sorted(options.items())))

    def _load(self, place: Place) -> tuple[Model, int]:
        family = family_of(self.checkpoint)
        assert isinstance(family, RecordedFamily)
        recording = family.record(family.read(self.checkpoint), place)
        weights = EmptyWeights(recording.slices)
        stage = TorchStage(recording, weights, Types.of("bfloat16"), CUDA)
        self.weight_bytes = weights.bytes_made
        recorder = Strict(self._watch) if wants_graphs(place, Compute()) else None
        model = DeviceModel(FusedStage(stage, TritonKernels), place, recorder, sampling.sample)
        return model, weights.bytes_made

    @contextmanager
    def formed(self, slots: int) -> Iterator[Stage]:
        stage = Stage(self.checkpoint, Types.of("bfloat16"), CUDA, slots, Compute(), self._load)
        plane = FakeGroups(self._place, CUDA) if self._place.ranks > 1 else Loopback()
        try:
            assert stage.form(BLOCK_SIZE, self._place, plane).slots == slots
            stage.allocate(slots, BLOCK_SIZE)
            yield stage
        finally:
            plane.abort("the test is done")


@pytest.fixture
def watch() -> Iterator[Watch]:
    with fake_cuda() as watch:
        yield watch


@pytest.mark.parametrize(("name", "place"), in_tests(), ids=str)
def test_every_place(name: str, place: Place, watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    """An initiation and an increment of three requests. The host waits for nothing but, at the end, the tokens."""
    todo = [Case(INITIATION, 3, 40), Case(INCREMENT, 3, 40)]
    device = Device(shallow(checkpoint_of(name), LAYERS * place.pipeline_parallel), place, watch, monkeypatch)
    with device.formed(todo[0].slots) as stage:
        model = stage._model
        assert isinstance(model, DeviceModel)
        compiled = set(device.compiled)
        assert list(model._recorded) == ([*reversed(BUCKETS)] if place.tensor_parallel == 1 else [])
        for case in todo:
            device.launched.clear()
            watch.waits.clear()
            with watch:
                launched = stage.launch(case.message(device.checkpoint.vocab_size))
            assert not watch.waits
            hidden = launched.output.hidden
            tokens = 3 * 40 if case.phase == INITIATION else 3
            width = device.checkpoint.config.get("n_embd") or device.checkpoint.config["hidden_size"]
            if not place.is_last:
                assert hidden is not None
                assert (hidden.shape, hidden.dtype, hidden.device) == ((tokens, width), torch.bfloat16, CUDA)
            assert (launched.output.later is not None) == place.samples
            replayed = case.phase == INCREMENT and place.tensor_parallel == 1
            assert device.launched["split_and_write"] == (0 if replayed else LAYERS)
        assert device.compiled == compiled, "no request waits for a compiler"


@pytest.mark.parametrize(("name", "memory"), [("gpt3-13b", 40 << 30), ("llama-8b", 24 << 30)])
def test_the_memory_that_is_left_holds_a_piece(name: str, memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failure all requests initiate together, with more tokens than run at once, where all memory is slots."""
    monkeypatch.setattr(device_model, "BUCKETS", (1,))  # they take no part in it
    with fake_cuda(memory) as watch:
        device = Device(checkpoint_of(name), Place(1, 1), watch, monkeypatch)
        case = Case(INITIATION, 6, PIECE // 2)
        with device.formed(case.slots) as stage, Peak() as peak:
            stage.launch(case.message(device.checkpoint.vocab_size))
    free = memory - (2 << 30) - device.weight_bytes
    print(f"{name}: {peak.bytes / 1e9:.2f} GB of {free * (1 - GPU_SHARE) / 1e9:.2f} GB")
    assert peak.bytes < free * (1 - GPU_SHARE)
