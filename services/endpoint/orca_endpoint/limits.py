"""What strangers may cost an endpoint: counts and bytes that both doors share, and its descriptors."""

import logging
import resource
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from orca_common.errors import ErrorReason, ResourceExhausted

from .refusals import RETRY_AFTER
from .settings import EndpointSettings

RESERVED_DESCRIPTORS = 128  # for Redis, files and the status port: connections of clients may not take these

log = logging.getLogger(__name__)


class Held:
    """What one call holds of the shared bytes."""

    def __init__(self, limits: "Limits") -> None:
        self._limits, self._bytes = limits, 0

    def add(self, size: int) -> None:
        """Counts bytes of the call's body. Raises ResourceExhausted when all calls together hold too many."""
        self._limits.take(size)
        self._bytes += size

    def release(self) -> None:
        """The body is not needed any more. Once or more often."""
        if self._bytes:
            self._limits.take(-self._bytes)
            self._bytes = 0


class Limits:
    """Calls of each peer, and bytes of the bodies in memory."""

    def __init__(self, settings: EndpointSettings) -> None:
        self._peer_calls, self._body_bytes = settings.max_peer_calls, settings.max_body_bytes
        self._calls: Counter[str] = Counter()
        self._bytes = 0

    @contextmanager
    def call(self, peer: str) -> Iterator[Held]:
        """One call of a peer, until the block ends. Raises ResourceExhausted when the peer has too many."""
        if self._calls[peer] >= self._peer_calls:
            raise ResourceExhausted(
                f"this peer has {self._peer_calls} calls here already", RETRY_AFTER, reason=ErrorReason.ENDPOINT_FULL
            )
        self._calls[peer] += 1
        held = Held(self)
        try:
            yield held
        finally:
            held.release()
            self._calls[peer] -= 1
            if not self._calls[peer]:
                del self._calls[peer]

    def take(self, size: int) -> None:
        """Counts bytes; a negative size gives them back. Raises ResourceExhausted."""
        if size > 0 and self._bytes + size > self._body_bytes:
            raise ResourceExhausted(
                f"the requests that are being read have {self._body_bytes} bytes already",
                RETRY_AFTER,
                reason=ErrorReason.ENDPOINT_FULL,
            )
        self._bytes += size


def connections_allowed(wanted: int, doors: int = 2) -> int:
    """How many connections each of the doors may have: `wanted`, or what the limit of descriptors leaves.

    Raises this process's limit as far as it may.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = doors * wanted + RESERVED_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    allowed = max((soft - RESERVED_DESCRIPTORS) // doors, 1)
    log.warning("max_connections is cut to what the limit of descriptors leaves", extra={"connections": allowed})
    return allowed
