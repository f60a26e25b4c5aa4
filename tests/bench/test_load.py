"""A load is drawn before it begins: the same for every server, and the same but faster at a higher rate."""

import itertools
import statistics

import pytest

from orca_bench.load import Lengths, poisson
from orca_common.errors import InvalidArgument

PAPER = Lengths.read("paper")


def test_the_same_seed_draws_the_same_load() -> None:
    assert poisson(2, 50, 7, PAPER) == poisson(2.0, 50, 7, PAPER)
    assert poisson(2, 50, 7, PAPER) != poisson(2, 50, 8, PAPER)


def test_a_higher_rate_moves_the_same_arrivals_together() -> None:
    slow, fast = poisson(1, 50, 7, PAPER), poisson(4, 50, 7, PAPER)
    assert [one.at for one in fast] == pytest.approx([one.at / 4 for one in slow])
    assert [(len(one.request.prompt), one.request.output) for one in slow] == [
        (len(one.request.prompt), one.request.output) for one in fast
    ]
    assert all(a.request.prompt != b.request.prompt for a, b in zip(slow, fast, strict=True)), (
        "a server that keeps prompts would have an easier time at the second rate"
    )


def test_arrivals_are_a_poisson_process() -> None:
    load = poisson(5, 20_000, 1, Lengths((1, 1), (1, 1)))
    gaps = [after.at - before.at for before, after in itertools.pairwise(load)]
    assert load[0].at == 0
    assert statistics.mean(gaps) == pytest.approx(1 / 5, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(1 / 5, rel=0.03)  # of an exponential distribution: its mean


def test_lengths_are_the_papers() -> None:
    load = poisson(1, 3000, 1, PAPER)
    inputs, outputs = ({len(one.request.prompt) for one in load}, {one.request.output for one in load})
    assert (min(inputs), max(inputs), min(outputs), max(outputs)) == (32, 512, 1, 128)
    assert statistics.mean(one.request.output for one in load) == pytest.approx(64.5, rel=0.03)
    assert {token for one in poisson(1, 9, 1, PAPER, range(5)) for token in one.request.prompt} == set(range(5))


@pytest.mark.parametrize(
    ("text", "lengths"), [("32-512,1-128", PAPER), ("4,9", ((4, 4), (9, 9))), ("4,1-2", ((4, 4), (1, 2)))]
)
def test_lengths_can_be_given(text: str, lengths: tuple[tuple[int, int], tuple[int, int]]) -> None:
    assert Lengths.read(text) == lengths


@pytest.mark.parametrize("text", ["", "4", "a,b", "4,5,6", "0,1", "9-4,1"])
def test_wrong_lengths_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="lengths: is "):
        Lengths.read(text)
