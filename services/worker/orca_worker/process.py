"""What a rank and its supervisor ask of the operating system."""

import ctypes
import os
import signal
import socket

PR_SET_PDEATHSIG = 1

# What torch.distributed needs to find in a rank's environment, when the process begins.
TORCH_DISTRIBUTED = {
    # Its TCPStore asks for the name of each address that it meets, to log it. A lost answer of the name server costs a
    # formation the patience of the resolver: 5 s as it comes, 1 s with this.
    "RES_OPTIONS": "timeout:1 attempts:3",
    # NCCL's watchdog would end the process when a peer is lost: a survivor keeps its weights. (Not run: no GPU yet.)
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
}


def die_with_parent(parent: int) -> None:
    """Lets the kernel kill this process when its parent ends, even by SIGKILL. Raises SystemExit if it has ended."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        raise SystemExit(f"the supervisor, process {parent}, has ended")


def reserve_port(host: str, port: int) -> socket.socket:
    """A socket that is bound and never listens: it keeps a port for children, which bind it again with SO_REUSEPORT."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    reserved = socket.socket(family, kind, protocol)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    reserved.bind(address)
    return reserved


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
