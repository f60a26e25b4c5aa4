"""Every subject is timed against the ceilings of this machine. The numbers are for a reader, not for a test."""

from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import make_gpt2, make_timed

from orca_bench import ceilings, kernels
from orca_bench.ceilings import WAYS, product, reader, reading
from orca_bench.engine import EngineOptions
from orca_bench.kernels import lines
from orca_common.errors import FailedPrecondition


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
    assert {line["kernel"].split()[0] for line in found} == {"decode", "prefill", "torch"}
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
