"""A recorded stage with the kernels against the same in plain torch: the same weights, the same batches."""

from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import SHAPES, make_shape
from kernels.device_sampled import sampled_on_device
from kernels.triton_device import DEVICE, INTERPRETED
from quantized_files import WAYS
from torch import Tensor
from worker.driver import Sampled, TinyEngine
from worker.fake_cuda import bytes_held
from worker.logits import InTransformers, prompt_of, seen_by
from worker.test_coded import both
from worker.test_families import requests_for

from orca_common.checkpoint import read_checkpoint
from orca_kernels.triton.sampling import sample as sample_kernel
from orca_lab.shapes import Shape, gpt
from orca_lab.shards import INCREMENT, INITIATION, Case, formed
from orca_worker.data_plane.plane import DataPlane
from orca_worker.device.model import DeviceModel, Inputs, host_plan
from orca_worker.iteration.batch import Batch
from orca_worker.iteration.kv import KVManager
from orca_worker.iteration.model import Compute
from orca_worker.iteration.rows import ROW
from orca_worker.models.cuda import FusedStage, GPUReader, TritonKernels
from orca_worker.models.formats.table import Format
from orca_worker.models.plain import TorchStage, padded_rows
from orca_worker.partition import SINGLE, Place, Types
from orca_worker.sampling.sampling import EndOfModel, HiddenModel, SamplingModel, sample
from orca_worker.stage.stage import Stage

TINY = Shape("tiny", gpt(2, 36, 4, positions=96, vocab_size=211), 1, 1)
PLAIN = Compute(kernels="torch")  # on a GPU too


class Both(TorchStage):
    """Runs an iteration in both ways and compares. Keys and values are those of the kernels' way."""

    def __init__(self, model: TorchStage) -> None:
        self.__dict__ = model.__dict__
        self.fused = FusedStage(model, TritonKernels)
        self.mixed = self.iterations = 0

    def forward(self, batch: Batch, kv: KVManager, plane: DataPlane, x: Tensor | None) -> Tensor | EndOfModel:
        plain = super().forward(batch, kv, plane, x)
        plan = host_plan(batch, kv, group=self.recording.group)
        inputs = Inputs(plan.bounds, DEVICE).load(batch, plan)
        fused = self.fused.forward(inputs.plan, inputs.given, kv, plane, x)
        self.iterations += 1
        self.mixed += 1 < len(batch) < len(batch.token_ids)
        if isinstance(plain, Tensor) or isinstance(fused, Tensor):
            torch.testing.assert_close(fused, plain, rtol=1e-4, atol=1e-4)
            return plain
        every = np.arange(len(batch.token_ids))
        torch.testing.assert_close(fused(None), plain(every), rtol=1e-4, atol=1e-4)
        if inputs.last is not None:
            torch.testing.assert_close(fused(inputs.last), plain(batch.out_at), rtol=1e-4, atol=1e-4)
        return plain


@pytest.mark.parametrize("place", [Place(1, 1), Place(1, 2, 0), Place(2, 2, 1)], ids=str)
def test_logits_and_hidden_states(place: Place) -> None:
    torch.use_deterministic_algorithms(False)  # it would poison memory of the fake process groups too
    torch.manual_seed(3)
    with formed(TINY, place, "float32", DEVICE, 960, PLAIN) as stage:
        held = stage._model
        assert isinstance(held, SamplingModel | HiddenModel)
        model = held.model
        assert isinstance(model, TorchStage)
        both = held.model = Both(model)
        if place.is_last:
            TinyEngine(stage, 960, 16, seed=1).run([Sampled([5 + n] * (1 + 8 * n), 3) for n in range(3)])
            assert both.mixed
        else:
            for case in (Case(INITIATION, 2, 20), Case(INCREMENT, 2, 20)):
                stage.run(case.message(TINY.config.vocab_size))
        assert both.iterations > 1


