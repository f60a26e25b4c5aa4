"""Chooses the endpoint of the next call among several."""

import re
from collections.abc import Sequence

from .errors import InvalidArgument

HOST_AND_PORT = re.compile(r"(\[[0-9A-Fa-f:.%\w]+\]|[^\s:/\[\]]+):\d{1,5}")
SCHEMES = ("dns", "ipv4", "ipv6", "unix", "unix-abstract", "vsock", "xds")  # of gRPC's targets

SUSPECT = 5.0  # seconds for which an endpoint that failed is avoided while another one is left


class Addresses:
    """Goes round the addresses, past those that failed a moment ago.

    Any thread may use it without a lock: the worst that a race costs is one more try.
    """

    def __init__(self, targets: Sequence[str], start: int) -> None:
        """start: the position of the first address to pick; a random one spreads many clients over the list."""
        self.targets = tuple(targets)
        self._next = start
        self._suspect_until = [0.0] * len(self.targets)

    def pick(self, now: float) -> str:
        """The next address. When all failed a moment ago: the one whose failure is the oldest."""
        count = len(self.targets)
        order = [(self._next + step) % count for step in range(count)]
        chosen = next((n for n in order if self._suspect_until[n] <= now), None)
        if chosen is None:
            chosen = min(order, key=self._suspect_until.__getitem__)
        self._next = (chosen + 1) % count
        return self.targets[chosen]

    def failed(self, target: str, now: float) -> None:
        """Avoids an address for a while."""
        self._suspect_until[self.targets.index(target)] = now + SUSPECT


def targets_of(addresses: str | Sequence[str]) -> list[str]:
    """Returns one or several gRPC targets as a list. Raises InvalidArgument for an address that is not a target.

    gRPC itself would take "http://host:1" for a name to look up, and "host" for its port 443.
    """
    targets = [addresses] if isinstance(addresses, str) else list(addresses)
    if not targets:
        raise InvalidArgument("addresses: at least one is needed", "addresses")
    for target in targets:
        if problem := _problem(target):
            raise InvalidArgument(f"addresses: {target!r} {problem}", "addresses")
    return targets


def _problem(target: str) -> str:
    """Returns why an address is not a target; "" for a target."""
    if not isinstance(target, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        return f"is of type {type(target).__name__}; give text such as '127.0.0.1:50051'"
    scheme, colon, _ = target.partition(":")
    if colon and scheme.lower() in SCHEMES and not HOST_AND_PORT.fullmatch(target):
        return ""
    if "://" in target:
        return "is a URL; give the endpoint's gRPC port as host:port, such as '127.0.0.1:50051'"
    if HOST_AND_PORT.fullmatch(target):
        return ""
    if target.count(":") > 1:
        return "is no host:port; an IPv6 address stands in brackets, as in '[::1]:50051'"
    return "is no host:port, such as '127.0.0.1:50051'"
