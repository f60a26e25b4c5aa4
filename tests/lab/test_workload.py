"""A workload is drawn before it begins: the same for every server, and the same but faster at a higher rate."""

import itertools
import statistics
from collections import Counter

import pytest

from orca_bench.load import load_of
from orca_common.errors import InvalidArgument
from orca_lab.workload import AT_ONCE, PAPER, POISSON, Arrivals, Asked, Lengths, Seeds, drawn, prompts

ONE = Lengths((1, 1), (1, 1))


def gaps(arrivals: Arrivals, rate: float, requests: int) -> list[float]:
    workload = drawn(ONE, arrivals, rate, requests, Seeds.of(1))
    assert workload[0].at == 0
    return [after.at - before.at for before, after in itertools.pairwise(workload)]


def test_the_same_seed_draws_the_same_load() -> None:
    assert load_of(2, 50, 7, PAPER) == load_of(2.0, 50, 7, PAPER)
    assert load_of(2, 50, 7, PAPER) != load_of(2, 50, 8, PAPER)


def test_a_higher_rate_moves_the_same_arrivals_together() -> None:
    slow, fast = load_of(1, 50, 7, PAPER), load_of(4, 50, 7, PAPER)
    assert [one.at for one in fast] == pytest.approx([one.at / 4 for one in slow])
    assert [(len(one.request.prompt), one.request.output) for one in slow] == [
        (len(one.request.prompt), one.request.output) for one in fast
    ]
    assert all(a.request.prompt != b.request.prompt for a, b in zip(slow, fast, strict=True)), (
        "a server that keeps prompts would have an easier time at the second rate"
    )


def test_three_seeds_decide_three_things() -> None:
    base = drawn(PAPER, POISSON, 1, 50, Seeds(1, 2, 3))
    other_lengths = drawn(PAPER, POISSON, 1, 50, Seeds(9, 2, 3))
    other_gaps = drawn(PAPER, POISSON, 1, 50, Seeds(1, 9, 3))
    assert [one.at for one in base] == [one.at for one in other_lengths] != [one.at for one in other_gaps]
    assert [one[1:] for one in base] == [one[1:] for one in other_gaps] != [one[1:] for one in other_lengths]
    assert drawn(PAPER, POISSON, 1, 50, Seeds(1, 2, 9)) == base
    assert list(prompts(base, 3, range(99))) != list(prompts(base, 4, range(99)))
    # A longer workload begins with the shorter one.
    assert drawn(PAPER, POISSON, 1, 80, Seeds(1, 2, 3))[:50] == base


def test_arrivals_are_a_poisson_process() -> None:
    found = gaps(POISSON, 5, 100_001)
    mean = statistics.mean(found)
    assert abs(mean - 1 / 5) < 3 * (1 / 5) / len(found) ** 0.5  # three standard errors
    assert statistics.stdev(found) == pytest.approx(1 / 5, rel=0.03)  # of an exponential distribution: its mean


def test_burstiness_is_the_squared_variation_of_gaps() -> None:
    for burstiness in (0.25, 4.0):
        found = gaps(Arrivals(burstiness), 5, 100_001)
        assert statistics.mean(found) == pytest.approx(1 / 5, rel=0.03)
        assert (statistics.stdev(found) / statistics.mean(found)) ** 2 == pytest.approx(burstiness, rel=0.05)
    assert gaps(Arrivals.read("constant"), 5, 10) == pytest.approx([0.2] * 9)
    assert gaps(AT_ONCE, 5, 10) == [0.0] * 9
    assert Arrivals.read("gamma:4") == Arrivals(4.0)
    for text in ("", "gamma", "gamma:0", "gamma:x", "gamma:nan", "often"):
        with pytest.raises(InvalidArgument, match="arrivals: is "):
            Arrivals.read(text)


def test_lengths_are_the_papers() -> None:
    load = load_of(1, 3000, 1, PAPER)
    inputs, outputs = ({len(one.request.prompt) for one in load}, {one.request.output for one in load})
    assert (min(inputs), max(inputs), min(outputs), max(outputs)) == (32, 512, 1, 128)
    assert statistics.mean(one.request.output for one in load) == pytest.approx(64.5, rel=0.03)
    counted = Counter(token for one in load_of(1, 9, 1, PAPER, range(5)) for token in one.request.prompt)
    assert set(counted) == set(range(5))


def test_prompts_with_the_same_blocks_begin_alike() -> None:
    workload = [Asked(0, 1100, 1, (7, 8)), Asked(1, 700, 1, (7, 9)), Asked(2, 1030, 1, (7, 8, 9)), Asked(3, 5, 1)]
    first, second, third, fourth = prompts(workload, 1, range(1000))
    assert [len(text) for text in (first, second, third, fourth)] == [1100, 700, 1030, 5]
    assert first[:512] == second[:512]
    assert first[512:700] != second[512:]
    assert first[:1024] == third[:1024]
    assert first[1024:1030] != third[1024:]


@pytest.mark.parametrize(
    ("text", "lengths"), [("32-512,1-128", PAPER), ("4,9", ((4, 4), (9, 9))), ("4,1-2", ((4, 4), (1, 2)))]
)
def test_lengths_can_be_given(text: str, lengths: tuple[tuple[int, int], tuple[int, int]]) -> None:
    assert Lengths.read(text) == lengths


@pytest.mark.parametrize("text", ["", "4", "a,b", "4,5,6", "0,1", "9-4,1"])
def test_wrong_lengths_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="lengths: is "):
        Lengths.read(text)
