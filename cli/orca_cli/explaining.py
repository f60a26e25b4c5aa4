"""`orca explain`: why a request took as long as it did, from the schedulers that run, and from a run's journals."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from orca_cli import runs
from orca_common.accounts import clearest, unseen
from orca_common.errors import FailedPrecondition, NotFound
from orca_local import status_port
from orca_scheduler.explain.explanation import explain
from orca_scheduler.explain.history import SECOND, History
from orca_scheduler.explain.telling import as_json, duration, standing_of
from orca_scheduler.master.journal import files_in, read

SECONDS = 15.0  # for a scheduler's answer


def explanation(request: str, folder: Path | None, schedulers: Sequence[str]) -> dict[str, Any]:
    """Returns the account of a request that leaves the least of its time unseen, as `telling.as_json` makes it.

    request: its id, or the X-Request-Id that it came with. schedulers: their status ports, HOST:PORT; those of the run
    in `folder` if none are given. Raises NotFound when nothing knows the request.
    """
    asked = list(schedulers)
    if folder is not None and not asked:
        rows = runs.processes(folder)
        asked = [row["status"] for row in rows if row["role"] == "scheduler" and row["status"] and row["pid"]]
    told: list[dict[str, Any]] = []
    trouble: list[str] = []
    for address in asked:
        try:
            answer = status_port.ask(address, f"/explain?{urlencode({'request': request})}", SECONDS)
        except OSError as error:
            trouble.append(f"{address}: {error}")
            continue
        if "error" in answer:
            trouble.append(f"{address}: {answer['error']}")
        else:
            told.append(answer)
    best = clearest(told)
    if folder is not None and (best is None or unseen(best) > 0):
        best = clearest([*told, *from_journals(told[0]["request"] if told else request, folder, told)])
    if best is None:
        where = [f"no journal in {folder} names it"] if folder is not None else []
        raise NotFound(f"{request}: there is no such request: {'; '.join([*where, *trouble])}")
    return best


def from_journals(request: str, folder: Path, told: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The account that the journals of a folder give, with the pool's word if a scheduler has passed it on."""
    standing = next((standing_of(one) for one in told), None)
    histories: dict[str, History] = {}
    for file in files_in(folder):
        history = histories.setdefault(file.engine, History(file.engine))
        history.take(read(file.path))
    story = explain(request, histories.values(), standing, time.time_ns())
    return [] if story is None else [as_json(story, standing)]


def run_folder(given: Path | None, schedulers: Sequence[str]) -> Path | None:
    """The folder to read. None: the schedulers alone are asked."""
    if given is not None and not given.is_dir():
        raise FailedPrecondition(f"--run-dir: there is no folder {given}")
    return given if given is not None or schedulers else runs.run_folder(None)


def lines(told: dict[str, Any]) -> list[str]:
    """The account for people: a sentence for the whole, and one for each part, after the moment when it began."""
    begins = [f"+{duration(round(part['begin'] * SECOND))}" for part in told["parts"]]
    width = max(map(len, begins), default=0)
    parts = zip(begins, told["parts"], strict=True)
    return [told["sentence"], *(f"{begin:>{width}}  {part['sentence']}" for begin, part in parts)]
