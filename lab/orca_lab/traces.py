"""Recorded traces as workloads, and the changes that fit them to a model: each is counted, and none is silent.

Forms that `read` knows by their first line:

Azure LLM inference 2023 and 2024   CSV: TIMESTAMP, ContextTokens, GeneratedTokens
BurstGPT                            CSV with times in seconds: Timestamp, Model, Request tokens, Response tokens, ..
Mooncake                            JSON lines: timestamp in ms, input_length, output_length, hash_ids (of 512 tokens)
Orca's journal                      an engine's JSON lines (docs/journal.md)
our own                             CSV: at, input_tokens, output_tokens; `write` makes it

A row that cannot be read raises InvalidArgument with its file, line and column. A row without an answer is a failure of
the recorded system, and is counted and left out.
"""

import csv
import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from orca_common.errors import FailedPrecondition, InvalidArgument

from .recording import Recording
from .workload import Asked

OWN = ("at", "input_tokens", "output_tokens")
AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BURST_GPT = ("Timestamp", "Request tokens", "Response tokens")
MOONCAKE = ("timestamp", "input_length", "output_length")


@dataclass(frozen=True)
class Trace:
    """Requests in the order of their arrival, the first one at 0, and what was done to them: sentences with counts."""

    requests: tuple[Asked, ...]
    changes: tuple[str, ...] = field(default=())

    def cut(self, begin: float, end: float) -> "Trace":
        """The requests that arrive from `begin` until before `end`, in seconds."""
        kept = [one for one in self.requests if begin <= one.at < end]
        return self._with(kept, f"cut to {begin:g} .. {end:g} s: {self._less(kept)} left out")

    def thin(self, share: float, seed: int) -> "Trace":
        """About this share of the requests, each kept or not by chance: thinned Poisson arrivals are Poisson."""
        chance = random.Random(f"thin {seed}")
        kept = [one for one in self.requests if chance.random() < share]
        return self._with(kept, f"thinned to {share:g}: {self._less(kept)} left out")

    def faster(self, factor: float) -> "Trace":
        """The same requests, `factor` times as many in a second."""
        return self._with(
            [one._replace(at=one.at / factor) for one in self.requests],
            f"{factor:g} times as fast: {len(self.requests)} moved",
        )

    def fit(self, longest: int, clip: bool = False) -> "Trace":
        """Requests of at most `longest` tokens. Others are dropped, or clipped: the input first, to its last token but
        one that leaves room for all of the output, or for one token of it."""
        kept, clipped = list[Asked](), 0
        for one in self.requests:
            if one.tokens <= longest:
                kept.append(one)
            elif clip:
                inputs = min(one.input_tokens, max(1, longest - one.output_tokens))
                kept.append(one._replace(input_tokens=inputs, output_tokens=min(one.output_tokens, longest - inputs)))
                clipped += 1
        what = f"{clipped} clipped" if clip else f"{self._less(kept)} dropped"
        return self._with(kept, f"fitted to {longest} tokens: {what}")

    def _less(self, kept: list[Asked]) -> int:
        return len(self.requests) - len(kept)

    def _with(self, requests: Iterable[Asked], change: str) -> "Trace":
        return replace(in_order(requests), changes=(*self.changes, change))


def in_order(requests: Iterable[Asked]) -> Trace:
    """A trace of requests, whose times begin with the first one."""
    found = sorted(requests, key=lambda one: one.at)
    first = found[0].at if found else 0.0
    return Trace(tuple(one._replace(at=one.at - first) for one in found))


def read(path: Path) -> Trace:
    """The trace in a file of any of the forms above. Raises InvalidArgument or FailedPrecondition with a sentence."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            first = file.readline()
            columns = tuple(name.strip() for name in first.rstrip("\r\n").split(","))
            if first.startswith('{"core"'):
                return _journal(path)
            file.seek(0)
            if first.startswith("{"):
                return _counted(_mooncake(path, file))
            for form, row in (OWN, _own), (AZURE, _azure), (BURST_GPT, _burst_gpt):
                if set(form) <= set(columns):
                    return _counted(_rows(path, file, row))
    except (OSError, UnicodeDecodeError) as error:
        raise FailedPrecondition(f"trace: {path} cannot be read ({error})") from None
    known = "; ".join(", ".join(form) for form in (OWN, AZURE, BURST_GPT))
    raise InvalidArgument("trace", f"{path}, line 1: is no form that is known: {known}; JSON lines; a journal")


def write(path: Path, requests: Iterable[Asked]) -> None:
    """Our own form. Names of blocks are in no column of it."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(OWN)
        writer.writerows((repr(one.at), one.input_tokens, one.output_tokens) for one in requests)


