"""What each fault cost the clients of a cluster, as a table."""

import json
from pathlib import Path

from orca_chaos.streams import Disturbance


class Pauses:
    """The table of what each fault cost."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._rows: list[Disturbance] = []

    def __call__(self, seen: Disturbance) -> None:
        """Adds a row, prints it, and writes the table."""
        self._rows.append(seen)
        print(f"{seen.name}: longest pause {seen.pause:.1f} s, all well after {seen.seconds:.1f} s")
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / "pauses.json").write_text(json.dumps([vars(row) for row in self._rows], indent=1))
        lines = [f"| {r.name} | {r.pause:.1f} s | {r.seconds:.1f} s | {r.tokens.total()} |" for r in self._rows]
        head = [
            "| what happens | longest pause of a stream | all well after | tokens meanwhile |",
            "| --- | --- | --- | --- |",
        ]
        (self._folder / "pauses.md").write_text("\n".join([*head, *lines, ""]))
