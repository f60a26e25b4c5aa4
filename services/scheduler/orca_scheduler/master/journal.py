"""The journal of an engine's term: every event of its core and its lifecycle with the actions that followed, and notes.

    {"core": {..}, "state": {..}, "lifecycle": {..}, ..}    where both machines stood, first line
    {"event": [name, {..}], "actions": [[name, {..}], ..]}  a step of the core
    {"life": [name, {..}], "actions": [[name, {..}], ..]}   a step of the lifecycle
    {"note": {..}}                                          more for readers: request ids, times of stages

docs/journal.md has every kind of line. Fields have their names, and one that has its default is left out, so that a
journal replays after a new field has been added. Members and outcomes are columns: `{"row": [0, 1], "start": [7, 3]}`
instead of a list of rows.

Replaying the events must give the same actions: `python -m orca_scheduler.master.journal FILE` does it, with each file
by itself.
"""

import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, get_args, get_type_hints

import msgspec

from ..core import core
from ..core.core import (
    Action,
    BatchReturned,
    Core,
    EngineLost,
    EngineReady,
    Event,
    Member,
    Outcome,
    ScheduleBatch,
)
from ..core.roles import Role
from ..core.sets import policy_named
from ..lifecycle import lifecycle
from ..lifecycle.events import CandidateChanged, LifeAction, LifeEvent, RankLeaving, Recorded, Say, Suspected
from ..lifecycle.lifecycle import Lifecycle
from .recent import EngineRecent

# 3 us for a batch of 64, where the standard library takes 31: it is on every iteration's path
ENCODER = msgspec.json.Encoder()
DECODER = msgspec.json.Decoder()
log = logging.getLogger(__name__)
LIMIT = 256 << 20  # bytes of one file; a longer run goes on in a new one and keeps the last two
OLDER = 2 * LIMIT  # bytes of an engine's earlier terms that stay in the folder
OLDER_FILES = 14  # and how many files

KINDS: dict[str, type[Any]] = {
    kind.__name__: kind
    for union in (core.Event, core.Action, LifeEvent, LifeAction, lifecycle.State)
    for kind in get_args(union)
}


class Named(NamedTuple):
    """A claimed request as the pool knows it."""

    request: str
    submitted: int  # Redis's TIME in microseconds
    exchange: str = ""  # X-Request-Id of the HTTP request that it came with


