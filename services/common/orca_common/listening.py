"""Ports that services listen on: why one cannot be had, in a sentence that names the setting."""

import errno
import os
import socket

from .address import join_address
from .errors import Unavailable

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


def check_port(setting: str, host: str, port: int, shared: bool = False) -> None:
    """Raises Unavailable when a port cannot be had now. shared: a process of ours keeps it, by SO_REUSEPORT.

    gRPC itself would write why to standard error, in a form of its own, and raise without a reason.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family, reuse_port=shared).close()
    except OSError as error:
        raise cannot_listen(setting, host, port, error) from None
