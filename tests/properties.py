"""How many examples property tests draw: a part of them in `make test`, all in `make fuzz`."""

import os

PART = 1 if os.environ.get("EXAMPLES") == "all" else 4


def examples(count: int) -> int:
    """Of `count` examples, those of this run."""
    return count // PART
