"""Calls of the operating system that a rank and its supervisor make."""

import ctypes
import os
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

# Of prctl.
PR_SET_PDEATHSIG, PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 1, 15, 36
MADV_DONTNEED = 4  # of madvise
_expecting: list[None] = []  # one for each orphan that is to be adopted


def _prctl(what: int, value: int | bytes) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(what, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({what})")


def die_with_parent(parent: int) -> None:
    """Has the kernel kill this process when its parent ends, however it ends.

    Ends the process in silence if the parent has ended already: it has said why, if there was something to say.
    """
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit(0)


@contextmanager
def adopting_orphans() -> Iterator[None]:
    """Meanwhile descendants of this process become its children when their parents end. Process 1 always has it so.

    Not for longer than needed: nobody waits for the end of an orphan that was not expected. In one thread.
    """
    _expecting.append(None)
    _prctl(PR_SET_CHILD_SUBREAPER, True)
    try:
        yield
    finally:
        _expecting.pop()
        _prctl(PR_SET_CHILD_SUBREAPER, bool(_expecting))


def name_process(name: str) -> None:
    """Names this process as `top` and `ps -o comm` show it: 15 characters at most."""
    _prctl(PR_SET_NAME, name.encode())


def threads() -> int:
    """Counts this process's threads, Python's and others."""
    return len(os.listdir("/proc/self/task"))


def unmap_files() -> None:
    """Unmaps the pages of files, of libraries above all, that this process does not write to and never has.

    A page that is touched again comes from the kernel's cache. For a process of one thread: another one might write
    between the look and the call. Does nothing where the kernel does not tell the pages of a mapping.
    """
    libc, size = ctypes.CDLL(None), ctypes.c_size_t
    with suppress(OSError), open("/proc/self/smaps") as maps:
        for begin, end in unwritten(maps):
            libc.madvise(size(begin), size(end - begin), MADV_DONTNEED)  # in vain for pages that are locked


def unwritten(maps: Iterable[str]) -> Iterator[tuple[int, int]]:
    """Reads lines of /proc/PID/smaps. Yields where files are mapped that the process may not write to, and of whose
    pages the kernel says that none is its own: what was relocated, and protected then, is nowhere else."""
    begin, end, of_a_file, unsaid = 0, 0, False, set[str]()  # unsaid: lines of a mapping that would count its own pages
    for line in maps:
        first, *words = line.split()
        if not first.endswith(":"):  # `7f12-7f34 r-xp 00001000 fe:00 4711 /usr/lib/libc.so.6`
            begin, end = (int(part, 16) for part in first.split("-"))
            of_a_file = words[0] in ("r-xp", "r--p") and words[3] != "0"
            unsaid = {"Anonymous:", "Swap:"}
        elif words[:1] == ["0"]:
            unsaid.discard(first)
        elif first == "VmFlags:" and of_a_file and not unsaid:
            yield begin, end


def exit_status(pid: int) -> int:
    """Reaps a child that has ended. Returns its status, or minus a signal's number."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def why_ended(code: int, out_of_memory: bool) -> str:
    """Why a child of a supervisor ended, in words. `out_of_memory`: the kernel has killed one of the pod meanwhile."""
    if code == -signal.SIGKILL and out_of_memory:
        return "its process was killed, because the pod has reached its memory limit"
    return f"its process ended with status {code}"
