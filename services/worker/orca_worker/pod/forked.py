"""A worker's pod of `orca serve`: forked from a process that has imported what its supervisor and its ranks need.

The pod's own fork server is forked from the supervisor, before that does anything else. So the ranks of all pods of a
machine share what was imported once. In a cluster a pod is a container, and begins as `python -m orca_worker`.
"""

import json
import os
import signal
import sys

from orca_common import environment

from ..processes import fork_server
from ..processes.beginning import Begun, pair
from ..processes.process import die_with_parent, name_process
from ..rank import app as rank
from ..settings import SupervisorSettings
from . import supervisor

NAME = "orca-supervisor"


def begin_here() -> Begun:
    """Forks this process's fork server from it, so nothing is left to import. In the fork server it never returns."""
    ours, its = pair()
    this = os.getpid()
    pid = os.fork()
    if pid:
        its.close()
        return Begun(pid, ours)
    ours.close()
    os.dup2(its.fileno(), 0)
    its.close()
    fork_server.run(this, rank.main)
    raise SystemExit(0)


def main(stack: int) -> None:
    """Becomes the supervisor of a pod. `stack`: the process that tells its environment, and whose end ends it."""
    told = sys.stdin.readline()  # comes when the stack knows the process, so it is the parent by then
    if not told:
        raise SystemExit(0)
    os.setsid()
    os.umask(0o077)  # prompts are in what it writes
    die_with_parent(stack)
    name_process(NAME)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # before it serves there is nothing to leave in order
    environment.take(json.loads(told))
    supervisor.main(SupervisorSettings.load([]), begin_here())
    sys.stderr.flush()
    os._exit(0)  # without the interpreter's own clean-up: of all that was imported for ranks it takes 0.4 s
