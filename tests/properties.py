"""How much of what is drawn, and of a product of parameters, is tried: a part in `make test`, all in `make fuzz`."""

import os
from collections import Counter
from collections.abc import Sequence
from itertools import combinations, product
from typing import Any, TypeVar

T = TypeVar("T")
PART = 1 if os.environ.get("EXAMPLES") == "all" else 4


def examples(count: int) -> int:
    """Of `count` examples, those of this run."""
    return count // PART


def first(count: int, values: Sequence[T]) -> list[T]:
    """The first `count` of these values, which stand for the others, or all in `make fuzz`."""
    return list(values[:count] if PART > 1 else values)


def covering(*axes: Sequence[Any], strength: int = 2) -> list[tuple[Any, ...]]:
    """Cases of a product of parameters, of which any `strength` values of different axes meet in one case at least.

    Most faults need two values (a family on an instruction set) or one. Each case is the one that has the most meetings
    which no case before it has had; of several the one whose values were used least so far, and the first of those. In
    `make fuzz` it is the whole product.
    """
    assert 1 <= strength <= len(axes), f"{strength} values of {len(axes)} axes cannot meet"
    cases = list(product(*(range(len(axis)) for axis in axes)))
    if PART > 1:
        of = {case: set(combinations(enumerate(case), strength)) for case in cases}
        missing, cases, uses = set[Any]().union(*of.values()), [], Counter[tuple[int, int]]()
        while missing:
            cases.append(
                max(of, key=lambda case: (len(of[case] & missing), -sum(uses[one] for one in enumerate(case))))
            )
            uses.update(enumerate(cases[-1]))
            missing -= of.pop(cases[-1])
    return [tuple(axis[n] for axis, n in zip(axes, case, strict=True)) for case in cases]
