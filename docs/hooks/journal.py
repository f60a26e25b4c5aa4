"""Writes the tables of a journal's kinds into docs/journal.md, from the scheduler's code.

python docs/hooks/journal.py
"""

import re
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, get_args

from orca_scheduler.core import core
from orca_scheduler.lifecycle import lifecycle
from orca_scheduler.lifecycle.events import LifeAction, LifeEvent
from orca_scheduler.master.journal import COLUMNS

PAGE = Path(__file__).parents[1] / "journal.md"
UNIONS = {
    "core-events": core.Event,
    "core-actions": core.Action,
    "life-events": LifeEvent,
    "life-actions": LifeAction,
    "life-states": lifecycle.State,
}


def page() -> str:
    """Returns docs/journal.md with a table between each pair of its marks."""
    text = PAGE.read_text()
    for name, union in UNIONS.items():
        marked = re.compile(rf"(?<=<!-- kinds: {name} -->\n\n).*?(?=\n<!-- end -->)", re.DOTALL)
        text = marked.sub(lambda _, union=union: table(get_args(union)), text)
    return text


def table(kinds: tuple[type[Any], ...]) -> str:
    """Writes a line for each kind: its name, its fields, those with a default in brackets, and its meaning."""
    lines = ["| name | fields | meaning |", "| --- | --- | --- |"]
    return "\n".join([*lines, *map(line, kinds)]) + "\n"


def line(kind: type[Any]) -> str:
    """Writes a kind as a line of the table."""
    names: list[str] = []
    for field in fields(kind):
        name = f"`{field.name}`"
        if field.name in COLUMNS:
            name += f" (columns: {', '.join(f'`{column}`' for column in COLUMNS[field.name].kind._fields)})"
        names.append(name if field.default is MISSING and field.default_factory is MISSING else f"[{name}]")
    return f"| `{kind.__name__}` | {', '.join(names)} | {' '.join((kind.__doc__ or '').split())} |"


if __name__ == "__main__":
    PAGE.write_text(page())
