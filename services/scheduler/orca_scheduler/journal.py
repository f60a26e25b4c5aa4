"""The journal of one engine's core: each event with the actions it caused, one line of JSON each, and notes.

    {"core": {..}}                              the core's numbers, first line
    {"event": [name, field, ..], "actions": [[name, field, ..], ..]}
    {"note": {..}}                              what a reader wants to know besides: names of claims, times of stages

Replaying the events must give the same actions: `python -m orca_scheduler.journal FILE` does it.
"""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import core
from .core import Action, Core, Event
from .request import Arrival

EVENTS: dict[str, Callable[..., Event]] = {
    kind.__name__: kind
    for kind in (
        core.EngineReady,
        core.EngineLost,
        core.Arrived,
        core.Cancelled,
        core.BatchReturned,
        core.Drain,
        core.Tick,
    )
}
LIMIT = 256 << 20  # bytes of one file; a longer run goes on in a new one and keeps the last two


class Journal:
    """Writes a journal. Lines are buffered: `flush` when the engine is idle and at the end."""

    def __init__(self, path: Path, heading: Core) -> None:
        self._path = path
        numbers = {"max_bs": heading.max_bs, "n_workers": heading.n_workers, "block_size": heading.block_size}
        self._heading = json.dumps({"core": numbers}) + "\n"
        self._open()

    def _open(self) -> None:
        self._file = self._path.open("w", buffering=1 << 16)
        self._size = self._file.write(self._heading)

    def step(self, event: Event, actions: list[Action]) -> None:
        line = {"event": encode(event), "actions": [encode(action) for action in actions]}
        self._size += self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
        if self._size > LIMIT:
            self._file.close()
            self._path.replace(self._path.with_suffix(".1.jsonl"))
            self._open()

    def note(self, **fields: Any) -> None:
        self._size += self._file.write(json.dumps({"note": fields}, separators=(",", ":")) + "\n")

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def encode(value: Event | Action) -> list[Any]:
    """An event or action as a JSON list: its name and its fields."""
    return [type(value).__name__, *(getattr(value, name) for name in value.__slots__)]


def decode(encoded: list[Any]) -> Event:
    """The event of a journal's line."""
    name, *fields = encoded
    if name == "Arrived":
        make: Callable[..., Arrival] = Arrival
        return core.Arrived(fields[0], tuple(make(*map(_frozen, request)) for request in fields[1]))
    return EVENTS[name](*map(_frozen, fields))


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


@dataclass(frozen=True)
class Step:
    """One line of a journal: the event and the actions, encoded, that were recorded for it."""

    event: Event
    actions: list[list[Any]]


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a journal. A torn last line (its writer was killed) ends it."""
    with path.open() as lines:
        for line in lines:
            if not line.endswith("\n"):
                return
            yield json.loads(line)


def replay(path: Path) -> Iterator[tuple[Step, list[list[Any]]]]:
    """Steps a fresh core through a journal's events: each recorded step with the actions that came out this time."""
    lines = read(path)
    fresh = Core(**next(lines)["core"])
    for line in lines:
        if "event" in line:
            step = Step(decode(line["event"]), line["actions"])
            again = json.loads(json.dumps([encode(action) for action in fresh.step(step.event)]))
            yield step, again


if __name__ == "__main__":
    count = 0
    for step, again in replay(Path(sys.argv[1])):
        count += 1
        if step.actions != again:
            raise SystemExit(f"event {count} {step.event} gave\n{step.actions}\nand gives\n{again}")
    print(f"{count} events gave the same actions")
