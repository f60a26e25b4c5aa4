"""Looks for leftovers in a request pool whose requests have all ended: claims, places in the queue, keys."""

import asyncio
import time

from orca_pool.keys import Keys
from orca_pool.link import Link

SETTLED = 30.0  # seconds: what is due by then is swept, and dead processes are forgotten
PATIENCE = 30.0  # seconds for an answer of Redis: a busy machine is nothing that is left
SINGLE = {
    *("pool", "read", "waiting", "handed", "tags", "asking", "yielding", "due", "ended", "leases", "adapters"),
    *("engines", "expected", "orphans", "endpoints", "schedulers"),
}


async def leftovers(redis_url: str, pool: str, engines: int, endpoints: int) -> list[str]:
    """Returns a sentence for each thing that is left. Looks again until nothing is, for up to SETTLED seconds."""
    link = Link(redis_url, patience=PATIENCE)
    end = time.monotonic() + SETTLED
    try:
        while (found := await _look(link, Keys(pool).prefix, engines, endpoints)) and time.monotonic() < end:
            await asyncio.sleep(0.5)
    finally:
        await link.close()
    return found


async def _look(link: Link, prefix: str, engines: int, endpoints: int) -> list[str]:
    names = [name.removeprefix(prefix) for name in await _names(link, prefix)]
    found = []
    for queue in ("waiting", "handed", "due"):
        if count := await link.command("ZCARD", prefix + queue):
            found.append(f"{count} requests are in `{queue}`")
    known_engines = {name.decode() for name in await link.command("ZRANGE", f"{prefix}engines", 0, -1)}
    known_endpoints = {name.decode() for name in await link.command("ZRANGE", f"{prefix}endpoints", 0, -1)}
    ended = {name.decode() for name in await link.command("ZRANGE", f"{prefix}ended", 0, -1)}
    if dead := await link.command("SCARD", f"{prefix}orphans"):
        found.append(f"the calls of {dead} dead endpoints are not detached")
    if len(known_engines) != engines:
        found.append(f"engines: {sorted(known_engines)} instead of {engines}")
    if len(known_endpoints) != endpoints:
        found.append(f"endpoints: {len(known_endpoints)} are registered instead of {endpoints}")
    for name in names:
        family, _, of = name.partition(":")
        match family:
            case "claimed":
                found.append(f"{await link.command('ZCARD', prefix + name)} requests are claimed by {of}")
            case "listeners" | "calls" | "uses":
                found.append(f"{name} is left of requests that have ended")
            case "request":
                state = (await link.command("HGET", prefix + name, "state") or b"gone").decode()
                if state not in ("ended", "gone"):
                    found.append(f"request {of} is {state}")
                elif state == "ended" and of not in ended:
                    found.append(f"request {of} has ended and is kept for ever")
            case "tokens" | "tops" | "prompt":
                if of not in ended:
                    found.append(f"{name} is kept for ever")
            case "prefixes":
                marks = {mark[1:].decode() for mark in await link.command("HVALS", prefix + name)}
                found += [f"request {gone} is gone, and marks a prompt" for gone in sorted(marks - ended)]
            case "load":
                left = await link.command("HGETALL", prefix + name)
                found.append(f"`load` counts what does not wait any more: {b' '.join(left).decode()}")
            case "delivery" | "endpoint":
                if of not in known_endpoints:
                    found.append(f"{name} is left of an endpoint that is gone")
            case "control" | "engine" | "has":
                if of not in known_engines:
                    found.append(f"{name} is left of an engine that is gone")
            case _:
                if of or family not in SINGLE:
                    found.append(f"{name}: nobody knows this key")
    return found


async def _names(link: Link, prefix: str) -> list[str]:
    cursor, names = b"0", set[bytes]()
    pattern = prefix.replace("[", "\\[").replace("*", "\\*") + "*"
    while True:
        cursor, page = await link.command("SCAN", cursor, "MATCH", pattern, "COUNT", 1000)
        names.update(page)
        if cursor == b"0":
            return sorted(name.decode() for name in names)
