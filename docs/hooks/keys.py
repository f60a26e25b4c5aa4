"""Writes the tables of Redis's keys into docs/pool.md, from the docstring of `orca_pool.keys`.

python docs/hooks/keys.py

In the docstring a row may take several lines: the first cell of those that continue it is empty.
"""

import re
from pathlib import Path

from orca_pool import keys

PAGE = Path(__file__).parents[1] / "pool.md"
MARKED = re.compile(r"(?<=<!-- orca_pool\.keys -->\n\n).*?(?=\n<!-- end -->)", re.DOTALL)


def page() -> str:
    """Returns docs/pool.md with the tables of the docstring between its marks."""
    doc = keys.__doc__ or ""
    text = doc[doc.index("\n|") : doc.rindex("|\n") + 1].strip()
    tables = "\n\n".join(part if part[0] != "|" else table(part) for part in text.split("\n\n"))
    return MARKED.sub(lambda _: tables + "\n", PAGE.read_text())


def table(text: str) -> str:
    """Writes each row of a table on one line, with the names in its first cell as code."""
    head, _, *lines = ([cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines())
    rows: list[list[str]] = []
    for cells in lines:
        if cells[0]:
            rows.append([", ".join(f"`{name}`" for name in cells[0].split(", ")), *cells[1:]])
        else:
            rows[-1] = [f"{begun} {more}".strip() for begun, more in zip(rows[-1], cells, strict=True)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, ["---"] * len(head), *rows])


if __name__ == "__main__":
    PAGE.write_text(page())
