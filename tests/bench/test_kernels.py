"""Every subject is timed against the ceilings of this machine. The numbers are for a reader, not for a test."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from checkpoints import make_gpt2, make_shape, make_timed

from orca_bench import ceilings, kernels
from orca_bench.ceilings import WAYS, Ceilings, Probe, product, reader, reading
from orca_bench.engine import Engine, EngineOptions
from orca_bench.floors import recorded
from orca_bench.kernels import (
    DECODES,
    Subject,
    Timed,
    attentions,
    lines,
    matrices_of,
    products,
    rotating,
    subject_line,
    time_subject,
)
from orca_common.checkpoint import read_checkpoint
from orca_common.errors import FailedPrecondition
from orca_lab.roofline import Accelerator, Work

CPU = torch.device("cpu")


def test_kernels_are_timed_against_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "READ_BYTES", 4 << 20)
    monkeypatch.setattr(ceilings, "LONG", 0.0)
    monkeypatch.setattr(kernels, "COPIES", 1 << 16)  # 85,000 of so small a matrix
    model = make_gpt2(tmp_path, heads=2, layers=2, hidden=16, vocab=97, positions=96, seed=3)
    machine, *found = lines(EngineOptions(str(model), "float32", "cpu", 1), seconds=0.0)
    assert machine["read_GB_per_s"] > 0
    assert [line["kernel"] for line in found if line["kernel"].startswith(("decode", "prefill"))] == [
        *("decode 1 x 32", "decode 32 x 32"),  # the model has 96 positions
        "prefill 96",
    ]
    assert {line["kernel"].split()[0] for line in found} == {"decode", "prefill", "torch", "draw"}
    assert {line["MB"] for line in found if line["kernel"].startswith("draw 32: ")} == {round(32 * 97 * 4 / 1e6, 3)}
    for line in found:
        assert line["ms"] >= 0
        assert line["floor_ms"] >= 0
        assert line["runs"] >= 5
        assert (line["dtype"], line["threads"]) == ("float32", 1)


def test_a_family_whose_work_is_not_known_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FailedPrecondition, match="the kernels of orca_timed are not known"):
        next(lines(EngineOptions(str(make_timed(tmp_path)))))


def test_ceilings_are_measured() -> None:
    for probe in (reading(threads=2, size=4 << 20, runs=1), product(torch.float32, long=0.0, runs=1)):
        assert probe.amount / probe.seconds() > 0


@pytest.mark.parametrize(("streams", "ahead"), WAYS)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_reading_reads_every_line(streams: int, ahead: int, threads: int) -> None:
    """What it returns is made of the first and the last eight bytes of every line of 64."""
    data = np.random.default_rng(7).integers(0, 1 << 63, (threads * 8 * 5, 8), np.uint64)
    aligned = np.empty(data.nbytes + 64, np.uint8)
    aligned = aligned[-aligned.ctypes.data % 64 :][: data.nbytes].view(np.uint64).reshape(data.shape)
    aligned[:] = data
    expected = np.bitwise_xor.reduce(data[:, 0] ^ data[:, 7])
    assert reader()(aligned.ctypes.data, data.nbytes, threads, streams, ahead) == expected


def test_the_work_of_products_and_of_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "COPIES", 1)
    model = make_gpt2(tmp_path, heads=2, layers=2, hidden=16, vocab=97, positions=96, seed=3)
    options = EngineOptions(str(model), "float32", "cpu", 1)
    engine = Engine(options, options.checkpoint(), 64)
    sides = {"qkv": (16, 48), "merge": (16, 16), "up": (16, 64), "down": (64, 16), "head": (16, 97)}
    assert {subject.name: subject.work for subject in products(engine)} == {
        f"torch product {name} x {tokens}": Work(4 * (ins * outs + tokens * (ins + outs)), 2 * tokens * ins * outs)
        for name, (ins, outs) in sides.items()
        for tokens in (1, 32)
    }
    kept = {(batch, context): batch * (context + 1) * 16 for batch, context in DECODES}
    assert {subject.name: subject.work for subject in attentions(engine)} == {
        f"torch attention {batch} x {context}": Work(4 * 2 * elements, 4 * elements)
        for (batch, context), elements in kept.items()
    }


def test_the_products_of_a_gated_family(tmp_path: Path) -> None:
    model = make_shape(tmp_path, "llama, 2 K/V heads")
    config = read_checkpoint(model).config
    hidden, inner, heads = (config[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads"))
    recording = recorded(read_checkpoint(model))
    assert recording is not None
    assert matrices_of(recording) == {
        "qkv": (hidden, hidden + 2 * 2 * hidden // heads),
        "merge": (hidden, hidden),
        "gate and up": (hidden, 2 * inner),
        "down": (inner, hidden),
        "head": (hidden, config["vocab_size"]),
    }


def test_a_product_takes_other_weights_each_time() -> None:
    x, weights = torch.eye(2), [torch.full((2, 2), float(n)) for n in range(3)]
    run = rotating(x, weights)
    assert [run().sum() for _ in range(4)] == [0, 4, 8, 0]  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(("seconds", "runs"), [(0.0, 6), (1.9, 9)])
def test_a_subject_is_timed_in_turn_with_the_ceilings(
    seconds: float, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns of three runs, five runs at least, until the seconds are over; the first run of all is not counted."""
    now, ran, read = 0.0, 0, iter([2.0, 1.0, 8.0, 4.0])

    def took(more: float) -> None:
        nonlocal now, ran
        now, ran = now + more, ran + 1

    monkeypatch.setattr(kernels, "TURN", 0.7)
    for module in (kernels, ceilings):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now))
    on = Ceilings(Probe(16, lambda: took(next(read))), {"float32": Probe(32, lambda: took(4.0))})
    timed = time_subject(Subject("s", Work(1, 1), lambda: took(0.25)), CPU, seconds, on)
    turns = runs // 3
    assert (timed.seconds, ran) == ([0.25] * runs, 1 + runs + 2 * turns)
    usual = 1.5 if turns == 2 else 2.0
    assert timed.usual == Accelerator("cpu", 16 / usual, {"float32": 8.0})
    assert timed.best == Accelerator("cpu", 16.0, {"float32": 8.0})


def test_the_line_of_a_subject() -> None:
    """The median beside the usual ceilings, the shortest time beside the best ones."""
    subject = Subject("s", Work(8_000_000, 4_000_000_000), lambda: None)
    usual, best = Accelerator("usual", 4e9, {"float32": 1e12}), Accelerator("best", 8e9, {"float32": 8e12})
    where = {"dtype": "float32", "threads": 3}
    times = {"ms": 3.0, "least_ms": 2.0}
    amounts = {"MB": 8.0, "GFLOP": 4.0, "runs": 3, **where}
    assert subject_line(subject, Timed([0.004, 0.002, 0.003], usual, best), where) == {
        "kernel": "s",
        **times,
        **{"floor_ms": 4.0, "times_floor": 0.75, "least_floor_ms": 1.0, "least_times_floor": 2.0},
        **amounts,
    }
    unknown = dict.fromkeys(("floor_ms", "times_floor", "least_floor_ms", "least_times_floor"))
    assert subject_line(subject, Timed([0.004, 0.002, 0.003], None, None), where) == {
        "kernel": "s",
        **times,
        **unknown,
        **amounts,
    }
