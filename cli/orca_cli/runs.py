"""`orca status` and `orca logs`: what a run of `orca serve` on this machine does, and what its processes say."""

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from rich.table import Table

from orca_common.errors import FailedPrecondition
from orca_local import embedded_pool, status_port
from orca_local.run_folder import all_runs, runs_now
from orca_local.settings import StateSettings

LOOK = 0.2  # seconds between looks for new lines


def run_folder(given: Path | None) -> Path:
    """The given folder; otherwise that of the last run in the default place, one that still runs first.

    Raises FailedPrecondition."""
    if given is not None:
        if not (given / "logs").is_dir():
            raise FailedPrecondition(f"{given} is no run folder of `orca serve`")
        return given
    runs = all_runs(StateSettings().runs)
    if not runs:
        raise FailedPrecondition(f"there is no run in {StateSettings().runs}; --run-dir names another folder")
    return next((run for run in reversed(runs) if runs_now(run)), runs[-1])


def state_of(folder: Path) -> tuple[Table, bool]:
    """One line per process: whether it is ready, and why not. And whether all are, and there are some."""
    table = Table(box=None, pad_edge=False)
    for column in ("process", "pid", "age", "restarts", "address", "ready"):
        table.add_column(
            column, justify="left" if column in ("process", "address", "ready") else "right", overflow="fold"
        )
    ready = []
    pods: dict[str, Any] = {}  # by supervisor, its report of its ranks
    for row in processes(folder):
        if row["role"] == "rank":
            name = f"{row['engine']} rank {row['rank']}"
            pod, rank = pods.get(row["supervisor"], {}), str(row["tensor_rank"])
            why = pod.get("ranks", {}).get(rank, "its supervisor does not tell")
            restarts = pod.get("restarts", {}).get(rank, "")
            table.add_row(name, str(row["pid"]), _age(row["pid"]), str(restarts), row["address"], why or "yes")
            continue
        said = _answer_of(row) if row["address"] else {"reason": "starts"}
        pods[row["name"]] = said
        why = said["reason"]
        ready.append(why is None)
        well = f"yes, policy {said['policy']}" if "policy" in said else "yes"
        here = str(row["pid"] or ""), _age(row["pid"]), str(row.get("restarts", ""))
        address = (row["address"] or "").replace(f"unix://{folder}/", "unix:")  # a socket in the run folder
        table.add_row(row["name"], *here, address, why or well)
    return table, bool(ready) and all(ready)


def processes(folder: Path) -> list[dict[str, Any]]:
    """Returns the rows of `processes.json`; nothing where nothing runs."""
    try:
        return json.loads((folder / "processes.json").read_text())
    except (OSError, ValueError):
        return []


def doors() -> list[str]:
    """The gRPC addresses of the run here that runs, the last of them; none where none does."""
    try:
        folder = run_folder(None)
    except FailedPrecondition:
        return []
    rows = processes(folder) if runs_now(folder) else []
    return [row["address"] for row in rows if row["role"] == "endpoint" and row["address"]]


def _answer_of(row: dict[str, Any]) -> dict[str, Any]:
    """Returns the answer of a process's status port, or whether Redis answers; a missing one as its reason."""
    pid, status = row["pid"], row["status"]
    if pid is None:
        return {"reason": "is being started again"}
    try:
        if row["role"] == "redis":
            well = embedded_pool.answers(Path(row["address"].removeprefix("unix://")))
            said: dict[str, Any] = {"reason": None if well else "does not answer"}
        else:
            said = status_port.ask(status) if status else {"reason": None}
    except OSError as error:
        said = {"reason": str(error)}
    return said if _started(pid) is not None else {"reason": "has ended"}


def _age(pid: int | None) -> str:
    """Returns how long a process has run: in seconds, minutes or hours."""
    started = _started(pid) if pid is not None else None
    if started is None:
        return ""
    seconds = max(0, int(time.clock_gettime(time.CLOCK_BOOTTIME) - started))
    return f"{seconds} s" if seconds < 120 else f"{seconds // 60} min" if seconds < 7200 else f"{seconds // 3600} h"


def _started(pid: int) -> float | None:
    """Returns when a process began, in seconds since the machine's start. None: it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19]) / os.sysconf("SC_CLK_TCK")


def logs_of(folder: Path, service: str | None) -> list[Path]:
    """The logs of a run: of one process (`endpoint-0`), of one role (`endpoint`), or all. Raises FailedPrecondition.

    A worker's supervisor logs for its ranks too, so all three are names of one role."""
    if service in ("worker", "rank"):
        service = "supervisor"
    every = sorted((folder / "logs").glob("*.log"))
    found = [path for path in every if service is None or path.stem == service or path.stem.split("-")[0] == service]
    if not found:
        names = ", ".join(path.stem for path in every) or "none"
        raise FailedPrecondition(f"there is no log of {service} in {folder}; there is {names}")
    return found


def last_lines(logs: Sequence[Path], count: int) -> list[tuple[str, str]]:
    """The last lines of all logs, with the names of the processes, in the order of their times."""
    lines: list[tuple[str, str, str]] = []
    for path in logs:
        when = ""
        for line in path.read_text(errors="replace").splitlines():
            when = _time(line) or when  # a line of another form belongs to the one before
            lines.append((when, path.stem, line))
    lines.sort(key=lambda line: line[0])
    return [(name, line) for _, name, line in lines[-count:]] if count else []


def new_lines(logs: Sequence[Path]) -> Iterator[tuple[str, str]]:
    """Yields lines that are written from now on, as they come. Never ends."""
    with ExitStack() as opened:
        files = [(path.stem, opened.enter_context(path.open(errors="replace"))) for path in logs]
        for _, file in files:
            file.seek(0, 2)
        torn = dict.fromkeys((name for name, _ in files), "")
        while True:
            for name, file in files:
                if os.fstat(file.fileno()).st_size < file.tell():  # the log was rotated
                    file.seek(0)
                *whole, torn[name] = (torn[name] + file.read()).split("\n")
                yield from ((name, line) for line in whole)
            time.sleep(LOOK)


def readable(name: str, line: str) -> str:
    """A line of a log for a reader: its time, level, process and event, and its other fields."""
    try:
        fields = json.loads(line)
        moment, level, event = fields.pop("time"), fields.pop("level"), fields.pop("event")
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{name}: {line}"
    exception = fields.pop("exception", None)
    for known in ("service", "logger"):
        fields.pop(known, None)
    rest = " ".join(f"{key}={value}" for key, value in fields.items())
    text = f"{moment[11:23]} {level:<7} {name}: {event}" + (f"  {rest}" if rest else "")
    return f"{text}\n{exception}" if exception else text


def show(lines: Sequence[tuple[str, str]] | Iterator[tuple[str, str]], as_json: bool) -> None:
    """Prints lines until their end, or until their reader has left."""
    with suppress(BrokenPipeError):
        for name, line in lines:
            print(line if as_json else readable(name, line), flush=True)
        return
    sys.stderr.close()  # or Python would complain of the closed pipe at its end


def _time(line: str) -> str | None:
    with suppress(ValueError, KeyError, TypeError):
        return str(json.loads(line)["time"])
    return None
