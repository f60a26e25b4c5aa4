"""The data plane between processes, over torch.distributed: NCCL on GPUs, gloo on a CPU.

In each epoch a rank is in up to five process groups, one for each purpose, so that no operation waits for one of
another kind:

tensor      the tensor ranks of a stage: all-reduces, and the logits to tensor rank 0
upstream    a pair, this tensor rank of the stage before and of this stage: the hidden states that come
downstream  a pair, this tensor rank of this stage and of the next one: the hidden states that go
encoded     a pair, this tensor rank of the last stage and of the first: the output of an encoder that goes back
tokens      the rank that samples and the ranks of the first stage: for a scheduler that runs ahead

Every rank joins its groups in this order. `backends.py` has what NCCL and gloo do differently.
"""

from __future__ import annotations

import encodings.idna  # noqa: F401  # the first address of a socket would load it, while an epoch forms
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

from ..partition import Place
from .backends import WILDCARDS, Backend, Group
from .plane import PeerLost

JOIN_TIMEOUT = timedelta(minutes=10)  # a bound of last resort: before it passes, the master forms a new epoch


def open_store(host: str) -> TCPStore:
    """A store on a free port of this address alone.

    A TCPStore that is told a host listens on all interfaces nevertheless. So it is given a socket that listens already.
    """
    family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    listening = socket.create_server(address[:2], family=family, backlog=1024, dualstack_ipv6=host == "::")
    port = listening.getsockname()[1]
    own = "localhost" if host in WILDCARDS else host  # where this process reaches it itself
    return TCPStore(own, port, None, True, JOIN_TIMEOUT, wait_for_workers=False, master_listen_fd=listening.detach())


