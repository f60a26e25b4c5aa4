"""JSON as its standard has it: Python's parser takes NaN and infinities, and the last of several values of a name."""

import json
from typing import Any


class Doubled(ValueError):
    """A name comes twice in one object: one of the values would be ignored."""

    def __init__(self, name: str) -> None:
        super().__init__(f"the name {name!r} comes twice in one object")
        self.name = name


def loads(raw: str) -> Any:
    """Raises ValueError, Doubled among them, and RecursionError."""
    return json.loads(raw, parse_constant=_refuse, object_pairs_hook=_once)


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen = set[str]()
        for name, _ in pairs:
            if name in seen:
                raise Doubled(name)
            seen.add(name)
    return found
