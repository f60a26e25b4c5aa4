"""Bounds of what strangers cost an endpoint: counts and bytes that both doors share, and its descriptors."""

import logging
import resource
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from orca_common.errors import ErrorReason, ResourceExhausted

from ..settings import EndpointSettings

RETRY_AFTER = 1.0  # seconds until a client should try again after RESOURCE_EXHAUSTED, when nothing better is known
RESERVED_DESCRIPTORS = 128  # for Redis, files and the status port: connections of clients may not take these
ROOM = 3 / 4  # of a limit: it counts as refusing until no more than this is used

log = logging.getLogger(__name__)


class Refusals:
    """Logs which limits refuse: one line when a limit begins, and one when it ends, whatever the number of calls."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()  # by the limit, and the host where it is one of hosts

    def refused(self, limit: str, most: int, host: str = "") -> None:
        """The limit has refused once more."""
        self._counts[limit, host] += 1
        if self._counts[limit, host] == 1:
            log.warning(f"refusing: {limit}", extra={"at_most": most, **({"host": host} if host else {})})

    def used(self, limit: str, most: int, now: int, host: str = "") -> None:
        """Ends the refusals of a limit of which no more than ROOM is used."""
        if self._counts and now <= most * ROOM and (count := self._counts.pop((limit, host), 0)):
            log.info(f"no longer refusing: {limit}", extra={"times": count, **({"host": host} if host else {})})


class Held:
    """The shared bytes that a call holds."""

    def __init__(self, limits: "Limits", host: str) -> None:
        self._limits, self._host, self._bytes = limits, host, 0

    def add(self, size: int) -> None:
        """Counts bytes of the call's body. Raises ResourceExhausted when all calls together, or those of the host, hold
        too many."""
        self._limits.take(self._host, size, self._bytes)
        self._bytes += size

    def release(self) -> None:
        """The body is not needed any more. Once or more often."""
        if self._bytes:
            self._limits.give_back(self._host, self._bytes)
            self._bytes = 0


class Limits:
    """Calls of each peer, calls of all, and bytes of the bodies in memory."""

    PEER, ALL, BYTES, HOST_BYTES = "calls of a host", "calls", "bytes of bodies", "bytes of a host's bodies"

    def __init__(self, settings: EndpointSettings) -> None:
        self._peer_calls, self._all_calls = settings.max_peer_calls, settings.max_open_calls
        self._body_bytes = settings.max_body_bytes
        self._calls: Counter[str] = Counter()
        self._host_bytes: Counter[str] = Counter()
        self._open = self._bytes = 0
        self.refusals = Refusals()

    @contextmanager
    def call(self, peer: str) -> Iterator[None]:
        """One call of a peer, until the block ends. Raises what `enter` raises."""
        self.enter(peer)
        try:
            yield
        finally:
            self.leave(peer)

    def enter(self, peer: str, room: int = 1) -> None:
        """A call of a peer begins. Raises ResourceExhausted when the peer, or all, have too many.

        room: multiplies the limits, for calls that must be possible when streams have filled them.
        """
        if self._calls[peer] >= room * self._peer_calls:
            self.refusals.refused(self.PEER, room * self._peer_calls, peer)
            raise full(f"this peer has {self._calls[peer]} calls here already")
        if self._open >= room * self._all_calls:
            self.refusals.refused(self.ALL, room * self._all_calls)
            raise full(f"{self._open} calls are open here already")
        self._calls[peer] += 1
        self._open += 1

    def leave(self, peer: str) -> None:
        """A call of a peer has ended."""
        self._calls[peer] -= 1
        self._open -= 1
        self.refusals.used(self.PEER, self._peer_calls, self._calls[peer], peer)
        self.refusals.used(self.ALL, self._all_calls, self._open)
        if not self._calls[peer]:
            del self._calls[peer]

    @contextmanager
    def body(self, host: str) -> Iterator[Held]:
        """Counts the body of a host's call against the shared bytes, until it is released or the block ends."""
        held = Held(self, host.strip("[]"))
        try:
            yield held
        finally:
            held.release()

    def take(self, host: str, size: int, of_one: int) -> None:
        """Counts bytes of a body, which has `of_one` already. Raises ResourceExhausted.

        A host with several bodies has no more than stays free for others: alone it has half of all, and with k others
        that take all that they may, a part of k + 2.
        """
        free = self._body_bytes - self._bytes - size
        if free < 0:
            self.refusals.refused(self.BYTES, self._body_bytes)
            raise full(f"the requests that are being read have {self._body_bytes} bytes already")
        if self._host_bytes[host] > of_one and self._host_bytes[host] + size > free:
            self.refusals.refused(self.HOST_BYTES, self._body_bytes // 2, host)
            raise full(f"the requests of this host that are being read have {self._host_bytes[host]} bytes already")
        self._bytes += size
        self._host_bytes[host] += size

    def give_back(self, host: str, size: int) -> None:
        self._bytes -= size
        self._host_bytes[host] -= size
        self.refusals.used(self.BYTES, self._body_bytes, self._bytes)
        self.refusals.used(self.HOST_BYTES, self._body_bytes // 2, self._host_bytes[host], host)
        if not self._host_bytes[host]:
            del self._host_bytes[host]


def full(sentence: str) -> ResourceExhausted:
    """The error of a call for which the endpoint has no room now."""
    return ResourceExhausted(sentence, RETRY_AFTER, reason=ErrorReason.ENDPOINT_FULL)


def connections_allowed(wanted: int, doors: int = 2) -> int:
    """The number of connections that each door may have: `wanted`, or what the limit of descriptors leaves.

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
