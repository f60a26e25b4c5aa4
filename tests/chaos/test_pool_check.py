"""What is left in a pool is found, each kind of it."""

import re
from collections.abc import Iterator

import pytest
from servers import RedisServer, redis_server

from orca_chaos import pool_check
from orca_pool import keys
from orca_pool.keys import Keys
from orca_pool.link import Link


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


LEFT = {
    "in `waiting`": ("ZADD", "waiting", 1, "a"),
    "in `due`": ("ZADD", "due", 1, "a"),
    "in `handed`": ("ZADD", "handed", 1, "a"),
    "claimed by engine-0": ("ZADD", "claimed:engine-0", 1, "a"),
    "request a is claimed": ("HSET", "request:a", "state", "claimed"),
    "request a has ended and is kept for ever": ("HSET", "request:a", "state", "ended"),
    "tokens:a is kept for ever": ("SET", "tokens:a", "x"),
    "tops:a is kept for ever": ("SET", "tops:a", "x"),
    "prompt:a is kept for ever": ("SET", "prompt:a", "x"),
    "`load` counts": ("HSET", "load", "tokens", 3),
    "delivery:ep-1 is left": ("XADD", "delivery:ep-1", "*", "n", 1),
    "endpoint:ep-1 is left": ("HSET", "endpoint:ep-1", "entries", 1),
    "engine:engine-1 is left": ("HSET", "engine:engine-1", "term", 1),
    "control:engine-1 is left": ("XADD", "control:engine-1", "*", "n", 1),
    "leases:x: .* knows this key": ("SET", "leases:x", "x"),
    "nobody knows this key": ("SET", "secret:a", "x"),
    "engines: .* instead of 1": ("ZADD", "engines", 1, "engine-1"),
    "calls of 1 dead endpoints": ("SADD", "orphans", "ep-9"),
    "calls:ep-0 is left": ("SADD", "calls:ep-0", "a"),
    "listeners:engine-0 is left": ("HSET", "listeners:engine-0", 1, "1 ep-0"),
    "request a is gone, and marks a prompt": ("HSET", "prefixes", "key", "1a"),
    "has:engine-1 is left": ("HSET", "has:engine-1", 1, "+"),
    "uses:b is left": ("SADD", "uses:b", "a"),
    "endpoints: 2 are registered instead of 1": ("ZADD", "endpoints", 1, "ep-1"),
}


MAKE = {
    "hash": ("HSET", "f", "v"),
    "sorted set": ("ZADD", 1, "m"),
    "set": ("SADD", "m"),
    "string": ("SET", "v"),
    "stream": ("XADD", "*", "f", "v"),
}


async def test_each_kind_of_key_is_known(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the table of keys: none of them is a stranger's, whatever the release uses."""
    monkeypatch.setattr(pool_check, "SETTLED", 0)
    prefix, link, names = Keys("p").prefix, Link(server.url), list[str]()
    await link.command("FLUSHALL")
    rows = re.findall(r"^\| (\S[^|]*\S) +\| (hash|sorted set|set|string|stream) ", keys.__doc__ or "", re.MULTILINE)
    for families, kind in rows:
        for family in families.split(", "):
            names.append(family)
            command, *rest = MAKE[kind]
            await link.command(command, prefix + re.sub(r":[A-Z]+$", ":x", family), *rest)
    assert len(names) > 25
    found = await pool_check.leftovers(server.url, "p", engines=1, endpoints=1)
    await link.close()
    assert not [one for one in found if "nobody knows" in one]


@pytest.mark.parametrize("sentence", ["", *LEFT])
async def test_leftovers(server: RedisServer, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_check, "SETTLED", 0)
    prefix, link = Keys("p").prefix, Link(server.url)
    await link.command("FLUSHALL")
    for command in (
        ("HSET", "pool", "largest", 64),
        ("ZADD", "engines", 64, "engine-0"),
        ("HSET", "engine:engine-0", "term", 1),
        ("ZADD", "endpoints", 1, "ep-0"),
        ("HSET", "endpoint:ep-0", "entries", 1),
        ("SET", "tokens:b", "x"),
        ("ZADD", "ended", 1, "b"),
    ):
        await link.command(command[0], prefix + str(command[1]), *command[2:])
    if sentence:
        name, key, *rest = LEFT[sentence]
        await link.command(str(name), f"{prefix}{key}", *rest)
    found = await pool_check.leftovers(server.url, "p", engines=1, endpoints=1)
    await link.close()
    if sentence:
        [only] = found
        assert re.search(sentence, only)
    else:
        assert found == []
