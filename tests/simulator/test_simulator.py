"""A sample of the simulator's seeds, and that a seed always gives the same run. `make simulate` runs many."""

import pytest
from simulator.simulation import Simulation

SEEDS = range(20)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_seed(seed: int) -> None:
    Simulation(seed).run()


def test_a_run_replays() -> None:
    """The same seed gives the same trace, the time and all answers included."""
    runs = [Simulation(3), Simulation(3)]
    for run in runs:
        run.run()
    assert runs[0].world.steps > 1000
    assert runs[0].world.digest == runs[1].world.digest