FEW = (  # of each family, for the interpreter, which is slow; Mistral's operations are those of the others
    "llama, tied, biases, 1 K/V head, large heads",
    "qwen2, a window in the upper layer",
    "qwen3, windows of some layers",
    "gemma3, windows but in one layer",
    "neox",
    "gptj",
)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # of the interpreter's sigmoid, which is 0 then
@pytest.mark.parametrize("shape", FEW if INTERPRETED else SHAPES)
def test_logits_of_other_families_are_near_float64(tmp_path: Path, shape: str) -> None:
    """In the batches of tests/worker/test_families.py, which runs the same on a CPU."""
    check_near_float64(make_shape(tmp_path, shape), is_prefix_lm=False)


def test_logits_of_a_prefix_lm_are_near_float64(tmp_path: Path) -> None:
    """As tests/worker/test_prefix_lm.py."""
    folder = make_shape(tmp_path, "llama, tied, biases, 1 K/V head, large heads", orca_prefix_lm=True)
    check_near_float64(folder, is_prefix_lm=True)


@pytest.mark.parametrize("name", ["gptq, groups of 32, version 2", "W8A8"])
def test_weights_stay_in_codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Those of a checkpoint that another tool quantized. The logits are of the numbers that its codes stand for."""
    read, compute = Format.reader.fget, Compute(graphs=False)
    if INTERPRETED:  # on a CPU, where codes have another reader and another arithmetic
        assert read is not None
        monkeypatch.setattr(Format, "reader", property(lambda form: GPUReader(read(form), DEVICE)))
        compute = PLAIN
    folder, floats = both(tmp_path, "llama, 2 K/V heads", WAYS[name])
    oracle = InTransformers(floats, torch.float64)
    stage = check_near_float64(folder, oracle, is_prefix_lm=False, compute=compute)
    rows = padded_rows(stage.vocabulary_shares) - 211  # of both tables, behind their last tokens
    behind = 2 * rows * stage.recording.hidden * 4
    assert bytes_held(stage) - behind <= 1.08 * (folder / "model.safetensors").stat().st_size


def check_near_float64(
    folder: Path, oracle: InTransformers | None = None, *, is_prefix_lm: bool, compute: Compute = PLAIN
) -> TorchStage:
    """Returns the stage with the weights."""
    oracle = oracle or InTransformers(folder, torch.float64)
    stage = Stage(read_checkpoint(folder), Types.of("float32"), DEVICE, 400, compute)
    stage.form(16)
    held = stage._model
    assert isinstance(held, SamplingModel | DeviceModel)
    model = held.model._stage if isinstance(held.model, FusedStage) else held.model
    assert isinstance(model, TorchStage)
    stage._model = DeviceModel(FusedStage(model, TritonKernels), SINGLE, None, sample_kernel)
    stage.allocate(400, 16)
    requests = [
        Sampled(one.prompt, 2, {"logprobs": True}) for one in requests_for(211, 2 if INTERPRETED else 3, seed=3)
    ]
    for tokens, logits in seen_by(stage, requests):
        right = oracle.logits(tokens, prompt_of(tokens, requests) if is_prefix_lm else None)
        assert (logits - right).abs().max() < 2e-4  # logits are about 4, and up to 13
    assert all(len(request.made) == 2 for request in requests)
    return model


def test_sampling_of_a_mixed_batch() -> None:
    """Greedy, drawn, and cut by top-k or top-p, beside one another: as in plain torch."""
    torch.manual_seed(2)
    logits, requests = torch.randn(12, 3000).mul(3), np.zeros(12, ROW)
    requests["temperature"] = [0, 0.7, 1.3] * 4
    requests["top_k"][3:8], requests["top_p"][6:] = 20, 0.8
    requests["seed"], requests["logprobs"] = np.arange(12), np.arange(12) % 2
    for rows in (slice(0, 12), slice(0, 3), slice(0, 1)):
        mine = sampled_on_device(logits[rows].to(DEVICE), requests[rows], np.arange(12)[rows])
        right = sample(logits[rows], requests[rows], np.arange(12)[rows])
        assert mine.token_ids == right.token_ids
        assert mine.logprobs == pytest.approx(right.logprobs, abs=1e-5, nan_ok=True)
