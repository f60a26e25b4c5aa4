"""The fork server of a pod: it imports what ranks need, once, and forks each of them.

    python -m orca_worker.fork_server SUPERVISOR_PID

So a rank starts by a fork instead of an import of torch, and shares the pages of what was imported with the others for
as long as nobody writes to them. Nothing but imports happens before a fork: one thread, no CUDA, no gRPC in use.

Its standard input is a socket of whole messages. The supervisor's first message says what to import:
`{"modules": ["orca_worker.process_groups", ..], "log_level": "INFO"}`. The answer says how many seconds that took,
`{"warm": 1.2}`. Each message after it brings two descriptors, the standard input and output of a rank. The answer has
the rank's process, `{"pid": 4711}`.

A rank is the supervisor's own child, which hears of its end and whose death ends it; the death of the fork server ends
no rank. For the supervisor adopts orphans: a process in between forks the rank and ends.
"""

import gc

if __name__ == "__main__":
    # Until `service.run` of a rank, which freezes what was imported: a collection would write to each object, and so
    # make a copy of each page.
    gc.disable()

import json
import logging
import os
import signal
import socket
import sys
import time
from importlib import import_module

import uvloop  # noqa: F401  # `service.run` of each rank would import it

from orca_common import logs

from . import rank
from .process import die_with_parent, name_process, threads

log = logging.getLogger(__name__)

NAME = "orca-forks"
MESSAGE = 65536  # bytes


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
    """Imports what ranks need. Returns the seconds that it took."""
    began = time.monotonic()
    for module in told["modules"]:
        import_module(module)
    if (running := threads()) > 1:
        log.warning("%d threads run in the fork server after its imports: ranks may hang", running)
    return time.monotonic() - began


def serve(connection: socket.socket) -> tuple[int, int] | None:
    """Answers the supervisor until it is gone: None. In a forked rank: the descriptors of its standard streams."""
    told = connection.recv(MESSAGE)
    if not told:
        return None
    said = json.loads(told)
    logs.configure("orca-worker", said["log_level"])
    connection.send(json.dumps({"warm": warm(said)}).encode())
    while True:
        asked, streams, *_ = socket.recv_fds(connection, MESSAGE, 2)
        if not asked:
            return None
        pid = fork_orphan()
        if not pid:
            return streams[0], streams[1]
        for stream in streams:
            os.close(stream)
        connection.send(json.dumps({"pid": pid}).encode())


def main() -> None:
    supervisor = int(sys.argv[1])
    die_with_parent(supervisor)
    name_process(NAME)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the supervisor, which ends this process
    connection = socket.socket(fileno=sys.stdin.fileno())
    streams = serve(connection)
    if streams is None:
        return
    connection.detach()
    for stream, standard in zip(streams, (sys.stdin, sys.stdout), strict=True):
        os.dup2(stream, standard.fileno())
        os.close(stream)
    rank.main(supervisor)


if __name__ == "__main__":
    main()