class Journal:
    """Writes the journal of one term into its file, into memory, or into both.

    Lines in the file are buffered: `flush` when the engine is idle and at the end. A file that cannot be written, as on
    a full disk, ends with an error in the log. The engine goes on.
    """

    def __init__(
        self,
        path: Path | None,
        of: Core,
        life: Lifecycle,
        term: int = 0,
        names: Callable[[], Mapping[int, Named]] = dict,
        recent: EngineRecent | None = None,
    ) -> None:
        """names: the requests that the engine holds, by claim number. Old files of the engine beside `path` go."""
        self._path, self._core, self._life = path, of, life
        self._term, self._names, self._recent = term, names, recent
        self._file: BinaryIO | None = None  # None: it is not wanted, or could not be written
        self._size = 0
        self._formed = False  # and no tokens have come since
        heading = self._heading()
        if recent is not None:
            recent.begin(heading, term)
        if path is not None:
            try:
                remove_old(path)
                self._open(path, heading)
            except OSError as error:
                self._give_up(error)

    def _heading(self) -> bytes:
        of = self._core
        numbers = {
            "max_bs": of.limits.max_bs,
            "n_workers": of.n_workers,
            "block_size": of.block_size,
            "run_ahead": of.run_ahead,
            "policy": of.policy.name,
            **({"role": of.role} if of.role else {}),
        }
        clock = {"now": time.monotonic(), "wall": time.time_ns()}  # an event loop's clock is the monotonic one
        line = {
            "core": numbers,
            "state": of.state(),
            "lifecycle": lifecycle_state(self._life),
            "term": self._term,
            "clock": clock,
            "claims": {claim: list(named) for claim, named in self._names().items()},
        }
        return ENCODER.encode(line) + b"\n"

    def _open(self, path: Path, heading: bytes) -> None:
        # For its owner alone: the token ids of answers are in it.
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        self._file = os.fdopen(file, "wb", buffering=1 << 16)
        self._size = self._file.write(heading)

    def core_step(self, event: Event, actions: Sequence[Action], late: float = 0.0) -> None:
        """Records a step of the core. late: seconds for which the event waited until the pool kept up."""
        line: dict[str, Any] = {"event": encode(event), "actions": [encode(action) for action in actions]}
        if late:
            line["late"] = round(late, 6)
        first = self._formed and isinstance(event, BatchReturned)
        self._formed = isinstance(event, EngineReady) or (self._formed and not first)
        self._write(line, lasting=first or isinstance(event, EngineReady | EngineLost))
        self._go_on_when_full()

    def life_step(self, event: LifeEvent, actions: Sequence[LifeAction]) -> None:
        """Records a step of the lifecycle. They are few, and about failures: in the file at once."""
        tells = isinstance(event, Suspected | RankLeaving | Recorded | CandidateChanged)
        lasting = tells or any(isinstance(action, Say) for action in actions)
        self._write({"life": encode(event), "actions": [encode(action) for action in actions]}, lasting)
        self.flush()
        self._go_on_when_full()

    def note(self, **values: Any) -> None:
        self._write({"note": values})

    def remember(self, **values: Any) -> None:
        """Adds a note to the memory alone: it is for no file."""
        if self._recent is not None:
            self._recent.add(ENCODER.encode({"note": values}) + b"\n", lasting=False)

    def _write(self, line: dict[str, Any], lasting: bool = False) -> None:
        """lasting: it belongs to the story of a failure."""
        encoded = ENCODER.encode(line) + b"\n"
        if self._recent is not None:
            self._recent.add(encoded, lasting)
        if self._file is not None:
            try:
                self._size += self._file.write(encoded)
            except OSError as error:
                self._give_up(error)

    def _go_on_when_full(self) -> None:
        """Begins a new file, or section, after a step: there the recorded steps and the machines' states agree."""
        if self._recent is not None and self._recent.full:
            self._recent.begin(self._heading(), self._term)
        if self._file is not None and self._path is not None and self._size > LIMIT:
            try:
                self._file.close()
                self._path.replace(self._path.with_suffix(".1.jsonl"))
                self._open(self._path, self._heading())
            except OSError as error:
                self._give_up(error)

    def flush(self) -> None:
        if self._file is not None:
            try:
                self._file.flush()
            except OSError as error:
                self._give_up(error)

    def close(self) -> None:
        if self._file is not None:
            try:
                self._file.close()
            except OSError as error:
                self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """The first error of the file is the journal's end."""
        log.error("journal given up", extra={"path": str(self._path), "why": str(error)})
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                file.close()  # it tries once more to write what is buffered, and closes all the same


# -- files


class File(NamedTuple):
    """A journal's file."""

    path: Path
    engine: str
    term: int
    older: bool  # the first part of a term that went on in a second file


def path_of(folder: Path, engine: str, term: int) -> Path:
    return folder / f"journal-{engine}-{term}.jsonl"


def files_in(folder: Path) -> list[File]:
    """Returns the journals in a folder, by engine, the oldest first."""
    found = [file for path in folder.glob("journal-*.jsonl") if (file := _parsed(path)) is not None]
    return sorted(found, key=lambda file: (file.engine, file.term, not file.older))


def _parsed(path: Path) -> File | None:
    name = path.name.removeprefix("journal-").removesuffix(".jsonl")
    older = name.endswith(".1")
    engine, _, term = name.removesuffix(".1").rpartition("-")
    return File(path, engine, int(term), older) if engine and term.isdecimal() else None


