"""A service of `orca serve`: forked from a process that has imported what endpoints and schedulers need.

So one that has died is there again without its imports, which took longer than all else of its start, and the services
of a machine share what was imported. In a cluster each is a container, and begins as `python -m orca_endpoint`.
"""

import json
import os
import signal
import sys
from importlib import import_module

from orca_common import environment
from orca_worker.processes.process import die_with_parent, name_process


def app_of(role: str) -> str:
    """Returns the module whose `main` is a service of this role."""
    return f"orca_{role}.app"


def main(stack: int) -> None:
    """Becomes a service. `stack`: the process that tells its role and its environment, and whose end ends it."""
    told = sys.stdin.readline()  # comes when the stack knows the process, so it is the parent by then
    if not told:
        raise SystemExit(0)
    role, app, arguments, settings = json.loads(told).values()
    os.setsid()
    os.umask(0o077)  # prompts are in what it writes
    die_with_parent(stack)
    name_process(f"orca-{role}")
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # before it serves there is nothing to leave in order
    environment.take(settings)
    sys.argv[1:] = arguments  # instead of the fork server's
    import_module(app).main()
