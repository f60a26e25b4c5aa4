"""The beginning of a pod's fork server, before the supervisor knows anything of its ranks.

It imports next to nothing, so that a supervisor can begin its fork server first and import what itself needs meanwhile:
the fork server imports for longer than anything else of a start takes.
"""

import os
import socket
import subprocess
import sys
from typing import NamedTuple

from orca_common.environment import child_environment

# What libraries of a rank read when they are loaded, so it must be there before the fork server imports them.
ENVIRONMENT = {
    # A TCPStore looks up the name of each address that connects, for its log. When the name server's answer is lost, a
    # formation waits for the resolver's timeout: 5 s by default, 1 s with this.
    "RES_OPTIONS": "timeout:1 attempts:3",
    # NCCL's watchdog would end the process when a peer is lost, but a survivor must keep its weights. (Not run: no GPU
    # was at hand.)
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    # numpy's OpenBLAS starts its threads when it is loaded, and a process that forks must have one thread. Nothing here
    # multiplies with numpy.
    "OPENBLAS_NUM_THREADS": "1",
    # gRPC is imported before the fork, and first used after it. To be ready for forks costs it 2 us a message.
    "GRPC_ENABLE_FORK_SUPPORT": "0",
}


class Begun(NamedTuple):
    """A fork server's process, and the supervisor's end of the socket between them."""

    process: subprocess.Popen[bytes]
    connection: socket.socket


def begin() -> Begun:
    """Begins the fork server of this process's pod. It waits to be told what to import.

    It ends with this process, and before that when the connection is closed. Its standard input is its end of the
    connection; what it prints goes to this process's standard error.
    """
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-P", "-m", "orca_worker.fork_server", str(os.getpid())]
    with its:
        return Begun(subprocess.Popen(command, env=child_environment(ENVIRONMENT), stdin=its.fileno(), stdout=2), ours)
