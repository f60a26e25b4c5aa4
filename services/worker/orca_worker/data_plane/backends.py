"""The two kinds of process groups: NCCL's on GPUs, gloo's on a CPU. How each comes and goes, and how it waits.

The GPU thread waits in operations, and an abort must wake it. NCCL's abort does. In gloo (torch 2.13) neither abort()
nor shutdown() wakes a thread that waits for a frozen peer. But gloo closes all sockets of a group when a receive in it
times out. So we leave a gloo group by a receive of nothing with a timeout of a millisecond.

gloo writes into a socket while it holds the lock of its pair. If the peer that this wakes takes the writer's core, the
writer's own loop has the answer to read, cannot have the lock, and asks epoll again and again until the writer runs on.
So gloo's threads preempt no other thread. On two cores (Zen 4) beside a load of 4, 1,000 all-reduces of two ranks took
3.2 to 6.9 s, and 1.4 to 1.9 s of system time of each rank; now 0.6 to 2.0 and 0.2 to 0.4.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

log = logging.getLogger(__name__)

# A bound of last resort. Before it passes, the master forms a new epoch, which wakes who waits in the old one.
WAIT_TIMEOUT = timedelta(hours=2)
NEVER_SENT = 99  # tag of a receive to which no send belongs
WILDCARDS = ("", "0.0.0.0", "::")

Group = Any  # ProcessGroupGloo or ProcessGroupNCCL; only what torch.distributed's C++ backends share is used


class Backend(Protocol):
    """A kind of process groups, as one rank makes them."""

    device: torch.device  # its tensors are there
    # Operations run in streams of the device: a wait for one holds up the device and not the host, and an abort ends it
    # without an error, with anything in its tensors.
    in_streams: bool

    def group(self, store: Store, rank: int, size: int) -> Group:
        """A group, whose ranks may meet here or only in `meet`."""

    def meet(self, group: Group, rank: int, size: int, sums: bool) -> None:
        """Returns when all ranks of a group have joined it. sums: it is for all-reduces, not for sends from rank 0."""

    def leave(self, group: Group) -> None:
        """Wakes the threads that wait in a group."""


@contextmanager
def without_preemption() -> Iterator[None]:
    """Threads that begin meanwhile are those of a batch job: they do not take the core of a thread that wakes them."""
    changed = False
    with suppress(OSError):  # a sandbox may forbid it
        if os.sched_getscheduler(0) == os.SCHED_OTHER:  # and no other one, which an operator has chosen
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
            changed = True
    try:
        yield
    finally:
        if changed:
            with suppress(OSError):
                os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def first_operation(group: Group, x: Tensor, rank: int, size: int, sums: bool) -> None:
    """Runs an operation of the kind that a group is for, in which its ranks meet."""
    if sums:
        work = [group.allreduce([x])]
    elif rank:
        work = [group.recv([x], 0, 0)]
    else:
        work = [group.send([x], peer, 0) for peer in range(1, size)]
    for each in work:
        each.wait()


class Nccl:
    """`Backend` of a GPU. **Not run on a GPU yet.**"""

    in_streams = True

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def group(self, store: Store, rank: int, size: int) -> Group:
        nccl: Any = dist.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = WAIT_TIMEOUT
        return nccl(store, rank, size, options)

    def meet(self, group: Group, rank: int, size: int, sums: bool) -> None:
        """NCCL's ranks meet in their first operation.

        We wait for that alone, and not for the whole device: a kernel that an earlier epoch has left may spin on.
        """
        with torch.cuda.device(self.device):  # a new thread begins with GPU 0
            first_operation(group, torch.zeros(1, device=self.device), rank, size, sums)
            met = torch.cuda.Event()
            met.record()
        met.synchronize()

    def leave(self, group: Group) -> None:
        group.abort()


class Gloo:
    """`Backend` of a CPU. `host`: where other ranks reach this one."""

    in_streams = False
    device = torch.device("cpu")

    def __init__(self, host: str) -> None:
        self._host = host

    def group(self, store: Store, rank: int, size: int) -> Group:
        """Returns when all ranks have joined."""
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout, options._threads = WAIT_TIMEOUT, 1
        anywhere = self._host in WILDCARDS
        with without_preemption():
            options._devices = [gloo.create_default_device() if anywhere else gloo.create_device(hostname=self._host)]
            return gloo(store, rank, size, options)

    def meet(self, group: Group, rank: int, size: int, sums: bool) -> None:
        """Does nothing: gloo's ranks met when the group was made."""

    def leave(self, group: Group) -> None:
        nothing, peer = torch.empty(1), int(group.rank() == 0)
        try:
            group.recv([nothing], peer, NEVER_SENT).wait(timedelta(milliseconds=1))
        except RuntimeError as error:
            log.debug("a group was left: %s", error)
