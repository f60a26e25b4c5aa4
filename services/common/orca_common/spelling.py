"""Suggestions for a name that is not known."""

from collections.abc import Collection
from difflib import get_close_matches

LIKE = 0.75  # how alike a misspelt name and a known one are; 1: the same
LONGEST = 64  # letters of a name that is compared: the work grows with their square


def suggestion(name: str, known: Collection[str], prefix: str = "") -> str:
    """The end of a sentence about an unknown name: the most alike of the known ones, after `prefix`; '' if none is."""
    near = get_close_matches(name, known, 1, LIKE) if len(name) <= LONGEST else []
    return f"; did you mean {prefix}{near[0]}?" if near else ""
