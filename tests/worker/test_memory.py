"""How much memory a rank may use, which is what a container's limit leaves, and what it gives back."""

import weakref
from pathlib import Path

import pytest
import torch
from checkpoints import make_gpt2
from iterations import begins, iteration_of
from worker.driver import make_stage

from orca_common.checkpoint import read_checkpoint
from orca_worker import machine
from orca_worker.iteration.model import Compute
from orca_worker.partition import Types
from orca_worker.stage.stage import Stage


def test_files_that_a_container_has_read_do_not_count_as_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that has just read its weights has them in its container's cache as well."""
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    monkeypatch.setattr(machine, "CPU_SHARE", 1 << 40)
    whole = machine.available_bytes()  # no file: no limit
    stat = "anon 1000000\nfile 7000000\nshmem 1000000\nactive_file 2000000\ninactive_file 4000000\nslab 5\n"
    for name, text in (("memory.current", "8000000\n"), ("memory.stat", stat), ("memory.max", "10000000\n")):
        (tmp_path / name).write_text(text)
    assert machine.available_bytes() == 10_000_000 - 8_000_000 + 6_000_000
    assert machine.free_bytes(None, modest=True) == 4_000_000
    (tmp_path / "memory.max").write_text("5000000\n")  # it was lowered below what is in use
    assert machine.available_bytes() == 3_000_000
    (tmp_path / "memory.max").write_text("1000000\n")
    assert machine.available_bytes() == 0
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.available_bytes() == pytest.approx(whole, rel=0.2)


def test_a_rank_on_a_cpu_takes_a_share_of_it_unless_slots_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other processes use a CPU's memory too."""
    monkeypatch.setattr(machine, "CPU_SHARE", 1 << 16)
    checkpoint = read_checkpoint(make_gpt2(tmp_path, heads=1, layers=1, hidden=8, vocab=97, positions=48, seed=9))
    for slots in (None, 1 << 14):
        stage = Stage(checkpoint, Types.of("float32"), torch.device("cpu"), slots, Compute(1, "torch"))
        memory = stage.form(4)
        assert memory.slot_bytes == 64
        assert memory.slots == (slots or (1 << 16) // 64)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_a_stage_that_is_dropped_frees_its_model(tmp_path: Path, kernels: str) -> None:
    """At once: what a stage has loaded is frozen, so no collection would ever find it in a cycle."""
    folder = make_gpt2(tmp_path, heads=1, layers=1, hidden=8, vocab=97, positions=48, seed=9)
    stage = make_stage(folder, 64, 4, kernels=kernels)
    stage.run(iteration_of([begins(7, [1, 2], [3])]))
    assert stage._model is not None
    model = weakref.ref(stage._model)
    del stage
    assert model() is None
