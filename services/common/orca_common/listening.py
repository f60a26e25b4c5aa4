"""Ports that services listen on: why one cannot be had, in a sentence that names the setting."""

import errno
import os
import socket

from .address import join_address
from .errors import Unavailable

BACKLOG = 1024  # connections that wait to be accepted
NO_ADDRESS = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)  # the host is none of this machine's addresses, or no address


def cannot_listen(setting: str, host: str, port: int, error: OSError) -> Unavailable:
    """The refusal of a start whose port the system did not give."""
    known = error.errno is not None and error.errno > 0  # a name that cannot be resolved has a number below 0
    why = os.strerror(error.errno) if known and error.errno is not None else error.strerror
    if error.errno in NO_ADDRESS or not known:
        return Unavailable(f"host: cannot listen on {host} ({why}); give an address of this machine")
    if error.errno == errno.EACCES:
        return Unavailable(f"{setting}: cannot listen on {join_address(host, port)} ({why}); give one above 1023")
    return Unavailable(f"{setting}: cannot listen on {join_address(host, port)} ({why}); 0 takes a free one")


def listen(setting: str, host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A listening socket; port 0 takes a free one. shared: a process of ours keeps the port, by SO_REUSEPORT.

    Raises Unavailable when the port cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family, backlog=BACKLOG, reuse_port=shared)
    except OSError as error:
        raise cannot_listen(setting, host, port, error) from None
    # Connections inherit it. Asyncio sets it only where a socket names its protocol, and an answer of two segments then
    # waits 40 ms for a client's delayed acknowledgement. (uvloop sets it always.)
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


def check_port(setting: str, host: str, port: int, shared: bool = False) -> None:
    """Raises Unavailable when a port cannot be had now.

    grpcio's server would write why to standard error, in a form of its own, and raise without a reason.
    """
    listen(setting, host, port, shared=shared).close()


def reserve_port(setting: str, host: str, port: int = 0) -> socket.socket:
    """A socket that is bound and never listens. It keeps a port for children, which bind it too, with SO_REUSEPORT.

    While no child listens, a connection is refused, and no other program gets the port: neither to listen nor to
    connect from. Port 0 takes a free one. Raises Unavailable when the port cannot be had.
    """
    reserved = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of an earlier server may linger
    try:
        reserved.bind((host, port))
    except OSError as error:
        reserved.close()
        raise cannot_listen(setting, host, port, error) from None
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)  # with it, others could listen beside it
    return reserved
