"""Checks what ranks and supervisors answer before anything believes it: one that is wrong must not end its scheduler.

`master/reports.py` does the same for the reports of iterations.
"""

from collections.abc import Iterable

from orca.v1 import worker_pb2 as pb
from orca_common.address import split_address

LARGEST = 1 << 52  # of epochs and iterations: twice it is exact in Redis's Lua
MOST_SLOTS = 1 << 26  # of an engine; the core has a number for each block of them
LONGEST = 300  # characters of a name
MOST_WORDS = 64  # of what a model can
PORTS = 1 << 16


def problem_of_hello(hello: pb.HelloResponse) -> str | None:
    """Returns the end of a sentence about a wrong answer to a greeting, None for a right one."""
    for name in ("epoch", "iteration"):
        if getattr(hello, name) > LARGEST:
            return f"{name} {getattr(hello, name)}, which no pool gives"
    if hello.slots > MOST_SLOTS:
        return f"{hello.slots} slots, and an engine has {MOST_SLOTS} at most"
    if len(hello.can) > MOST_WORDS:
        return f"{len(hello.can)} words of what it can"
    names = (hello.incarnation, hello.host, hello.model_digest, hello.weights, hello.blocks.address, *hello.can)
    if (length := max(map(len, names))) > LONGEST:
        return f"a name of {length} characters"
    return None


def problem_of_table(entries: Iterable[pb.RankEntry]) -> str | None:
    """The same about a supervisor's table of ranks."""
    seen = set[int]()
    for entry in entries:
        if entry.local_rank in seen:
            return f"rank {entry.local_rank} twice"
        seen.add(entry.local_rank)
        if len(entry.address) > LONGEST:
            return f"an address of {len(entry.address)} characters"
        try:
            host, port = split_address(entry.address)
        except ValueError:
            host, port = "", 0
        if not host.isprintable() or not host or not 0 < port < PORTS:
            return f"the address {entry.address!r}"
    return None
