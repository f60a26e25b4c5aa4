"""Fork servers, forked from one that has already imported what all those of a test process import.

A stack begins two, and each imports for a second or three, most of a start's processor time. These are what `begin` of
`orca_worker.processes.beginning` makes; only their imports were done before. Those of pods and of ranks, which all have
torch, are forked from one.
"""

import atexit
import json
import os
import socket
import sys
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path

from orca_common.environment import child_environment
from orca_worker.processes import fork_server
from orca_worker.processes.beginning import ENVIRONMENT, POD, RANK, SERVICE, Begun, begin, pair
from orca_worker.processes.process import adopting_orphans

HERE = Path(__file__).parent
LOADED = ("LD_", "PYTHON", "MALLOC_", "GLIBC_")  # begin the names of variables that a process reads when it begins
MESSAGE = 65536  # bytes


def modules(of_services: bool) -> list[str]:
    """The modules that fork servers of services, or of pods and ranks, import."""
    from orca_common.checkpoint import read_checkpoint
    from orca_local.forked import app_of
    from orca_local.stack import DEMO_MODEL
    from orca_worker.models.families import modules_of

    if of_services:
        return [SERVICE, app_of("endpoint"), app_of("scheduler")]
    return [POD, RANK, *modules_of(read_checkpoint(DEMO_MODEL))]


@cache
def warm(of_services: bool, process: int) -> socket.socket:
    """The connection to a process that has imported what such fork servers import. It ends with `process`."""
    path = filter(None, [str(HERE), os.environ.get("PYTHONPATH")])  # a run of mutations has its packages there
    begun = begin(Path(__file__).stem, {"PYTHONPATH": os.pathsep.join(path)})
    atexit.register(begun.connection.close)
    with open(os.devnull, "w") as nowhere:
        said = {"modules": modules(of_services), "log_level": "INFO"}
        socket.send_fds(begun.connection, [json.dumps(said).encode()], [nowhere.fileno()])
    assert begun.connection.recv(MESSAGE), "it could not import"
    return begun.connection


def begin_warm(becomes: str = RANK, environment: Mapping[str, str] | None = None) -> Begun:
    """As `orca_worker.processes.beginning.begin`."""
    if any(name.startswith(LOADED) for name in environment or ()):
        return begin(becomes, environment)
    connection, (ours, its) = warm(becomes == SERVICE, os.getpid()), pair()
    with its, open(os.devnull, "w") as nowhere, adopting_orphans():
        try:
            socket.send_fds(connection, [b"{}"], [its.fileno(), nowhere.fileno(), nowhere.fileno()])
            answer = connection.recv(MESSAGE)
        except OSError:
            answer = b""
    if not answer:  # it has ended: with the thread that began it, or it was killed
        ours.close()
        connection.close()
        warm.cache_clear()
        return begin_warm(becomes, environment)
    variables = child_environment({**ENVIRONMENT, **(environment or {})})
    ours.send(json.dumps({"becomes": becomes, "environment": variables}).encode())
    return Begun(json.loads(answer)["pid"], ours)


def main(parent: int) -> None:
    """Becomes a fork server of a stack."""
    with socket.socket(fileno=os.dup(sys.stdin.fileno())) as connection:
        said = json.loads(connection.recv(MESSAGE))
    if said["becomes"] != RANK:
        os.setsid()
    os.environ.clear()
    os.environ.update(said["environment"])
    become: Callable[[int], None] = import_module(said["becomes"]).main
    fork_server.run(parent, become)
