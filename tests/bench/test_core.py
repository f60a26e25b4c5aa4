"""The work of the scheduler's core follows the batch, not the pool."""

import sys

from orca_bench.core import milliseconds


def calls(batch: int, stages: int) -> int:
    """Functions that are called for 20 iterations more."""

    def count(iterations: int) -> int:
        made = 0

        def profile(*_: object) -> None:
            nonlocal made
            made += 1

        before = sys.getprofile()
        sys.setprofile(profile)
        try:
            milliseconds(batch, stages, iterations)
        finally:
            sys.setprofile(before)
        return made

    return count(25) - count(5)


def test_an_iteration_costs_the_same_in_a_pool_of_sixteen_times_as_many() -> None:
    assert calls(8, 16) <= 1.2 * calls(8, 1)
