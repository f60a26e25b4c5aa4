"""The CUDA path without a GPU, on torch's fake tensors, which have a shape, a type and a device, but no data.

Fake tensors refuse operands of different devices, as a GPU would. These tests check the path, not its numbers
(tests/gpu does): every tensor is on the right device, at the true sizes of 175B too, and the host never waits.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from iterations import begins, iteration_of
from properties import covering
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from worker.fake_cuda import CUDA, Watch, bytes_held, fake_cuda

from orca.v1.sampling_pb2 import SamplingParams
from orca_kernels.transfer import to_device
from orca_lab.shapes import SHAPES, Shape, gpt
from orca_lab.shards import BLOCK_SIZE, INCREMENT, INITIATION, Case, formed, places, share_of, work_of
from orca_worker.models.gpt2.layers import record
from orca_worker.models.plain import TorchStage, padded_rows
from orca_worker.partition import Place
from orca_worker.sampling.sampling import HiddenModel, SamplingModel
from orca_worker.stage.stage import Stage

LAYERS = 2  # of a stage
TINY = Shape("tiny", gpt(4, 48, 4, positions=64, vocab_size=101), 2, 3)


@pytest.fixture(autouse=True)
def watch() -> Iterator[Watch]:
    with fake_cuda() as watch:
        yield watch


def model_of(stage: Stage) -> TorchStage:
    assert isinstance(stage._model, SamplingModel | HiddenModel)
    assert isinstance(stage._model.model, TorchStage)
    return stage._model.model


SAMPLED = SamplingParams(temperature=0.7, top_k=5, top_p=0.9, seed=3, logprobs=True)
ITERATIONS = [
    (  # two initiations, one of them sampled
        8,
        iteration_of(
            new=[
                begins(0, [1] * 5, [0, 1], claim=1, sampling=SAMPLED),
                begins(1, [2] * 3, [2, 3], claim=2),
            ]
        ),
    ),
    (  # both phases, one a prompt of a single token; increments of different contexts
        3,
        iteration_of(
            new=[begins(2, [4], [4], claim=3)],
            rows=[0, 1],
            starts=[5, 3],
            tokens=[7, 8],
        ),
    ),
    (3, iteration_of(rows=[1, 0, 2], starts=[4, 6, 1], tokens=[1, 1, 1])),
    (2, iteration_of(free_rows=[1], rows=[0, 2], starts=[7, 2], tokens=[1, 1])),
]
AHEAD = (2, iteration_of(rows=[0, 2], starts=[8, 3]))  # of a rank that has its own tokens


@pytest.mark.parametrize(
    ("place", "dtype"),
    covering([*places(1, 1), *places(2, 1), *places(2, 3), Place(2, 3, 2, 1)], ("float32", "bfloat16"), strength=1),
    ids=str,
)
def test_every_tensor_is_on_the_device_and_the_host_does_not_wait(place: Place, dtype: str, watch: Watch) -> None:
    with formed(TINY, place, dtype, CUDA, 16 * BLOCK_SIZE) as stage:
        assert stage._kv.keys.device == stage._kv.values.device == watch.current == CUDA
        for tokens, iteration in [*ITERATIONS, *([AHEAD] if place.samples else [])]:
            watch.waits.clear()
            with watch:
                output = stage.run(iteration)
            assert watch.waits == ["tolist"] * place.samples
            if not place.is_last:
                assert output.hidden is not None
                assert output.hidden.device == CUDA
                assert output.hidden.shape == (tokens, 48)
                assert output.hidden.dtype == getattr(torch, dtype)


@pytest.mark.parametrize(
    ("shape", "place"),
    [
        (shape, place)
        for shape in ("gpt3-175b", "gpt3-13b")
        for place in places(SHAPES[shape].tensor_parallel, SHAPES[shape].pipeline_parallel)
    ],
    ids=str,
)
def test_big_models_at_their_true_sizes(shape: str, place: Place, watch: Watch) -> None:
    """What the shard's model holds and computes, as torch counts it."""
    big = SHAPES[shape]  # with few layers, which are all alike
    big = replace(big, config=replace(big.config, layers=LAYERS * big.pipeline_parallel))
    share, hidden = share_of(big, place, "bfloat16"), big.config.hidden
    shares = record(big.config, place).vocabulary_shares
    behind = padded_rows(shares) - shares[place.tensor_rank]  # rows of the table behind its last token
    todo = [Case(INITIATION, 2, 128), Case(INCREMENT, 2, 128)]
    with formed(big, place, "bfloat16", CUDA, todo[0].slots) as stage:
        of_table = 2 * hidden * behind if place.is_first or place.is_last else 0
        assert bytes_held(model_of(stage)) == share.weight_bytes + of_table
        assert stage._kv.keys.nbytes + stage._kv.values.nbytes == todo[0].slots * share.slot_bytes
        for case in todo:
            watch.waits.clear()
            with watch, FlopCounterMode(display=False) as count:
                stage.run(case.message(big.config.vocab_size))
            assert watch.waits == ["tolist"] * place.samples
            pairs = case.batch * case.prompt * (case.prompt - 1) // 2 if case.phase == INITIATION else 0
            masked = share.slot_bytes * pairs  # torch counts what the causal mask hides: 2 FLOP an element of a slot
            of_head = 2 * hidden * behind * case.batch * place.is_last
            assert count.get_total_flops() == work_of(big, place, "bfloat16", case).flop + masked + of_head


@pytest.mark.parametrize(
    ("what", "waits"),
    [
        (lambda gpu, cpu: to_device(cpu, CUDA), 0),
        (lambda gpu, cpu: gpu + gpu, 0),
        (lambda gpu, cpu: cpu.to(CUDA), 1),
        (lambda gpu, cpu: gpu[cpu], 1),
        (lambda gpu, cpu: gpu.cpu(), 1),
        (lambda gpu, cpu: gpu.tolist(), 1),
    ],
)
def test_the_watch_sees(what: Callable[[Tensor, Tensor], Any], waits: int, watch: Watch) -> None:
    gpu, cpu = torch.zeros(4, device=CUDA), torch.zeros(4, dtype=torch.int64)
    with watch, torch.inference_mode():
        what(gpu, cpu)
    assert len(watch.waits) == waits
    with pytest.raises(RuntimeError, match="device"):
        torch.add(gpu, cpu)
