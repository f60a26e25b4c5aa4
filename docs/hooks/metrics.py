"""Writes the table of metrics into docs/metrics.md, from `orca_common.metrics`.

python docs/hooks/metrics.py
"""

import re
from pathlib import Path

from orca_common.metrics import TABLE, Row

PAGE = Path(__file__).parents[1] / "metrics.md"
MARKED = re.compile(r"(?<=<!-- orca_common\.metrics -->\n\n).*?(?=\n<!-- end -->)", re.DOTALL)


def page() -> str:
    """Returns docs/metrics.md with the table between its marks."""
    lines = ["| metric | kind | of | meaning | labels |", "| --- | --- | --- | --- | --- |", *map(line, TABLE)]
    return MARKED.sub(lambda _: "\n".join(lines) + "\n", PAGE.read_text())


def line(row: Row) -> str:
    """Writes a metric as a line of the table."""
    labels = (
        f"`{label}`: {values if isinstance(values, str) else ', '.join(values)}"
        if len(values) < 12 or isinstance(values, str)
        else f"`{label}`: {len(values)} reasons of [errors](call.md#errors)"
        for label, values in row.labels.items()
    )
    return f"| `{row.name}` | {row.kind} | {', '.join(row.services)} | {row.sentence} | {'; '.join(labels)} |"


if __name__ == "__main__":
    PAGE.write_text(page())
