"""The GPU loop: iterations in buckets, as graphs run them, against iterations of the batch's own size.

Without a GPU a graph is the log of its calls and launches (`Replayed`). All else is what a GPU runs: static inputs,
padding, the token table, sampling, increments that are launched before the host knows their tokens.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar
from weakref import WeakSet

import pytest
import torch
from iterations import begins, iteration_of
from kernels.triton_device import DEVICE
from worker.driver import Sampled, TinyEngine

from orca.v1 import worker_pb2
from orca_kernels.triton import activation, attention, norm, write_kv
from orca_kernels.triton import sampling as triton_sampling
from orca_kernels.triton.launch import launch
from orca_kernels.triton.sampling import sample
from orca_lab.shapes import Shape, gpt
from orca_lab.shards import formed
from orca_worker.device import graphs
from orca_worker.device import model as device_model
from orca_worker.device.graphs import BUCKETS, CudaGraphs, Recorder, bucket_of
from orca_worker.device.model import DeviceModel, Made
from orca_worker.device.replay import Replayed
from orca_worker.iteration.model import Compute
from orca_worker.models.cuda import FusedStage, TritonKernels
from orca_worker.models.plain import TorchStage
from orca_worker.partition import SINGLE, Place
from orca_worker.sampling.sampling import HiddenModel, SamplingModel
from orca_worker.stage.stage import Stage

T = TypeVar("T")
SLOTS, BLOCK = 960, 16


def recorder() -> Recorder:
    return Replayed() if DEVICE.type == "cpu" else CudaGraphs(DEVICE)


def keep_launches(recorder: Replayed, patch: pytest.MonkeyPatch) -> None:
    """Lets a recording keep each launch of a Triton kernel as one call."""

    def kept(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        recorder.launch(partial(launch, kernel, grid, **options), *args)

    for module in (activation, attention, norm, triton_sampling, write_kv):
        patch.setattr(module, "launch", kept)


@contextmanager
def stage_with(
    make: Callable[[], Recorder] | None, place: Place = SINGLE, layers: int = 1
) -> Iterator[tuple[Stage, DeviceModel]]:
    """A stage of the tiny model with the GPU loop and two buckets. `make` None: no graphs."""
    torch.manual_seed(3)
    shape = Shape("tiny", gpt(layers, 32, 2, positions=96, vocab_size=211), 1, 1)
    with (
        formed(shape, place, "float32", DEVICE, SLOTS, Compute(kernels="torch")) as stage,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(graphs, "BUCKETS", (2, 4))
        patch.setattr(device_model, "BUCKETS", (2, 4))
        held = stage._model
        assert isinstance(held, SamplingModel | HiddenModel)
        assert isinstance(held.model, TorchStage)
        recorder = make() if make is not None else None
        if isinstance(recorder, Replayed):
            keep_launches(recorder, patch)
        model = stage._model = DeviceModel(FusedStage(held.model, TritonKernels), place, recorder, sample)
        stage.allocate(SLOTS, BLOCK)
        yield stage, model


def requests() -> list[Sampled]:
    adjusted = {"repetition_penalty": 1.3, "top_logprobs": 2, "prompt_logprobs": True}
    ways = [{}, {"temperature": 0.9}, {"temperature": 0.8, "top_k": 20}, {"temperature": 1.1, **adjusted}]
    return [
        Sampled([5 + n, 7 * n, 11][: 1 + n % 3], 4, {"seed": n, "logprobs": n % 2 == 0} | ways[n % 4]) for n in range(6)
    ]


def test_buckets() -> None:
    assert [bucket_of(n) for n in (1, 2, 3, 9, 64, 65)] == [1, 2, 4, 16, 64, None]
    assert list(BUCKETS) == sorted(set(BUCKETS))


def test_tokens_of_buckets_are_those_of_the_batch_alone() -> None:
    """Greedy, drawn, cut and adjusted requests; batches that fit a bucket, that are padded, that are too large."""
    made: list[list[Sampled]] = []
    replayed: list[int] = []
    for make in (None, recorder):
        with stage_with(make) as (stage, model):
            for bucket, one in model._recorded.items():

                def replay(bucket: int = bucket, one: Callable[[], Made] = one.replay) -> Made:
                    replayed.append(bucket)
                    return one()

                model._recorded[bucket] = model._recorded[bucket]._replace(replay=replay)
            made.append(requests())
            TinyEngine(stage, SLOTS, BLOCK, seed=2).run(made[-1])
    for eager, graphed in zip(*made, strict=True):
        assert graphed.made == eager.made
        assert graphed.logprobs == pytest.approx(eager.logprobs, abs=1e-5, nan_ok=True)
        assert len(graphed.tops) == len(eager.tops)
    assert set(replayed) == {2, 4}


def initiations(*rows: int) -> worker_pb2.Iteration:
    return iteration_of([begins(row, [row + 1, 3, 5 * row], [2 * row, 2 * row + 1], claim=row + 1) for row in rows])


def test_padding_changes_no_bit_and_writes_no_slot() -> None:
    """Three requests in a bucket of four: alone with the padding, and beside a fourth request."""
    bits = []
    for rows in ((0, 1, 2), (0, 1, 2, 3)):
        with stage_with(recorder) as (stage, model):
            stage.run(initiations(0, 1, 2, 3))
            stage._kv.keys[:, 8:], stage._kv.values[:, 8:] = 7, 7  # blocks of nobody
            before = stage._kv.keys.clone(), stage._kv.values.clone()
            seen, replay = [], model._recorded[4].replay

            def look(seen: list[torch.Tensor] = seen, replay: Callable[[], Made] = replay) -> Made:
                made = replay()
                assert made.logits is not None
                seen.append(made.logits[:3].clone())
                return made

            model._recorded[4] = model._recorded[4]._replace(replay=look)
            stage.run(iteration_of(rows=rows, starts=[3] * len(rows), tokens=[9] * len(rows)))
            bits.append(seen[0])
            for now, then in zip((stage._kv.keys, stage._kv.values), before, strict=True):
                changed = (now != then).any(-1).any(2).any(0).nonzero()  # [n, 2]: block, offset
                assert changed.tolist() == [[2 * row, 3] for row in rows]
    assert torch.equal(*bits)


def test_an_iteration_is_launched_before_the_tokens_of_the_one_before_are_read() -> None:
    """Increments that come without tokens: the device has them, whatever the host knows."""
    with stage_with(recorder) as (stage, _):
        right = [stage.run(initiations(0, 1, 2)).token_ids]
        for position in (3, 4, 5):
            right.append(stage.run(iteration_of(rows=[0, 1, 2], starts=[position] * 3, tokens=right[-1])).token_ids)
    with stage_with(recorder) as (stage, _):
        launched = [stage.launch(initiations(0, 1, 2))]
        for position in (3, 4, 5):
            stage.rows.table["known"][:3] = 3  # the host knows nothing more
            launched.append(stage.launch(iteration_of(rows=[0, 1, 2], starts=[position] * 3)))
        assert all(one.output.later is not None for one in launched)
        assert [one.read().token_ids for one in launched] == right


def test_a_capture_that_fails_leaves_the_iterations_without_graphs(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Replayed):
        def record(self, run: Callable[[], T]) -> Callable[[], T]:
            raise RuntimeError("operation not permitted when stream is capturing")

    with stage_with(Broken) as (stage, model):
        assert not model._recorded
        assert len(stage.run(initiations(0, 1)).token_ids) == 2
    assert [record.message for record in caplog.records if "graphs" in record.message] == [
        "no CUDA graphs: kernels are launched one by one"
    ]


def test_an_engine_that_forms_again_offers_as_many_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recordings of the epoch before take memory, which is measured before there are new ones."""
    alive: WeakSet[Callable[[], object]] = WeakSet()

    class Counted(Replayed):
        def record(self, run: Callable[[], T]) -> Callable[[], T]:
            alive.add(run)
            return run

    with stage_with(Counted) as (stage, model):
        shape = model.kv_shape
        assert shape is not None
        slot_bytes = shape.slot_bytes
        assert len(alive) == 2
        monkeypatch.setattr(
            "orca_worker.stage.stage.free_bytes", lambda *_, **__: (SLOTS - BLOCK * len(alive)) * slot_bytes
        )
        for _ in range(2):
            assert stage.form(BLOCK).slots == SLOTS
            stage.allocate(SLOTS, BLOCK)
            assert len(alive) == 2


def test_hidden_states_of_an_earlier_stage_are_a_copy() -> None:
    """The next replay writes where the last one has written, while the data plane may still send."""
    hidden = []
    for make in (None, recorder):
        with stage_with(make, Place(1, 2, 0), layers=2) as (stage, _):
            stage.run(initiations(0, 1, 2))
            output = stage.run(iteration_of(rows=[0, 1, 2], starts=[3] * 3, tokens=[4, 5, 6]))
            assert output.hidden is not None
            hidden.append(output.hidden.clone())
    assert hidden[0].shape == (3, 32)
    torch.testing.assert_close(*hidden)
