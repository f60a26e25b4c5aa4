"""Runs a program that ends with its parent: `python tether.py PARENT_PID PROGRAM ARGUMENT..`.

The kernel kills the program when the parent dies, however the parent dies. An orderly end would be in vain: all others
end, too, Redis among them, and a door that drains would be in the way of the next `orca serve` and its clients. A
process asks for that itself, before it becomes the program. Python could ask between fork and exec instead, but that
runs gRPC's fork handlers in a parent that uses gRPC.

What the program writes is for its owner alone, because prompts are in it.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):
        raise SystemExit("the parent has ended already")
    os.umask(0o077)
    os.execvp(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
