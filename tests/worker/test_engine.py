"""Engines of several ranks: their tokens against those of transformers, whatever the cut."""

from pathlib import Path

import pytest
import torch
from checkpoints import make_gpt2
from reference import Reference
from worker.engines import in_process
from worker.test_gpt2 import requests_for


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize(("tp", "pp"), [(1, 2), (2, 1), (2, 2), (3, 2), (1, 4), (3, 1)])
async def test_tokens_equal_transformers(tmp_path: Path, tp: int, pp: int) -> None:
    """Sizes that nothing divides: 6 heads, but 7 layers, a vocabulary of 211 and an inner size of 50."""
    layers = 4 if (tp, pp) == (3, 2) else 7  # Figure 6: 4 layers, 2 stages, 3 tensor ranks
    folder = make_gpt2(tmp_path, heads=6, layers=layers, hidden=36, vocab=211, positions=48, seed=tp, n_inner=50)
    requests = requests_for(211, 8, seed=pp)
    async with in_process(folder, tp, pp, seed=tp) as (master, _):
        await master.run(requests)
    reference = Reference(folder)
    assert len({tuple(request.made) for request in requests}) >= 6, "a model that says the same to all tests nothing"
    for request in requests:
        assert request.made == reference.greedy(request.prompt, request.new_tokens)
