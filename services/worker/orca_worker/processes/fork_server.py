"""A fork server: it imports what processes need, once, and forks each of them.

    python -m orca_worker.processes.fork_server PARENT_PID orca_worker.rank.app

So a rank starts by a fork instead of an import of torch, and shares the pages of what was imported with the others for
as long as no process writes to them. Nothing but imports happens before a fork: one thread, no CUDA, no gRPC in use.

A pod has one, for its ranks. `orca serve` has one for the pods of the machine (`orca_worker.pod.forked`), and each of
these forks the one for its ranks from itself: torch is imported once a machine.

Its standard input is a socket of whole messages. The parent's first message says what to import,
`{"modules": ["orca_worker.data_plane.process_groups", ..], "log_level": "INFO"}`, and brings the descriptor of its log.
The answer says how many seconds that took, `{"warm": 1.2}`. Each message after it brings three descriptors, the
standard streams of a new process. The answer has the process, `{"pid": 4711}`.

A forked process is a child of the fork server's parent, which hears of its end and whose death ends it. The death of
the fork server ends nothing that it has forked. For the parent adopts orphans: a process in between forks the new one
and ends.
"""

import gc

if __name__ == "__main__":
    # Until `service.run` of a rank, which freezes what was imported: a collection would write to each object, and so
    # make a copy of each page.
    gc.disable()

import json
import logging
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from importlib import import_module

import uvloop  # noqa: F401  # `service.run` of each rank would import it

from orca_common import logs

from .process import die_with_parent, name_process, threads, unmap_files

log = logging.getLogger(__name__)

NAME = "orca-forks"
MESSAGE = 65536  # bytes
REST = 2.0  # seconds without a question after which the start of its parent is over


def fork_orphan() -> int:
    """Forks a process that is a child of the next ancestor that adopts orphans. Returns its pid here, 0 in the process.

    When it returns here, the process has been adopted. Raises OSError when the machine has no room for it.
    """
    reading, writing = os.pipe()
    between = os.fork()
    if not between:
        try:
            orphan = os.fork()
        except OSError as error:
            os.write(writing, str(-(error.errno or 1)).encode())
            os._exit(1)
        if orphan:
            os.write(writing, str(orphan).encode())
            os._exit(0)
        os.close(reading)
        os.close(writing)
        return 0
    os.close(writing)
    os.waitpid(between, 0)
    with open(reading, "rb") as answer:
        said = int(answer.read() or -1)  # nothing: it was killed
    if said < 0:
        raise OSError(-said, os.strerror(-said))
    return said


def warm(told: dict[str, list[str]]) -> float:
    """Imports what the processes need. Returns the seconds that it took."""
    began = time.monotonic()
    for module in told["modules"]:
        import_module(module)
    if (running := threads()) > 1:
        log.warning("%d threads run in the fork server after its imports: what it forks may hang", running)
    return time.monotonic() - began


def serve(connection: socket.socket) -> list[int] | None:
    """Answers the parent until it is gone: None. In a forked process: the descriptors of its standard streams."""
    told, streams, *_ = socket.recv_fds(connection, MESSAGE, 1)
    if not told:
        return None
    for standard in (1, 2):
        os.dup2(streams[0], standard)
    os.close(streams[0])
    said = json.loads(told)
    logs.configure("orca-worker", said["log_level"])
    connection.send(json.dumps({"warm": warm(said)}).encode())
    rests = False
    while True:
        if not rests and not select.select([connection], [], [], REST)[0]:
            # Of torch's libraries 200 MB were mapped as they were relocated. No process that is forked inherits that.
            rests = True
            unmap_files()
        asked, streams, *_ = socket.recv_fds(connection, MESSAGE, 3)
        if not asked:
            return None
        pid = fork_orphan()
        if not pid:
            return streams
        for stream in streams:
            os.close(stream)
        connection.send(json.dumps({"pid": pid}).encode())


def run(parent: int, become: Callable[[int], None]) -> None:
    """Answers the parent on standard input. In a forked process, calls `become` with the parent's pid."""
    die_with_parent(parent)
    name_process(NAME)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this process
    connection = socket.socket(fileno=sys.stdin.fileno())
    streams = serve(connection)
    if streams is None:
        return
    connection.detach()
    for standard, stream in enumerate(streams):
        os.dup2(stream, standard)
        os.close(stream)
    become(parent)


def main() -> None:
    become: Callable[[int], None] = import_module(sys.argv[2]).main
    run(int(sys.argv[1]), become)


if __name__ == "__main__":
    main()
