"""What a rank and its supervisor ask of the operating system."""

import ctypes
import os
import signal
import socket

from orca_common.listening import cannot_listen

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Has the kernel kill this process when its parent ends, even by SIGKILL.

    Ends the process in silence if the parent has ended already: it has said why, if there was something to say.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        raise SystemExit(0)


def reserve_port(host: str, port: int) -> socket.socket:
    """A socket that is bound and never listens. It keeps a port for children, which bind it too, with SO_REUSEPORT.

    Raises Unavailable when the port cannot be had.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    reserved = socket.socket(family, kind, protocol)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        reserved.bind(address)
    except OSError as error:
        reserved.close()
        raise cannot_listen("rank_port", host, port, error) from None
    return reserved
