"""Tables without lines: numbers to the right, words to the left."""

from collections.abc import Iterable

from rich.table import Table


def plain(names: Iterable[str], words: int = 1) -> Table:
    """A table with these columns. words: how many columns at the left have words; so has one without a name."""
    table = Table(box=None, pad_edge=False)
    for n, name in enumerate(names):
        table.add_column(name, justify="left" if n < words or not name else "right")
    return table
