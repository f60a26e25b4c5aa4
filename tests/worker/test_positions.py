"""Tables by position are as long as the memory of an epoch, whatever a config.json says."""

import random
from pathlib import Path

import psutil
import pytest
from checkpoints import make_shape
from encoder_decoders import Drawn, change, make_marian
from reference import Reference
from worker.driver import Sampled, TinyEngine, make_stage

MOST = 200 << 20  # bytes; the tables of 2^24 positions are 537 MB and 1.6 GB


def resident() -> int:
    return psutil.Process().memory_info().rss


@pytest.mark.parametrize("kernels", ["auto", "torch", "device-loop"])
@pytest.mark.parametrize("family", ["llama", "marian"])
def test_millions_of_positions_take_no_memory(tmp_path: Path, family: str, kernels: str) -> None:
    """A later epoch with more memory has longer tables."""
    if family == "llama":
        folder, of = make_shape(tmp_path / "model", "llama, 2 K/V heads"), Reference
    else:
        folder, of = make_marian(tmp_path / "model", seed=1), Drawn
    change(folder, max_position_embeddings=1 << 24)
    before = resident()
    stage = make_stage(folder, 40, 4, kernels=kernels)
    assert resident() - before < MOST
    chance = random.Random(3)
    for slots in (40, 400):
        stage.form(4)
        stage._max_slots = slots
        stage.allocate(slots, 4)
        prompt = [chance.randrange(97) for _ in range(slots - 30)]
        change(folder, max_position_embeddings=1000)  # transformers makes a table of all
        reference = of(folder)
        ((_, tokens),) = reference.known([(prompt, 20)])
        request = Sampled(prompt, 20, reference.sampling(prompt))
        TinyEngine(stage, slots, 4).run([request])
        assert request.made == tokens
        assert resident() - before < MOST
