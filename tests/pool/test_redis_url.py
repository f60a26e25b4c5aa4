"""What a URL of the pool's Redis is read as."""

import pytest

from orca_common.errors import FailedPrecondition
from orca_pool.link import Link
from orca_pool.redis_url import Address, parse


@pytest.mark.parametrize(
    ("url", "servers"),
    [
        ("redis://one/0", [("one", 6379)]),
        ("rediss://user:p%40ss@one:7/0?db=1", [("one", 7)]),
        ("redis:///0", [("127.0.0.1", 6379)]),
        ("redis://[fd00::1]", [("fd00::1", 6379)]),
        ("redis+sentinel://one,two:7/orca", [("one", 26379), ("two", 7)]),
        ("redis+sentinel://[::1]:26379/orca/0", [("::1", 26379)]),
        ("redis+sentinel://[::1],[::2]/orca", [("::1", 26379), ("::2", 26379)]),
        ("rediss+sentinel://:word@one,[fd00::1]:7/orca", [("one", 26379), ("fd00::1", 7)]),
    ],
)
def test_the_servers_of_a_url(url: str, servers: list[Address]) -> None:
    assert parse(url).servers == servers


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("redis+sentinel://one,two:x/orca", "server 2 of it is no HOST:PORT; an IPv6 address stands in brackets"),
        ("redis+sentinel://::1/orca", "server 1 of it is no HOST:PORT"),
        ("redis+sentinel://one:70000/orca", "server 1 of it is no HOST:PORT"),
        ("redis+sentinel://[::1/orca", "server 1 of it is no HOST:PORT"),
        ("redis+sentinel://me:sec/ret@one/orca", "server 1 of it is no HOST:PORT"),
        ("redis+sentinel://one", "redis+sentinel://HOST:PORT,HOST:PORT/SERVICE/DB: the name of the service is missing"),
        ("one:6379", "is no URL, as redis://HOST:PORT/DB"),
    ],
)
def test_what_is_refused(url: str, sentence: str) -> None:
    """The sentence names the setting, and shows no part of a password."""
    with pytest.raises(FailedPrecondition) as raised:
        Link(url)
    assert str(raised.value).startswith(f"redis_url: {sentence}")
    assert "sec" not in str(raised.value)
