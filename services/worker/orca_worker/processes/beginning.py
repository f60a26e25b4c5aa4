"""The beginning of a fork server, before its parent knows anything of what will be forked.

It imports next to nothing, so that a supervisor can begin its fork server first and import what itself needs meanwhile:
the fork server imports for longer than anything else of a start takes.
"""

import os
import socket
import sys
from collections.abc import Mapping
from typing import NamedTuple

from orca_common.environment import child_environment

# What libraries of a rank read when they are loaded, so it must be there before the fork server imports them.
ENVIRONMENT = {
    # A TCPStore looks up the name of each address that connects, for its log. When the name server's answer is lost, a
    # formation waits for the resolver's timeout: 5 s by default, 1 s with this.
    "RES_OPTIONS": "timeout:1 attempts:3",
    # NCCL's watchdog would end the process when a peer is lost, and its heartbeat monitor when an abort takes long, but
    # a survivor must keep its weights. Nor does either collect for a minute what other ranks did. (Not run.)
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    "TORCH_FR_BUFFER_SIZE": "0",
    # numpy's OpenBLAS starts its threads when it is loaded, and a process that forks must have one thread. Nothing here
    # multiplies with numpy.
    "OPENBLAS_NUM_THREADS": "1",
    # gRPC is imported before the fork, and first used after it. To be ready for forks costs it 2 us a message.
    "GRPC_ENABLE_FORK_SUPPORT": "0",
}
RANK, POD = "orca_worker.rank.app", "orca_worker.pod.forked"  # what forked processes become: their `main` is called
SERVICE = "orca_local.forked"


class Begun(NamedTuple):
    """A fork server: a child of this process, and this process's end of the socket between them."""

    pid: int
    connection: socket.socket


def pair() -> tuple[socket.socket, socket.socket]:
    """A socket of whole messages: the ends of a fork server's parent and of the fork server."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def begin(becomes: str = RANK, environment: Mapping[str, str] | None = None) -> Begun:
    """Begins a fork server of this process, which waits to be told what to import.

    It ends with this process, and before that when the connection is closed. Its standard input is its end of the
    connection. `environment`: besides this process's own.
    """
    ours, its = pair()
    command = [sys.executable, "-P", "-m", "orca_worker.processes.fork_server", str(os.getpid()), becomes]
    streams = [(os.POSIX_SPAWN_DUP2, its.fileno(), 0), (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]
    variables = child_environment({**ENVIRONMENT, **(environment or {})})
    with its:
        # Pods and services are not of the terminal from which `orca serve` was called: Ctrl-C reaches that alone.
        pid = os.posix_spawn(command[0], command, variables, file_actions=streams, setsid=becomes != RANK)
    return Begun(pid, ours)
