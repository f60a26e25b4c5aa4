"""Cancels the requests of streams that were left, for the client for threads."""

import queue
import sys
import threading
import time
import weakref
from contextlib import suppress
from functools import partial
from typing import Any

import grpc

from orca.v1.orca_pb2 import CancelRequest

from .channels import Channels
from .errors import OrcaError

Left = tuple[str, str, Any]  # request id, the address of its last call ("": any), the call or None


class Leaving:
    """A thread that cancels what was left.

    The garbage collector may leave a stream at any line of any thread, also while that thread holds a lock of gRPC.
    SimpleQueue.put may be called there; almost nothing else may.
    """

    def __init__(self, channels: Channels, timeout: float) -> None:
        """timeout: seconds for each Cancel. The thread starts with the first `start`."""
        self._channels, self._timeout = channels, timeout
        self._left: queue.SimpleQueue[Left | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    def start(self) -> None:
        """To be called before a stream can be left."""
        with self._starting:
            if self._thread is None:
                arguments = (self._channels, self._left, self._timeout)
                self._thread = threading.Thread(target=work, args=arguments, name="orca-leaving", daemon=True)
                self._thread.start()
                weakref.finalize(self, self._left.put, None)

    def add(self, request_id: str, target: str, call: Any) -> None:
        """Cancels a request, and then ends its call. Returns at once."""
        if not sys.is_finalizing():
            self._left.put((request_id, target, call))

    def close(self) -> None:
        """Waits until all have been cancelled, for the timeout at most."""
        if self._thread is not None:
            self._left.put(None)
            self._thread.join(self._timeout)


def work(channels: Channels, left: "queue.SimpleQueue[Left | None]", timeout: float) -> None:
    """The thread. None in the queue ends it."""
    running: set[Any] = set()  # calls of Cancel
    while (item := left.get()) is not None:
        request_id, target, call = item
        running = {cancelling for cancelling in running if not cancelling.done()}
        with suppress(OrcaError, ValueError):  # the client was closed, which has ended the call
            cancelling = channels.begin_cancel(target, CancelRequest(request_id=request_id), timeout)
            running.add(cancelling)
            cancelling.add_done_callback(partial(end, call))
    give_up = time.monotonic() + timeout
    for cancelling in running:
        with suppress(grpc.RpcError, grpc.FutureCancelledError, grpc.FutureTimeoutError):
            cancelling.result(max(0.0, give_up - time.monotonic()))


def end(call: Any, _: Any) -> None:
    """Ends a stream's call when its Cancel has ended, whatever the answer: else detach_grace ends the request."""
    if call is not None:
        call.cancel()
