"""Runs a program that ends with its parent: `python -m orca_local.tether PARENT_PID PROGRAM ARGUMENT..`.

The kernel sends SIGTERM when the parent dies, however it dies. This is set here, in the child before its program
starts, because a function between fork and exec would run gRPC's fork handlers in a process that uses gRPC.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(sys.argv[1]):
        raise SystemExit("the parent has ended already")
    os.execvp(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
