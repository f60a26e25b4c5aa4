"""The budget of `positions=auto:MS` follows what iterations took."""

import random

import pytest

from orca.v1 import worker_pb2 as pb
from orca_scheduler.master.forecast import FLYING, LEAST, MOST, Forecast


def times(*stages: tuple[float, float]) -> list[pb.StageTimes]:
    """The ranks of each stage, by the seconds that they computed."""
    return [
        pb.StageTimes(stage=n, tensor_rank=rank, started=100, computed=100 + round(seconds * 1e9))
        for n, ranks in enumerate(stages)
        for rank, seconds in enumerate(ranks)
    ]


def run(
    forecast: Forecast, first: int, a: float, b: float, draw: random.Random, noise: float = 0.0, count: int = 400
) -> int:
    """Iterations of a machine with `a` seconds and `b` a position. Returns how often the budget changed."""
    changes = 0
    for iteration in range(first, first + count):
        positions = draw.randint(1, 300)
        forecast.scheduled(iteration, positions)
        took = a + b * positions + draw.uniform(-noise, noise)
        changes += forecast.timed(iteration, times((took / 2, took / 3), (took / 4, took / 2)))
    return changes


def test_it_finds_the_most_positions_that_end_in_time_and_follows_the_machine() -> None:
    draw, forecast = random.Random(1), Forecast(0.05, 256)
    assert run(forecast, 0, 0.01, 0.0002, draw, noise=0.002) >= 1
    assert forecast.positions == pytest.approx((0.05 - 0.01) / 0.0002, rel=0.15)
    run(forecast, 1000, 0.02, 0.0004, draw, count=1200)  # something else takes half of it
    assert forecast.positions == pytest.approx((0.05 - 0.02) / 0.0004, rel=0.15)


def test_a_machine_that_is_too_slow_or_too_fast() -> None:
    draw, slow, fast = random.Random(2), Forecast(0.05, 256), Forecast(0.05, 256)
    run(slow, 0, 0.06, 0.001, draw)
    assert slow.positions == 1  # the core gives it one more than max_bs
    run(fast, 0, 0.0, 1e-7, draw)
    assert fast.positions == MOST


def test_iterations_that_are_alike() -> None:
    """Increments alone say nothing about prompts. Full ones that take too long have fewer positions, and those that
    leave time and use all have more: from far above as from far below."""
    forecast = Forecast(0.05, 256)
    for iteration in range(10 * LEAST):
        forecast.scheduled(iteration, 8)
        assert not forecast.timed(iteration, times((0.01 + iteration * 1e-5, 0.0)))
    assert forecast.positions == 256
    for first in (4000, 9):
        full = Forecast(0.05, first)
        for iteration in range(100 * LEAST):
            positions = max(full.positions, 9)
            full.scheduled(iteration, positions)
            full.timed(iteration, times((positions * 0.001, 0.0)))
        assert full.positions == pytest.approx(50, rel=0.2)


def test_a_machine_that_was_slow_for_a_while() -> None:
    forecast, draw = Forecast(0.05, 256), random.Random(3)
    for iteration in range(16_000):
        positions = draw.choice((8, max(forecast.positions, 9)))
        slow = 20 if 500 <= iteration < 4000 else 1
        forecast.scheduled(iteration, positions)
        forecast.timed(iteration, times(((0.01 + positions * 0.0002) * slow, 0.0)))
    assert forecast.positions == pytest.approx(200, rel=0.2)


def test_iterations_whose_times_never_come_are_forgotten() -> None:
    forecast = Forecast(0.05, 256)
    for iteration in range(10 * FLYING):
        forecast.scheduled(iteration, 8)
    assert len(forecast._flying) <= FLYING


def test_a_lost_iteration_and_an_unknown_one_are_not_counted() -> None:
    forecast = Forecast(0.05, 256)
    forecast.scheduled(1, 100)
    forecast.lost()
    assert not forecast.timed(1, times((1.0, 1.0)))
    assert not forecast.timed(2, times((1.0, 1.0)))
