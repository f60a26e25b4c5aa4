"""Drafts are what followed the last three tokens where they stood before."""

import random

from orca_scheduler.master.ngrams import LOOKS_BACK, SIZE, Ngrams


def plain(text: list[int], most: int) -> tuple[int, ...]:
    """By looking at each place, the latest first."""
    for end in range(len(text) - 1, SIZE - 1, -1):
        if text[end - SIZE : end] == text[-SIZE:]:
            period = len(text) - end
            return tuple(text[end + n % period] if n % period + end < len(text) else 0 for n in range(most))
    return ()


def test_they_are_those_of_a_search() -> None:
    draw = random.Random(1)
    found = 0
    for _ in range(300):
        text = [draw.randrange(4) for _ in range(draw.randint(0, 40))]
        at = draw.randint(0, len(text))
        ngrams = Ngrams(text[:at])
        while at < len(text):
            step = draw.randint(1, 4)
            ngrams.extend(text[at : at + step])
            at += step
            assert ngrams.drafts(8) == plain(text[:at], 8)
            found += bool(ngrams.drafts(8))
    assert found > 200


def test_one_token_again_and_again() -> None:
    assert Ngrams([1, 2, 7, 7, 7, 7]).drafts(5) == (7,) * 5
    assert Ngrams([1, 2, 3, 1, 2, 3]).drafts(5) == (1, 2, 3, 1, 2)
    assert Ngrams([7, 7]).drafts(5) == Ngrams([]).drafts(5) == ()


def test_memory_has_a_bound() -> None:
    ngrams = Ngrams(range(10 * LOOKS_BACK))
    for n in range(0, 5 * LOOKS_BACK, 64):
        ngrams.extend(range(n, n + 64))
        assert len(ngrams._tokens) <= 2 * LOOKS_BACK
        assert len(ngrams._ends) <= 2 * LOOKS_BACK
    assert ngrams.drafts(3) == ()
    ngrams.extend([4 * LOOKS_BACK, 4 * LOOKS_BACK + 1, 4 * LOOKS_BACK + 2])
    assert ngrams.drafts(2) == (4 * LOOKS_BACK + 3, 4 * LOOKS_BACK + 4)
