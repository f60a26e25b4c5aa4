"""The data plane between processes: torch.distributed, NCCL on GPUs and gloo on a CPU.

A rank is in up to four process groups, each of its own epoch, store prefix and purpose, so that no operation waits
behind one of another kind:

tensor      the tensor ranks of a stage: all-reduces, and the logits to tensor rank 0
upstream    a pair: this tensor rank of the stage before, and of this one; the hidden states go down it
downstream  the same pair, seen from its other end
tokens      the rank that samples, and the ranks of the first stage: for a scheduler that runs ahead

All are made in that order on every rank.

The GPU thread waits in these operations, and an abort wakes it: NCCL has one; gloo (torch 2.13) has none that wakes a
thread which waits for a frozen peer, neither abort() nor shutdown(), but it closes all sockets of a group in which a
receive was waited for too long. So gloo groups are left by a receive of nothing with a patience of a millisecond.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from .data_plane import PeerLost
from .partition import Place

log = logging.getLogger(__name__)

# Bounds of last resort: a master that waits no longer forms a new epoch, and that wakes everybody.
JOIN_TIMEOUT = timedelta(minutes=10)
WAIT_TIMEOUT = timedelta(hours=2)
NEVER_SENT = 99  # tag of a receive that nothing comes for
WILDCARDS = ("", "0.0.0.0", "::")

Group = Any  # ProcessGroupGloo or ProcessGroupNCCL; of both only what torch.distributed's C++ backends share is used


def open_store() -> TCPStore:
    """A store on a free port of all interfaces."""
    return TCPStore("localhost", 0, None, True, timeout=JOIN_TIMEOUT, wait_for_workers=False)


class ProcessGroups:
    """`DataPlane` over process groups. `host`: under which other ranks reach this one."""

    def __init__(
        self,
        place: Place,
        epoch: int,
        store: tuple[str, int],
        host: str,
        device: torch.device | None,
        returns_tokens: bool,
    ) -> None:
        self._place, self._epoch, self._store, self._host = place, epoch, store, host
        self._device = device or torch.device("cpu")
        self._is_gloo = self._device.type == "cpu"
        self.returns_tokens = returns_tokens
        self.sent_bytes = self.waited = 0
        self._lost: str | None = None  # why it does not work any more
        self._lock = threading.Lock()  # of `_groups` and `_lost`
        self._groups: dict[str, Group] = {}
        self._woken = threading.Event()  # of who joins: the groups are there, or it was aborted
        self._expected: dict[str, deque[tuple[Any, Tensor]]] = {"upstream": deque(), "tokens": deque()}  # (work, x)
        self._sends: deque[tuple[Any, Tensor]] = deque()  # gloo's, oldest first: each needs its tensor until it is out

    # Coming and going

    def join(self) -> None:
        """Connects in a thread of its own: that call knows no abort."""
        failures: list[Exception] = []

        def connect() -> None:
            try:
                self._connect()
            except Exception as error:
                failures.append(error)
            self._woken.set()

        threading.Thread(target=connect, name=f"join-{self._epoch}", daemon=True).start()
        self._woken.wait()
        self.check()
        if failures:
            raise self._lose(f"the process groups of epoch {self._epoch} cannot be formed: {failures[0]}")

    def _connect(self) -> None:
        place, groups = self._place, dict[str, Group]()
        store = TCPStore(*self._store, None, False, timeout=JOIN_TIMEOUT, wait_for_workers=False)

        def join(purpose: str, name: str, rank: int, size: int) -> None:
            if self._lost is None:
                groups[purpose] = self._new_group(purpose, PrefixStore(f"{self._epoch}/{name}", store), rank, size)

        tp, stage, rank = place.tensor_parallel, place.stage, place.tensor_rank
        if tp > 1:
            join("tensor", f"tensor/{stage}", rank, tp)
        if not place.is_first:
            join("upstream", f"pair/{stage - 1}/{rank}", 1, 2)
        if not place.is_last:
            join("downstream", f"pair/{stage}/{rank}", 0, 2)
        if self.returns_tokens and (place.is_first or place.samples):
            of_stage_0 = rank if place.pipeline_parallel == 1 else rank + 1  # with one stage the sampler is one of it
            join("tokens", "tokens", 0 if place.samples else of_stage_0, self._token_readers + 1)
        with self._lock:
            if self._lost is not None:
                return
            self._groups = groups

    @property
    def _token_readers(self) -> int:
        """Ranks of the first stage, but for the one that samples."""
        return self._place.tensor_parallel - (self._place.pipeline_parallel == 1)

    def _new_group(self, purpose: str, store: Store, rank: int, size: int) -> Group:
        """A group that has met. NCCL's ranks meet in their first operation, which knows no abort: it is done here, in a
        thread that may be left behind. (Not run: no GPU yet.)"""
        if not self._is_gloo:
            nccl: Any = dist.ProcessGroupNCCL
            options = nccl.Options()
            options._timeout = WAIT_TIMEOUT
            group, x = nccl(store, rank, size, options), torch.zeros(1, device=self._device)
            if purpose == "tensor":
                group.allreduce([x])
            elif rank:
                group.recv([x], 0, 0)
            else:
                for peer in range(1, size):
                    group.send([x], peer, 0)
            torch.cuda.synchronize(self._device)
            return group
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout, options._threads = WAIT_TIMEOUT, 1
        anywhere = self._host in WILDCARDS
        options._devices = [gloo.create_default_device() if anywhere else gloo.create_device(hostname=self._host)]
        return gloo(store, rank, size, options)

    def check(self) -> None:
        if self._lost is not None:
            raise PeerLost(self._lost)

    def abort(self, reason: str) -> None:
        with self._lock:
            if self._lost is not None:
                return
            self._lost = reason
            groups, self._groups = self._groups, {}
        self._woken.set()
        while groups:
            purpose, group = groups.popitem()
            # The thread has the last reference, and a destructor may wait for what is under way.
            threading.Thread(target=self._leave, args=[group], name=f"leave-{purpose}", daemon=True).start()

    def _leave(self, group: Group) -> None:
        """Wakes who waits in a group."""
        if not self._is_gloo:
            group.abort()
            return
        nothing, peer = torch.empty(1), int(group.rank() == 0)
        try:
            group.recv([nothing], peer, NEVER_SENT).wait(timedelta(milliseconds=1))
        except RuntimeError as error:
            log.debug("a group was left: %s", error)

    def _lose(self, reason: str) -> PeerLost:
        """The error to raise: this reason, or the one that came first."""
        self.abort(reason)
        assert self._lost is not None
        return PeerLost(self._lost)

    # Operations

    def all_reduce(self, x: Tensor) -> Tensor:
        tp = self._place.tensor_parallel
        if tp > 1:
            self.sent_bytes += 2 * (tp - 1) * x.nbytes // tp  # of a ring
            self._do("tensor", lambda group: group.allreduce([x]))
        return x

    def gather(self, x: Tensor, widths: list[int]) -> Tensor | None:
        place = self._place
        if place.tensor_parallel == 1:
            return x
        widest = max(widths)
        if x.shape[1] < widest:
            x = torch.nn.functional.pad(x, (0, widest - x.shape[1]))
        options = dist.GatherOptions()
        options.rootRank = 0
        if place.tensor_rank:
            self.sent_bytes += x.nbytes
            self._do("tensor", lambda group: group.gather([], [x], options))
            return None
        parts = [torch.empty_like(x) for _ in widths]
        self._do("tensor", lambda group: group.gather([parts], [x], options))
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], 1)

    def expect(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        if not self._place.is_first:
            self._expect("upstream", torch.empty(shape, dtype=dtype, device=self._device))

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        if self._place.is_first:
            return None
        if not self._expected["upstream"]:
            self.expect(shape, dtype)
        return self._receive("upstream")

    def send(self, x: Tensor) -> None:
        x = x.contiguous()
        self._start("downstream", x, lambda group: group.send([x], 1, 0))

    def send_tokens(self, token_ids: list[int]) -> None:
        x = torch.tensor(token_ids, dtype=torch.int32, device=self._device)
        for reader in range(1, self._token_readers + 1):
            self._start("tokens", x, lambda group, reader=reader: group.send([x], reader, 0))

    def expect_tokens(self, count: int) -> None:
        self._expect("tokens", torch.empty(count, dtype=torch.int32, device=self._device))

    def receive_tokens(self) -> list[int]:
        token_ids = self._receive("tokens").tolist()
        self.check()  # an abort ends NCCL's operations without an error
        return token_ids

    def _expect(self, purpose: str, x: Tensor) -> None:
        """Begins to receive x, with gloo: its sender waits for this, and then x comes without this rank's doing. NCCL's
        receive is a kernel that spins until x is there; what the GPU does first must not wait behind it."""
        work = self._begin_receive(purpose, x) if self._is_gloo else None
        self._expected[purpose].append((work, x))

    def _begin_receive(self, purpose: str, x: Tensor) -> Any:
        return self._begin(purpose, lambda group: group.recv([x], 0, 0))

    def _receive(self, purpose: str) -> Tensor:
        """Ends the receive that was expected first."""
        work, x = self._expected[purpose].popleft()
        began = time.monotonic_ns()
        self._end(purpose, work or self._begin_receive(purpose, x))
        self.waited += time.monotonic_ns() - began
        return x

    def _start(self, purpose: str, x: Tensor, operation: Callable[[Group], Any]) -> None:
        """An operation that sends x, without waiting for it."""
        self.sent_bytes += x.nbytes
        work = self._begin(purpose, operation)
        if self._is_gloo:
            self._sends.append((work, x))
            if len(self._sends) > self._most_sends:
                self._end(purpose, self._sends.popleft()[0])

    @property
    def _most_sends(self) -> int:
        """Sends that may be under way. An older one has been received: its iteration is not in flight any more."""
        return (self._place.pipeline_parallel + 2) * (self._token_readers if self._place.samples else 1)

    def _do(self, purpose: str, operation: Callable[[Group], Any]) -> None:
        """An operation, and its end: on a GPU the end is its place in the stream."""
        self._end(purpose, self._begin(purpose, operation))

    def _begin(self, purpose: str, operation: Callable[[Group], Any]) -> Any:
        with self._lock:
            group = self._groups.get(purpose)
        if group is None:
            self.check()
            raise AssertionError(f"no group {purpose} at {self._place}")
        try:
            return operation(group)
        except RuntimeError as error:
            raise self._lose(f"a {purpose} operation failed: {error}") from None

    def _end(self, purpose: str, work: Any) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise self._lose(f"a {purpose} operation failed: {error}") from None
