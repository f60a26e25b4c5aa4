"""The journal of one engine's core: each event with the actions it caused, one line of JSON each, and notes.

    {"core": {..}, "state": {..}}               the core's numbers and where it stood, first line
    {"event": [name, field, ..], "actions": [[name, field, ..], ..]}
    {"note": {..}}                              what a reader wants to know besides: names of claims, times of stages

Replaying the events must give the same actions: `python -m orca_scheduler.journal FILE` does it, with each file by
itself.
"""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

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
# 3 us for a batch of 64, the standard library takes 31: it is on every iteration's path
ENCODER = msgspec.json.Encoder()
LIMIT = 256 << 20  # bytes of one file; a longer run goes on in a new one and keeps the last two


class Journal:
    """Writes the journal of a core. Lines are buffered: `flush` when the engine is idle and at the end."""

    def __init__(self, path: Path, of: Core) -> None:
        self._path, self._core = path, of
        self._open()

    def _open(self) -> None:
        of = self._core
        numbers = {
            "max_bs": of.max_bs,
            "n_workers": of.n_workers,
            "block_size": of.block_size,
            "run_ahead": of.run_ahead,
        }
        self._file, self._size = self._path.open("wb", buffering=1 << 16), 0
        self._write({"core": numbers, "state": of.state()})

    def step(self, event: Event, actions: list[Action]) -> None:
        """What the core has just made of an event."""
        self._write({"event": encode(event), "actions": [encode(action) for action in actions]})
        if self._size > LIMIT:
            self._file.close()
            self._path.replace(self._path.with_suffix(".1.jsonl"))
            self._open()

    def note(self, **fields: Any) -> None:
        self._write({"note": fields})

    def _write(self, line: dict[str, Any]) -> None:
        self._size += self._file.write(ENCODER.encode(line)) + self._file.write(b"\n")

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
        return core.Arrived(fields[0], tuple(map(Arrival.of, fields[1])))
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
    with path.open("rb") as lines:  # bytes: a tear may cut a character
        for line in lines:
            if not line.endswith(b"\n"):
                return
            yield json.loads(line)


def replay(path: Path) -> Iterator[tuple[Step, list[list[Any]]]]:
    """Steps a core through a journal's events: each recorded step with the actions that came out this time."""
    lines = read(path)
    heading = next(lines, None)
    if heading is None:
        return  # its writer was killed before the first line was out
    fresh = Core(**heading["core"])
    fresh.restore(heading["state"])
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