# -- rows


class Row:
    """A row of a file by its columns."""

    def __init__(self, where: str, values: Mapping[str, Any]) -> None:
        self._where, self._values = where, values

    def get(self, column: str, kind: Callable[[Any], Any], what: str) -> Any:
        """A column's value. Raises InvalidArgument, which says where it is and what it should have been."""
        value = self._values.get(column)
        try:
            return kind(value)
        except (TypeError, ValueError, OverflowError):
            shown = "is missing" if value is None else f"is {value!r}"
            raise InvalidArgument("trace", f"{self._where}, column {column!r}: {shown}, which is no {what}") from None

    def count(self, column: str) -> int:
        return self.get(column, _count, "number of tokens")

    def seconds(self, column: str) -> float:
        return self.get(column, _finite, "time")


def _count(value: Any) -> int:
    if isinstance(value, bool) or (isinstance(value, float) and value != int(value)):
        raise ValueError
    number = int(value)
    if number < 0:
        raise ValueError
    return number


def _finite(value: Any) -> float:
    number = float(value)
    if isinstance(value, bool) or not abs(number) < float("inf"):
        raise ValueError
    return number


def _moment(value: Any) -> float:
    """Seconds since 1970 of a date as in 2023-11-16 18:15:46.6805900, or with an offset; without one it is UTC's."""
    moment = datetime.fromisoformat(value)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _own(row: Row) -> Asked:
    return Asked(row.seconds("at"), row.count("input_tokens"), row.count("output_tokens"))


def _azure(row: Row) -> Asked:
    at, inputs, outputs = AZURE
    return Asked(row.get(at, _moment, "date"), row.count(inputs), row.count(outputs))


def _burst_gpt(row: Row) -> Asked:
    at, inputs, outputs = BURST_GPT
    return Asked(row.seconds(at), row.count(inputs), row.count(outputs))


def _rows(path: Path, file: Iterable[str], kind: Callable[[Row], Asked]) -> Iterator[Asked]:
    reader = csv.DictReader(file, skipinitialspace=True)
    try:
        for values in reader:
            where = f"{path}, line {reader.line_num}"
            if None in values:
                raise InvalidArgument("trace", f"{where}, column {len(reader.fieldnames or ()) + 1}: has no name")
            yield kind(Row(where, {str(name).strip(): value for name, value in values.items()}))
    except csv.Error as error:
        raise InvalidArgument("trace", f"{path}, line {reader.line_num}, column 1: {error}") from None


def _mooncake(path: Path, file: Iterable[str]) -> Iterator[Asked]:
    at, inputs, outputs = MOONCAKE
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            values = json.loads(line)
        except ValueError as error:
            column = getattr(error, "colno", 1)
            raise InvalidArgument("trace", f"{where}, column {column}: is no JSON") from None
        if not isinstance(values, dict):
            raise InvalidArgument("trace", f"{where}, column 1: is no JSON object")
        row = Row(where, values)
        blocks = row.get("hash_ids", lambda ids: tuple(map(_count, ids or ())), "list of block ids")
        yield Asked(row.seconds(at) / 1e3, row.count(inputs), row.count(outputs), blocks)


def _counted(rows: Iterable[Asked]) -> Trace:
    """A trace of the rows that have tokens in and out, with a count of the others."""
    every = list(rows)
    good = [one for one in every if one.input_tokens and one.output_tokens]
    failures = len(every) - len(good)
    late = sum(after.at < before.at for before, after in pairwise(every))
    said = [
        *([f"{failures} of {len(every)} rows without tokens in or out left out: failures"] if failures else []),
        *([f"{late} rows were before the one above them, and sorted"] if late else []),
    ]
    return replace(in_order(good), changes=tuple(said))


# -- our journal


def _journal(path: Path) -> Trace:
    """The requests that an engine got, when they were submitted, with as many output tokens as each one was given.

    A request that begins again after a loss is one request. Those that the heading has already began before. Raises
    FailedPrecondition for a file that is no journal.
    """
    return _counted(one._replace(limit=0) for one in Recording.of(path).asked)
