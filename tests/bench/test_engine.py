"""The engine alone makes the tokens of transformers, in the batches of Algorithm 1, and its lines say so."""

import itertools
import multiprocessing
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from checkpoints import make_gpt2
from reference import Known, Reference

from orca.v1 import worker_pb2
from orca_bench.cases import Request, dump, fixed
from orca_bench.engine import Engine, EngineOptions, Run, Step, Timed, form, lines, warm_up
from orca_bench.floors import case_floor, iteration_work
from orca_bench.ranks import Control, Ranks
from orca_bench.schedule import Shape, shapes, slots_for
from orca_common.checkpoint import read_checkpoint
from orca_common.errors import FailedPrecondition, InvalidArgument, Unavailable
from orca_lab.baseline.attention import By
from orca_lab.roofline import Accelerator


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return make_gpt2(folder, heads=2, layers=2, hidden=16, vocab=97, positions=96, seed=3)


@pytest.fixture(scope="module")
def known(model: Path) -> list[Known]:
    return list(itertools.islice(Reference(model).random(random.Random(5), (1, 40), (1, 20)), 12))


def options_of(model: Path, max_batch_size: int) -> EngineOptions:
    return EngineOptions(str(model), "float32", "cpu", 1, max_batch_size)


@pytest.mark.parametrize("max_batch_size", [1, 5, 32])
def test_tokens_are_those_of_transformers(model: Path, known: list[Known], max_batch_size: int) -> None:
    case = [Request(one.prompt, len(one.tokens)) for one in known]
    options = options_of(model, max_batch_size)
    engine = Engine(options, options.checkpoint(), slots_for(case, max_batch_size))
    for run in (engine.run(case), engine.run(case)):  # the second one finds the rows of the first
        assert run.tokens == [one.tokens for one in known]
        assert [step.shape for step in run.steps] == list(shapes(case, engine.slots, max_batch_size))
        assert sum(step.shape.requests for step in run.steps) == sum(one.output for one in case)
        assert max(step.shape.requests for step in run.steps) == min(max_batch_size, len(case))


RANKS = [(tp, pp, control) for tp, pp in ((1, 2), (2, 1), (2, 2)) for control in Control]


@pytest.mark.parametrize(
    ("tp", "pp", "control"), [RANKS[1], *(pytest.param(*one, marks=pytest.mark.long) for one in (RANKS[0], *RANKS[2:]))]
)
def test_several_ranks(model: Path, known: list[Known], tp: int, pp: int, control: Control) -> None:
    """Two cases, so that rows of the first one are free again; then the ranks end."""
    case = [Request(one.prompt, len(one.tokens)) for one in known]
    options = options_of(model, 5)
    slots = slots_for(case, 5)
    with Ranks(options, slots, tp, pp, control) as ranks:
        engine = Timed(options, options.checkpoint(), slots, ranks)
        for _ in range(2):
            assert engine.run(case).tokens == [one.tokens for one in known]
        for process in multiprocessing.active_children():
            process.kill()
            process.join()
        with pytest.raises(Unavailable, match="a rank has ended"):
            engine.run(case)


def test_a_rank_that_has_ended_is_no_error_of_a_pipe(model: Path) -> None:
    """It ends between two iterations: the next one cannot be sent to it."""
    ranks = Ranks(options_of(model, 5), 64, 1, 2, Control.AHEAD)
    ours, theirs = multiprocessing.Pipe()
    theirs.close()
    ranks._heads, ranks._sampler = [ours], ours
    with ours, pytest.raises(Unavailable, match="a rank has ended"):
        ranks.run(worker_pb2.Iteration(number=1))


