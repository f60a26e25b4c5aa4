"""Which part of a product of parameters is tried."""

from collections import Counter
from itertools import combinations, product

import properties
import pytest
from properties import covering, first

AXES = (("amx", "avx512", "avx2", "portable"), ("bfloat16", "float32"), range(6))


@pytest.fixture(autouse=True)
def a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(properties, "PART", 4)


@pytest.mark.parametrize("strength", [1, 2, 3])
def test_each_few_values_meet(strength: int) -> None:
    cases = covering(*AXES, strength=strength)
    assert len(cases) == len(set(cases)) == {1: 6, 2: 24, 3: 48}[strength]
    for places in combinations(range(len(AXES)), strength):
        met = {tuple(case[n] for n in places) for case in cases}
        assert met == set(product(*(AXES[n] for n in places)))


def test_no_value_is_preferred_but_the_first_ones_meet() -> None:
    """Otherwise all other kernels would be tried with the first type alone."""
    cases = covering(*AXES, strength=1)
    assert cases[0] == ("amx", "bfloat16", 0)
    for n, axis in enumerate(AXES):
        uses = Counter(case[n] for case in cases)
        assert max(uses.values()) - min(uses[value] for value in axis) <= 1


def test_the_first_stand_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    assert first(2, "abc") == ["a", "b"]
    assert first(5, "abc") == ["a", "b", "c"]
    monkeypatch.setattr(properties, "PART", 1)
    assert first(2, "abc") == ["a", "b", "c"]


def test_too_few_axes_are_refused() -> None:
    with pytest.raises(AssertionError):
        covering(range(3))
