"""What a rank and its supervisor ask of the operating system."""

import ctypes
import os
import signal

# Of prctl.
PR_SET_PDEATHSIG, PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 1, 15, 36


def _prctl(what: int, value: int | bytes) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(what, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({what})")


def die_with_parent(parent: int) -> None:
    """Has the kernel kill this process when its parent ends, even by SIGKILL.

    Ends the process in silence if the parent has ended already: it has said why, if there was something to say.
    """
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit(0)


def adopt_orphans(adopts: bool = True) -> None:
    """Makes descendants of this process its children when their parents end. Process 1 has no choice."""
    _prctl(PR_SET_CHILD_SUBREAPER, adopts)


def name_process(name: str) -> None:
    """Names this process as `top` and `ps -o comm` show it: 15 characters at most."""
    _prctl(PR_SET_NAME, name.encode())


def threads() -> int:
    """How many threads this process has, Python's and others."""
    return len(os.listdir("/proc/self/task"))


def why_ended(code: int, out_of_memory: bool) -> str:
    """Why a child of a supervisor ended, in words. `out_of_memory`: the kernel has killed one of the pod meanwhile."""
    if code == -signal.SIGKILL and out_of_memory:
        return "its process was killed, because the pod has reached its memory limit"
    return f"its process ended with status {code}"
