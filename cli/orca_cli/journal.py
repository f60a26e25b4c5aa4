"""`orca journal`: the journals of a run for people, one line an event, or their lines as they are."""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from orca_common.errors import FailedPrecondition, NotFound
from orca_scheduler.core.core import (
    Arrived,
    BatchReturned,
    BeginHere,
    Cancelled,
    Commit,
    GiveBack,
    HandOver,
    LetGo,
    Pull,
    Pulled,
    ScheduleBatch,
)
from orca_scheduler.lifecycle.events import Admit, Claimed, Gone, Opened, Orphaned
from orca_scheduler.master.journal import CoreStep, Heading, LifeStep, Line, Note, files_in, named_in, parse

LOOK = 0.2  # seconds between looks for new lines
LISTED = 8  # requests that a line names at most


class Read(NamedTuple):
    """A line of a journal: of which file, as it is, and for people."""

    file: str
    raw: bytes
    line: Line
    claims: frozenset[int]  # that it is about
    words: str


def journals(source: Path, engine: str | None) -> list[Path]:
    """Returns the files of a run folder, or the one file. Raises FailedPrecondition without any."""
    if source.is_file():
        return [source]
    found = [file for file in files_in(source) if engine in (None, file.engine)] if source.is_dir() else []
    if not found:
        whose = f" of {engine}" if engine is not None else ""
        raise FailedPrecondition(f"{source} holds no journal{whose}")
    return [file.path for file in found]


def written(path: Path) -> Iterator[bytes]:
    """Yields the whole lines that a file has."""
    with path.open("rb") as file:
        yield from (line for line in file if line.endswith(b"\n"))


def followed(source: Path, engine: str | None) -> Iterator[tuple[Path, bytes]]:
    """Yields the lines of all files, and then those that are written. Never ends."""
    read: dict[int, int] = {}  # inode -> bytes that were read: a file that is full gets another name
    while True:
        for path in journals(source, engine):
            with path.open("rb") as file:
                inode = path.stat().st_ino
                file.seek(read.get(inode, 0))
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    read[inode] = read.get(inode, 0) + len(line)
                    yield path, line
        time.sleep(LOOK)


def described(lines: Iterable[tuple[Path, bytes]]) -> Iterator[Read]:
    """Reads lines: when each was written, and what it says. Lines of one file follow each other."""
    names: dict[int, str] = {}
    moments: dict[Path, int] = {}  # from a file's events to the wall's clock, ns
    for path, raw in lines:
        line = parse(raw)
        if isinstance(line, Heading):
            moments[path] = line.wall - round(line.now * 1e9)
        names |= named_in(line)
        now = now_of(line)
        at = "" if now is None else clock(round(now * 1e9) + moments[path])
        yield Read(path.name, raw, line, claims_of(line), f"{at:<12}  {words(line, names)}")


def of_request(lines: Iterable[Read], request: str) -> Iterator[Read]:
    """Yields the lines that are about one request."""
    claims: set[int] = set()
    for read in lines:
        claims |= {claim for claim, name in named_in(read.line).items() if name == request}
        if claims & read.claims:
            yield read


def show(lines: Iterable[Read], as_json: bool, last: int | None, request: str | None) -> None:
    """Prints lines. Raises NotFound when a request has none."""
    kept: Sequence[Read] | Iterator[Read] = of_request(lines, request) if request is not None else iter(lines)
    if last is not None:
        kept = list(kept)[-last:] if last else []
    count = 0
    for count, read in enumerate(kept, 1):  # noqa: B007
        print(read.raw.decode().rstrip("\n") if as_json else read.words, flush=True)
    if request is not None and not count:
        raise NotFound(f"{request}: no line of these journals is about such a request")


def clock(wall: int) -> str:
    return datetime.fromtimestamp(wall / 1e9).strftime("%H:%M:%S.%f")[:12]


def now_of(line: Line) -> float | None:
    """When a line was written, on its events' clock; None: it does not say."""
    match line:
        case Heading():
            return line.now
        case CoreStep(event) | LifeStep(event):
            return event.now
        case Note(values):
            return values.get("now")