def test_a_rank_that_does_not_start_in_time(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orca_bench.ranks.PATIENCE", 0.01)
    with (
        pytest.raises(Unavailable, match=r"a rank has not answered for 0\.01 s"),
        Ranks(options_of(model, 5), 64, 1, 2, Control.AHEAD),
    ):
        pass


def test_iterations_are_those_of_algorithm_1() -> None:
    case = [Request([1] * 3, 2), Request([1] * 4, 1), Request([1] * 5, 2)]
    assert list(shapes(case, slots_for(case, 2), 2)) == [
        Shape((3, 4), ()),
        Shape((5,), (3,)),  # the second request has ended, and the third takes its place
        Shape((), (5,)),
    ]


def test_slots_are_those_of_the_largest_batch() -> None:
    case = [Request([1] * 20, 20), Request([1] * 10, 6), Request([1] * 100, 1)]
    assert slots_for(case, 2) == 7 * 16 + 3 * 16
    assert slots_for(case, 9) == 7 * 16 + 3 * 16 + 16


def test_a_request_that_never_fits_is_refused() -> None:
    with pytest.raises(FailedPrecondition, match="a request needs 48; there are 32"):
        next(shapes([Request([1] * 20, 20)], 32, 1))


def test_the_numbers_of_a_run() -> None:
    steps = [
        Step(Shape((9, 9), ()), 0.5),
        Step(Shape((9,), (9, 9)), 0.25),
        Step(Shape((), (10, 10, 9)), 0.004),
        Step(Shape((), (11, 11, 10)), 0.002),
        Step(Shape((), (12, 11)), 0.001),
    ]
    run = Run(fixed(3, 9, 4), 0.757, steps, [])
    assert run.full_decode_ms == 3.0  # the two iterations of three increments
    assert run.initiation_seconds == 0.75
    assert Run(fixed(1, 9, 1), 0.1, steps[:1], []).full_decode_ms is None


def test_the_line_of_a_run(model: Path) -> None:
    options = options_of(model, 8)
    engine = Engine(options, options.checkpoint(), 64)
    steps = [
        Step(Shape((9, 9, 9), ()), 0.25),
        Step(Shape((), (10, 10, 10)), 0.003),
        Step(Shape((), (11, 11, 11)), 0.005),
    ]
    line = engine.line("a", Run(fixed(4, 9, 3), 0.5, steps, []), 3)
    assert 10 < line.pop("resident_MB") < 10_000
    assert line.pop("isa")
    assert line == {
        **{"engine": "orca", "case": "a", "run": 3, "seconds": 0.5, "requests": 4, "output_tokens": 12},
        **{"output_tokens_per_s": 24.0, "iterations": 3, "iteration_ms": 4.0, "initiation_s": 0.25},
        **{"max_batch_size": 8, "dtype": "float32", "quantize": None, "kv_dtype": None, "threads": 1, "device": "cpu"},
    }


def test_options_of_an_engine(model: Path) -> None:
    plain = options_of(model, 8)
    with pytest.raises(InvalidArgument, match=r"^dtype: is int8; there are float32, bfloat16"):
        replace(plain, dtype="int8")
    with pytest.raises(InvalidArgument, match=r"^quantize: is int3; there are int8, int4"):
        replace(plain, quantize="int3")
    assert replace(plain, dtype="auto").dtype in ("float32", "bfloat16")
    assert replace(plain, threads=0).compute.threads >= 1
    assert (plain.compute.threads, plain.compute.kernels) == (1, "auto")
    checkpoint = plain.checkpoint()
    assert plain.block_size_of(checkpoint) == 16
    assert replace(plain, attention=By.TORCH).block_size_of(checkpoint) == 96
    with pytest.raises(FailedPrecondition, match=r"^slots: 64 are needed; the memory holds 48$"):
        form(SimpleNamespace(form=lambda *given: SimpleNamespace(slots=48)), 64)  # pyright: ignore[reportArgumentType]


def test_lines_of_a_file_of_cases(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "cases.json"
    path.write_text(dump({"a": [Request([1, 2, 3], 4), Request([4], 2)], "b": [Request([5], 1)]}))
    found = list(lines(options_of(model, 8), path, [], runs=2))
    assert [(line["case"], line["run"]) for line in found] == [("a", 1), ("a", 2), ("b", 1), ("b", 2)]
    for line in found[:2]:
        assert (line["engine"], line["requests"], line["output_tokens"], line["iterations"]) == ("orca", 2, 6, 4)
        assert (line["dtype"], line["threads"], line["device"]) == ("float32", 1, "cpu")
        slowest, fastest = (6 / (line["seconds"] + rounded) for rounded in (5e-5, -5e-5))  # told to 0.1 ms
        assert slowest - 0.05 <= line["output_tokens_per_s"] <= fastest + 0.05
        assert 10 < line["resident_MB"] < 10_000
    assert found[2]["iteration_ms"] is None
    [in_codes] = lines(replace(options_of(model, 8), kv_dtype="int8"), path, ["b"], runs=1)
    assert [line["kv_dtype"] for line in (in_codes, found[2])] == ["int8", None]
    with pytest.raises(InvalidArgument, match="kv_dtype"):
        replace(options_of(model, 8), kv_dtype="int4")
    with pytest.raises(InvalidArgument, match="kv_dtype: is int8, which torch's attention does not read"):
        replace(options_of(model, 8), kv_dtype="int8", attention=By.TORCH)


def test_the_floor_of_a_case_is_that_of_its_iterations(model: Path) -> None:
    checkpoint, case = read_checkpoint(model), [Request([1] * 3, 3), Request([1] * 5, 1)]
    slow_memory, slow_cores = Accelerator("m", 1.0, {"float32": 1e30}), Accelerator("c", 1e30, {"float32": 1.0})
    layers, head = 2 * 12 * 16 * 16, 97 * 16
    kept = 2 * 2 * 16 * 4  # bytes of a key and a value in both layers
    small = 2 * (3 + 1 + 4 + 1 + 4) * 16 + 2 * 16  # elements of biases and norms, and of the last norm
    weights = 4 * (layers + head + small)
    # each iteration: the weights, what it reads of keys and values (its own included), and what it writes
    bytes_ = 3 * weights + kept * ((3 + 5) + (3 + 5) + (4 + 1) + (5 + 1))
    assert case_floor(checkpoint, "float32", case, 8, slow_memory) == pytest.approx(bytes_)
    tokens, pairs = 3 + 5 + 1 + 1, 6 + 15 + 4 + 5  # pairs of a query and a key
    flop = 2 * layers * tokens + 2 * head * 4 + 4 * pairs * 16 * 2
    assert case_floor(checkpoint, "float32", case, 8, slow_cores) == pytest.approx(flop)
    assert case_floor(checkpoint, "float32", case, 8, None) is None


def test_a_family_without_known_work_has_no_floor(model: Path) -> None:
    other = replace(read_checkpoint(model), model_type="orca_timed")
    assert iteration_work(other, "float32", [(0, 4)]) is None


@pytest.mark.parametrize(("slots", "batch"), [(16, 32), (64, 32), (96, 1), (1_536, 32)])
def test_the_warm_up_uses_the_memory(model: Path, slots: int, batch: int) -> None:
    case = warm_up(slots, batch, read_checkpoint(model))
    assert len(case) == min(batch, slots // 16)
    assert {one.output for one in case} == {8}
    assert 0.9 * slots <= slots_for(case, batch) <= slots