class ProcessGroups:
    """`DataPlane` over process groups. `returns_encoded`: the model has an encoder."""

    def __init__(
        self,
        place: Place,
        epoch: int,
        store: tuple[str, int],
        backend: Backend,
        returns_tokens: bool,
        returns_encoded: bool = False,
    ) -> None:
        self._place, self._epoch, self._store, self._backend = place, epoch, store, backend
        self.returns_tokens, self._returns_encoded = returns_tokens, returns_encoded and place.pipeline_parallel > 1
        self.sent_bytes = self.waited = 0
        self._lost: str | None = None  # why the plane no longer works
        self._lock = threading.Lock()  # guards `_groups` and `_lost`
        self._groups: dict[str, Group] = {}
        self._leaving: list[threading.Thread] = []
        self._woken = threading.Event()  # ends `join`: the groups are there, or the plane was aborted
        received = "upstream", "encoded", "tokens"
        self._expected: dict[str, deque[tuple[Any, Tensor]]] = {kind: deque() for kind in received}  # (work, x)
        # Of a host's groups, oldest first: a send needs its tensor until it ends. A device's stream keeps it itself.
        self._sends: deque[tuple[Any, Tensor]] = deque()

    # Coming and going

    def join(self) -> None:
        """Connects in a thread of its own, because connecting cannot be aborted."""
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
        place = self._place
        store = TCPStore(*self._store, None, False, timeout=JOIN_TIMEOUT, wait_for_workers=False)

        def join(purpose: str, name: str, rank: int, size: int) -> None:
            self.check()
            group = self._backend.group(PrefixStore(f"{self._epoch}/{name}", store), rank, size)
            self._keep(purpose, group)  # before its ranks meet, so that an abort reaches it
            self._backend.meet(group, rank, size, sums=purpose == "tensor")

        tp, stage, rank = place.tensor_parallel, place.stage, place.tensor_rank
        if tp > 1:
            join("tensor", f"tensor/{stage}", rank, tp)
        if not place.is_first:
            join("upstream", f"pair/{stage - 1}/{rank}", 1, 2)
        if not place.is_last:
            join("downstream", f"pair/{stage}/{rank}", 0, 2)
        if self._returns_encoded and (place.is_first or place.is_last):
            join("encoded", f"encoded/{rank}", int(place.is_first), 2)
        if self.returns_tokens and (place.is_first or place.samples):
            of_stage_0 = rank if place.pipeline_parallel == 1 else rank + 1  # with one stage, rank 0 is the sampler
            join("tokens", "tokens", 0 if place.samples else of_stage_0, self._token_readers + 1)

    @property
    def _token_readers(self) -> int:
        """The number of ranks of the first stage that do not sample."""
        return self._place.tensor_parallel - (self._place.pipeline_parallel == 1)

    def _keep(self, purpose: str, group: Group) -> None:
        """Raises PeerLost when the plane was aborted meanwhile."""
        with self._lock:
            self.check()
            self._groups[purpose] = group

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
            # The thread has the last reference to the group, whose destructor may wait for running operations. It is no
            # daemon: an interpreter that ends under a thread in torch aborts the process.
            leaving = threading.Thread(target=self._backend.leave, args=[group], name=f"leave-{purpose}")
            self._leaving.append(leaving)
            leaving.start()

    @property
    def left(self) -> bool:
        return not self._backend.in_streams or not any(thread.is_alive() for thread in self._leaving)

    def _lose(self, reason: str) -> PeerLost:
        """Aborts, and returns the error to raise. If the plane was lost before, the first reason counts."""
        self.abort(reason)
        assert self._lost is not None
        return PeerLost(self._lost)

    # Operations

    def all_reduce(self, x: Tensor) -> Tensor:
        tp = self._place.tensor_parallel
        if tp > 2 and not self._backend.in_streams:
            # A ring adds in an order that depends on where in x an element lies, so on the rest of the batch. Two
            # numbers have one order. (On a device the order is the library's: with three and more GPUs a request's last
            # bits are not those that it has alone.)
            self.sent_bytes += (tp - 1) * x.nbytes
            parts = [torch.empty_like(x) for _ in range(tp)]
            self._do("tensor", lambda group: group.allgather([parts], [x]))
            for part in parts[1:]:
                parts[0] += part
            return parts[0]
        if tp > 1:
            self.sent_bytes += 2 * (tp - 1) * x.nbytes // tp  # as in a ring
            self._do("tensor", lambda group: group.allreduce([x]))
        return x

    def gather(self, x: Tensor, widths: list[int]) -> Tensor | None:
        place = self._place
        if place.tensor_parallel == 1:
            return x[:, : widths[0]]
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
            self._expect("upstream", torch.empty(shape, dtype=dtype, device=self._backend.device))

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        if self._place.is_first:
            return None
        if not self._expected["upstream"]:
            self.expect(shape, dtype)
        return self._receive("upstream")

    def send(self, x: Tensor) -> None:
        x = x.contiguous()
        self._start("downstream", x, lambda group: group.send([x], 1, 0))

    def return_encoded(self, x: Tensor) -> None:
        x = x.contiguous()
        self._start("encoded", x, lambda group: group.send([x], 1, 0))

    def receive_encoded(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        self._expect("encoded", torch.empty(shape, dtype=dtype, device=self._backend.device))
        return self._receive("encoded")

    def send_tokens(self, token_ids: list[int] | Tensor) -> None:
        x = torch.as_tensor(token_ids, dtype=torch.int32, device=self._backend.device)
        for reader in range(1, self._token_readers + 1):
            self._start("tokens", x, lambda group, reader=reader: group.send([x], reader, 0))

    def expect_tokens(self, count: int) -> None:
        self._expect("tokens", torch.empty(count, dtype=torch.int32, device=self._backend.device))

    def receive_tokens(self) -> Tensor:
        return self._receive("tokens")

    def _expect(self, purpose: str, x: Tensor) -> None:
        """Notes that x will be received. On a host the receive begins here: the sender waits for it, and then x arrives
        in the background. In a stream it spins until x is there, so it must not begin before the device's other work.
        """
        work = None if self._backend.in_streams else self._begin_receive(purpose, x)
        self._expected[purpose].append((work, x))

    def _begin_receive(self, purpose: str, x: Tensor) -> Any:
        return self._begin(purpose, lambda group: group.recv([x], 0, 0))

    def _receive(self, purpose: str) -> Tensor:
        """Waits for the oldest expected receive."""
        work, x = self._expected[purpose].popleft()
        began = time.monotonic_ns()
        self._end(purpose, work or self._begin_receive(purpose, x))
        self.waited += time.monotonic_ns() - began
        return x

    def _start(self, purpose: str, x: Tensor, operation: Callable[[Group], Any]) -> None:
        """Begins an operation that sends x, without waiting for it."""
        self.sent_bytes += x.nbytes
        work = self._begin(purpose, operation)
        if not self._backend.in_streams:
            self._sends.append((work, x))
            if len(self._sends) > self._most_sends:
                self._end(purpose, self._sends.popleft()[0])

    @property
    def _most_sends(self) -> int:
        """The number of sends that may be under way. Older ones have arrived: their iterations are not in flight."""
        an_iteration = (self._token_readers if self._place.samples else 1) + self._returns_encoded
        return (self._place.pipeline_parallel + 2) * an_iteration

    def _do(self, purpose: str, operation: Callable[[Group], Any]) -> None:
        """Runs an operation to its end. On a GPU it has only been put in the stream then."""
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