def remove_old(path: Path) -> None:
    """Removes the oldest journals of the engine's earlier terms: those beyond OLDER bytes or OLDER_FILES files."""
    mine = _parsed(path)
    if mine is None:
        return
    size = 0
    earlier = [file.path for file in files_in(path.parent) if file.engine == mine.engine and file.term < mine.term]
    for count, old in enumerate(reversed(earlier), 1):
        size += old.stat().st_size
        if size > OLDER or count > OLDER_FILES:
            old.unlink()


# -- values to JSON and back


class Columns(NamedTuple):
    """A field that holds many rows of one kind, and what most of them have in it."""

    kind: type[Any]  # a NamedTuple
    usual: dict[str, Any]  # a column of these values alone is left out


COLUMNS = {
    "members": Columns(Member, {"count": 1, "outputs": 1, "new_blocks": (), "token": None, "shared": 0}),
    "outcomes": Columns(Outcome, {"token": None, "finish": None}),
}


def encode(value: Any) -> list[Any]:
    """The name of an event, action or state, and its fields by their names, without those that have their defaults."""
    kept = {}
    for name, default in _fields(type(value)):
        given = getattr(value, name)
        if name in COLUMNS:
            kept[name] = _columns(given, COLUMNS[name])
        elif given is not default and given != default:
            kept[name] = given
    return [type(value).__name__, kept]


def decode(encoded: list[Any]) -> Any:
    """The event, action or state that `encode` has encoded, without fields that only another release has."""
    name, values = encoded
    kind = KINDS[name]
    hints = _hints(kind)
    return kind(**{
        field: _rows(value, COLUMNS[field]) if field in COLUMNS else _typed(value, hints[field])
        for field, value in values.items() if field in hints
    })  # fmt: skip


@cache
def _fields(kind: type[Any]) -> tuple[tuple[str, Any], ...]:
    """The fields of a kind, and their defaults."""
    return tuple((field.name, field.default) for field in fields(kind))


def _columns(rows: Sequence[Any], columns: Columns) -> dict[str, Sequence[Any]]:
    of_all: dict[str, Sequence[Any]] = dict(zip(columns.kind._fields, zip(*rows, strict=True), strict=False))
    for name, usual in columns.usual.items():
        if name in of_all and of_all[name].count(usual) == len(rows):
            del of_all[name]
    return of_all


def _rows(columns: dict[str, Sequence[Any]], of: Columns) -> tuple[Any, ...]:
    length = max(map(len, columns.values()), default=0)
    kinds = _column_kinds(of.kind)
    of_all = [
        _typed(columns[name], kinds[name]) if name in columns else [of.usual[name]] * length for name in of.kind._fields
    ]
    return tuple(map(of.kind._make, zip(*of_all, strict=True))) if length else ()


@cache
def _column_kinds(kind: type[Any]) -> dict[str, Any]:
    """The types of its columns, by name. A column is converted at once: a line of 64 takes 0.2 ms instead of 0.8."""
    return {name: list[hint] for name, hint in _hints(kind).items()}


@cache
def _hints(kind: type[Any]) -> dict[str, Any]:
    """The types of its fields, by name. To evaluate them takes longer than to decode a state."""
    return get_type_hints(kind)


def _typed(value: Any, hint: Any) -> Any:
    return msgspec.convert(value, hint, str_keys=True)


def lifecycle_state(life: Lifecycle) -> dict[str, Any]:
    """A lifecycle as plain values."""
    values = {field.name: getattr(life, field.name) for field in fields(life)} | {"state": encode(life.state)}
    return msgspec.to_builtins(values)


def restored_lifecycle(values: dict[str, Any]) -> Lifecycle:
    """The lifecycle of which `lifecycle_state` made plain values, which may have gone through JSON."""
    hints = _hints(Lifecycle) | {"state": list[Any]}
    typed = {name: _typed(value, hints[name]) for name, value in values.items()}
    return Lifecycle(**typed | {"state": decode(typed["state"])})


# -- reading


