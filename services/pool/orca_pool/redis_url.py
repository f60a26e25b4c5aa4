"""Reads a URL of the pool's Redis: the servers that are asked first, and behind Sentinels the primary's service."""

import re
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

SENTINEL = "+sentinel"
REDIS_PORT, SENTINEL_PORT = 6379, 26379

# urlsplit knows one host: in a list it refuses [::1], or lets it pass, by Python's patch version.
URL = re.compile(r"([^:/?#]+)://(?:([^/?#]*)@)?([^/?#]*)/?([^?#]*)(?:\?([^#]*))?")

Address = tuple[str, int]


class RedisUrl(NamedTuple):
    """A URL in its parts.

    servers: a Redis or a node of a cluster, or the Sentinels. login: as it stands there, with its %-escapes.
    """

    scheme: str
    login: str
    servers: list[Address]
    path: str
    query: str

    @property
    def of_sentinels(self) -> bool:
        return self.scheme.endswith(SENTINEL)


def parse(url: str) -> RedisUrl:
    """Raises ValueError, with a sentence, when a server is no HOST:PORT."""
    found = URL.match(url)
    if found is None:
        raise ValueError("is no URL, as redis://HOST:PORT/DB")
    scheme, login, hosts, path, query = found.groups("")
    port = SENTINEL_PORT if scheme.endswith(SENTINEL) else REDIS_PORT
    servers = [_address(host, number, port) for number, host in enumerate(hosts.split(","), 1)]
    return RedisUrl(scheme, login, servers, unquote(path), query)


def _address(text: str, number: int, usual: int) -> Address:
    try:
        parts = urlsplit(f"//{text}")
        port = parts.port
    except ValueError:  # the sentence does not say what stands there: it may be a password that has a slash
        why = f"server {number} of it is no HOST:PORT; an IPv6 address stands in brackets, [::1]:{usual}"
        raise ValueError(why) from None
    return unquote(parts.hostname or "127.0.0.1"), usual if port is None else port
