"""The demo model's training: which tokens count as repetitions."""

import torch

from orca_lab.train_demo import repeats


def test_repeats_are_ends_of_runs_that_came_before() -> None:
    """Those of their own row alone; runs may overlap."""
    ids = torch.tensor([[1, 2, 3, 1, 2, 3, 1], [5, 5, 5, 5, 5, 1, 2], [1, 2, 3, 4, 5, 6, 7]])
    found = repeats(ids, length=3).nonzero().tolist()
    assert found == [[0, 5], [0, 6], [1, 3], [1, 4]]
