"""Cancels the requests of streams that were left, for the client for threads."""

import queue
import sys
import threading
import weakref
from contextlib import suppress
from typing import Any

import grpc

from orca.v1.orca_pb2 import CancelRequest

from .channels import Channels
from .errors import OrcaError
from .tracing import Metadata

# Request id, the address of its last call ("": any), the call or None, the metadata of the request's calls.
Left = tuple[str, str, Any, Metadata]


class Leaving:
    """A thread that cancels what was left.

    The garbage collector may leave a stream at any line of any thread, also while that thread holds a lock of gRPC.
    SimpleQueue.put may be called there; almost nothing else may.
    """

    def __init__(self, channels: Channels, timeout: float) -> None:
        """timeout: seconds for each Cancel."""
        self._channels, self._timeout = channels, timeout
        self._left: queue.SimpleQueue[Left | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    def start(self) -> None:
        """Starts the thread, once. To be called before a stream can be left."""
        with self._starting:
            if self._thread is None:
                arguments = (self._channels, self._left, self._timeout)
                self._thread = threading.Thread(target=work, args=arguments, name="orca-leaving", daemon=True)
                self._thread.start()
                weakref.finalize(self, self._left.put, None)

    def add(self, request_id: str, target: str, call: Any, metadata: Metadata) -> None:
        """Cancels a request, and then ends its call. Returns at once. request_id: "" only ends the call."""
        if not sys.is_finalizing():
            self._left.put((request_id, target, call, metadata))

    def close(self) -> None:
        """Waits until all have been cancelled, for the timeout at most."""
        if self._thread is not None:
            self._left.put(None)
            self._thread.join(self._timeout)


def work(channels: Channels, left: "queue.SimpleQueue[Left | None]", timeout: float) -> None:
    """The thread. None in the queue ends it. A request that cannot be cancelled ends after its detach_grace."""
    while (item := left.get()) is not None:
        request_id, target, call, metadata = item
        if request_id:
            with suppress(OrcaError, ValueError, grpc.RpcError):  # ValueError: of a channel that was closed meanwhile
                request = CancelRequest(request_id=request_id)
                channels.call(target or channels.pick(), "Cancel", request, timeout, metadata)
        if call is not None:
            call.cancel()
