"""The names by which a port may be called over HTTP, so that no page of another site reaches it through a browser.

A page may have its own name look up to 127.0.0.1 (DNS rebinding). The browser then calls a port there as if it were the
page's own site, and names the page's host in `Host`. An address there is no name, and so no such page.
"""

from collections.abc import Sequence
from ipaddress import ip_address

from .errors import echo

LOCAL = "localhost"
ANY = "*"


class Hosts:
    """The names of one port, as `Host` has them."""

    def __init__(self, listening: str, given: str = "", *, keyed: bool = False) -> None:
        """listening: the address of the port. given: further names, separated by commas; `*`: all names. keyed: callers
        have keys, which a browser does not send by itself.

        Where no names are given, they matter only on a loopback address and without keys: elsewhere a port may have
        any name, and any process that reaches it may call it without a browser.
        """
        self._names = frozenset(name.strip().lower() for name in given.split(",") if name.strip())
        self._all = ANY in self._names or not (self._names or (is_loopback(listening) and not keyed))

    def refusal(self, given: Sequence[str]) -> str | None:
        """Returns why a request with these `Host` headers is refused; None where it is not."""
        if self._all:
            return None
        for header in given:
            name = name_in(header)
            if not (name in self._names or name == LOCAL or name.endswith("." + LOCAL) or is_address(name)):
                return f"{echo(name)!r} is no name of this port; the setting host_names gives it further ones"
        return None


def name_in(header: str) -> str:
    """The name or the address of a `Host` header, without a port."""
    host = header.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].removesuffix(".")


def is_address(host: str) -> bool:
    """Whether it is an address, or nothing: HTTP/1.0 needs no `Host`, and browsers do not speak it."""
    try:
        return not host or bool(ip_address(host))
    except ValueError:
        return False


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it."""
    return host == LOCAL or (is_address(host) and host != "" and ip_address(host).is_loopback)