@dataclass(frozen=True, slots=True)
class Heading:
    """The states of both machines when this file was begun, as plain values."""

    numbers: dict[str, Any]  # of the core: `max_bs` and so on, and the name of its policy
    state: dict[str, Any]
    lifecycle: dict[str, Any]
    term: int
    now: float  # the moment on the events' clock
    wall: int  # and in ns of the wall clock
    claims: dict[int, Named]  # the requests that the engine holds, by claim number


@dataclass(frozen=True, slots=True)
class CoreStep:
    event: Event
    actions: tuple[Action, ...]
    late: float = 0.0  # seconds after the event's `now`, where the event waited until the pool kept up


@dataclass(frozen=True, slots=True)
class LifeStep:
    event: LifeEvent
    actions: tuple[LifeAction, ...]


@dataclass(frozen=True, slots=True)
class Note:
    values: dict[str, Any]


Line = Heading | CoreStep | LifeStep | Note


def read(path: Path) -> Iterator[Line]:
    """The lines of a journal. A torn last line (its writer was killed, or still writes) ends it."""
    with path.open("rb") as lines:  # bytes: a tear may cut a character
        for line in lines:
            if not line.endswith(b"\n"):
                return
            yield parse(line)


def parse(line: bytes) -> Line:
    """One line of a journal."""
    return _line(DECODER.decode(line))


def scheduled(lines: Iterable[Line]) -> Iterator[ScheduleBatch]:
    """The batches that were scheduled, in their order."""
    for line in lines:
        if isinstance(line, CoreStep):
            yield from (action for action in line.actions if isinstance(action, ScheduleBatch))


def request_names(lines: Iterable[Line]) -> dict[int, str]:
    """Request ids by claim number."""
    names: dict[int, str] = {}
    for line in lines:
        names |= named_in(line)
    return names


def named_in(line: Line) -> dict[int, str]:
    """The request ids in a line, by claim number."""
    match line:
        case Heading(claims=claims):
            return {claim: named.request for claim, named in claims.items()}
        case Note({"claims": claims}):
            return {int(claim): name for claim, name in claims.items()}
        case _:
            return {}


def _line(line: dict[str, Any]) -> Line:
    match line:
        case {"note": values}:
            return Note(values)
        case {"event": event, "actions": actions}:
            return CoreStep(decode(event), tuple(map(decode, actions)), line.get("late", 0.0))
        case {"life": event, "actions": actions}:
            return LifeStep(decode(event), tuple(map(decode, actions)))
        case _:
            clock = line["clock"]
            claims = {int(claim): Named(*named) for claim, named in line["claims"].items()}
            machines = line["core"], line["state"], line["lifecycle"]
            return Heading(*machines, line["term"], clock["now"], clock["wall"], claims)


def replay(path: Path) -> Iterator[tuple[CoreStep | LifeStep, Sequence[Action | LifeAction]]]:
    """Steps a core and a lifecycle through a journal: each recorded step with the actions that came out this time.

    Yields nothing when the writer was killed before the first line was out.
    """
    lines = read(path)
    heading = next(lines, None)
    if not isinstance(heading, Heading):
        return
    core_again, life_again = restored(heading)
    for line in lines:
        match line:
            case CoreStep(event):
                yield line, core_again.step(event)
            case LifeStep(event):
                yield line, life_again.step(event)
            case _:
                pass


def restored(heading: Heading) -> tuple[Core, Lifecycle]:
    """Both machines as they stood when the file was begun. Raises ValueError for a policy that there is not, and for a
    state of another form."""
    numbers: dict[str, Any] = dict(heading.numbers)
    policy, role = policy_named(numbers.pop("policy")), Role(numbers.pop("role", ""))
    fresh = Core(**numbers, policy=policy, role=role)
    fresh.restore(heading.state)
    return fresh, restored_lifecycle(heading.lifecycle)


if __name__ == "__main__":
    count = 0
    for step, again in replay(Path(sys.argv[1])):
        count += 1
        if step.actions != tuple(again):
            raise SystemExit(f"event {count} {step.event} gave\n{step.actions}\nand gives\n{again}")
    print(f"{count} events gave the same actions")