def claims_of(line: Line) -> frozenset[int]:
    """The claims that a line is about."""
    found: set[int] = set()
    match line:
        case Heading() | Note():
            found |= named_in(line).keys()
        case CoreStep() | LifeStep():
            for value in (line.event, *line.actions):
                match value:
                    case Arrived(_, requests):
                        found |= {one.claim for one in requests}
                    case Cancelled(_, claims) | Claimed(_, claims) | Gone(_, claims) | Orphaned(_, claims):
                        found |= set(claims)
                    case Opened() | Admit():
                        found |= set(value.claims)
                    case ScheduleBatch():
                        found |= {member.claim for member in value.members}
                    case Commit():
                        found |= {outcome.claim for outcome in value.outcomes}
                    case GiveBack():
                        found |= {claim for claim, _ in value.requests}
                    case HandOver():
                        found |= {one.claim for one in value.requests}
                    case Pull() | Pulled():
                        found.add(value.claim)
                    case LetGo() | BeginHere():
                        found |= set(value.claims)
                    case _:
                        pass
    return frozenset(found)


def words(line: Line, names: dict[int, str]) -> str:
    """Says what a line has: the event, and after an arrow the actions that followed."""
    match line:
        case Heading():
            return f"a journal begins: term {line.term}, {len(line.claims)} requests, {line.numbers}"
        case CoreStep(event, actions):
            late = f", {line.late:.3f} s after its return" if line.late else ""
            return " -> ".join([value_words(event, names) + late, *(value_words(one, names) for one in actions)])
        case LifeStep(event, actions):
            return " -> ".join([value_words(event, names), *(value_words(one, names) for one in actions)])
        case Note({"claims": claims}):
            return f"claimed: {listed(list(claims.values()))}"
        case Note({"iteration": number, "times": times}):
            ranks = (f"stage {t[0]} rank {t[1]} {(t[5] - t[4]) / 1e6:.2f} ms" for t in times)
            return f"iteration {number} computed: {', '.join(ranks)}"
        case Note(values):
            return ", ".join(f"{name} {value}" for name, value in values.items() if name not in ("now", "wall"))


def value_words(value: Any, names: dict[int, str]) -> str:
    """Says what an event or an action is."""

    def named(claims: Iterable[int]) -> str:
        return listed([names.get(claim, f"claim {claim}") for claim in claims])

    match value:
        case Arrived(_, requests):
            return f"arrived: {named(one.claim for one in requests)}"
        case BatchReturned():
            return f"iteration {value.iteration} returned, {sum(map(len, value.made))} tokens"
        case Cancelled(_, claims):
            return f"ended elsewhere: {named(claims)}"
        case HandOver(requests):
            return f"handed over: {named(one.claim for one in requests)}"
        case Pull():
            return f"pull {value.positions} positions of {named([value.claim])}"
        case Pulled():
            return f"pulled{'' if value.done else ' in vain'}: {named([value.claim])}"
        case LetGo(_, claims):
            return f"let go: {named(claims)}"
        case BeginHere(claims):
            return f"begin here: {named(claims)}"
        case ScheduleBatch():
            parts = [f"{names.get(m.claim, m.claim)} {m.phase} {m.count}" for m in value.members]
            return f"iteration {value.iteration}: {listed(parts)} ({value.reserved} slots; {value.stop})"
        case Commit():
            ends = [f"{names.get(one.claim, one.claim)} {one.finish}" for one in value.outcomes if one.finish]
            return f"commit {len(value.outcomes)} tokens" + (f", ends: {listed(ends)}" if ends else "")
        case GiveBack():
            return f"give back: {named(claim for claim, _ in value.requests)}"
        case _:
            rest = {field.name: getattr(value, field.name) for field in fields(value)}
            told = ", ".join(f"{name} {rest[name]}" for name in rest if name not in ("now", "life"))
            return f"{type(value).__name__}{f' ({told})' if told else ''}"


def listed(parts: Sequence[str]) -> str:
    more = [f"and {len(parts) - LISTED} more"] if len(parts) > LISTED else []
    return ", ".join([*parts[:LISTED], *more])
