"""Drafts from the text itself: what followed the last tokens where they stood before (prompt lookup decoding).

Source: Saxena, "Prompt Lookup Decoding" (2023); vLLM's `ngram` speculator does the same.
"""

from collections.abc import Sequence
from itertools import cycle, islice

SIZE = 3  # tokens that must agree
LOOKS_BACK = 1 << 12  # tokens: what is indexed of a longer text, in some 2 ms


class Ngrams:
    """One request's prompt and answer, and where each run of SIZE tokens ends in it, the latest place."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._begin()
        self.extend(tokens)

    def _begin(self) -> None:
        self._tokens: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}
        self._before: int | None = None  # where the last SIZE tokens ended before

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends to the text."""
        known, ends = self._tokens, self._ends
        for token in tokens[-LOOKS_BACK:]:
            known.append(token)
            last = tuple(known[-SIZE:])
            self._before = ends.get(last)
            ends[last] = len(known)
        if len(known) > 2 * LOOKS_BACK:  # begin again with the latest half
            self._begin()
            self.extend(known[-LOOKS_BACK:])

    def drafts(self, most: int) -> tuple[int, ...]:
        """Returns the tokens that followed an earlier occurrence of the last ones, repeated up to `most` tokens."""
        if self._before is None:
            return ()
        followed = self._tokens[self._before : self._before + most]
        return tuple(followed if len(followed) == most else islice(cycle(followed), most))
