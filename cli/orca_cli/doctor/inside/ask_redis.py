"""Runs in a pod of the endpoint, or here for --redis-url: asks the pool's Redis about itself, by the pool's own link.

In a pod it uses the pod's own settings, and prints a line of JSON.
"""

import asyncio
import json
import time
from collections.abc import Mapping
from statistics import median
from typing import Any

from orca_common.errors import OrcaError
from orca_common.settings import PoolSettings
from orca_pool.link import Link, ResponseError

ROUNDS = 5
PATIENCE = 3.0


async def facts(url: str, *, password: str | None = None, tls_dir: str | None = None) -> dict[str, Any]:
    """Returns the answers to `INFO`, `CONFIG GET` and `TIME`. password, tls_dir: as for `Pool`. Raises Unavailable."""
    link = Link(url, PATIENCE, password=password, tls_dir=tls_dir)
    try:
        info = fields_of(await link.command("INFO"))
        settings = {name: await setting(link, name) for name in ("appendfsync", "maxmemory-policy")}
        seconds, ahead = [], []
        for _ in range(ROUNDS):
            begin, before = time.perf_counter(), time.time()
            second, microsecond = await link.command("TIME")
            seconds.append(time.perf_counter() - begin)
            ahead.append(int(second) + int(microsecond) / 1e6 - (before + seconds[-1] / 2))
    finally:
        await link.close()
    return {
        "server": "valkey" if "valkey_version" in info else "redis",
        "version": info.get("valkey_version") or info.get("redis_version", ""),
        "role": info.get("role", ""),
        "replicas": sum("state=online" in value for name, value in info.items() if name.startswith("slave")),
        "appendonly": {"0": "no", "1": "yes"}.get(info.get("aof_enabled", ""), ""),
        "appendfsync": settings["appendfsync"],
        "last_append": info.get("aof_last_write_status", ""),
        "maxmemory": int(info.get("maxmemory", 0)),
        "policy": info.get("maxmemory_policy") or settings["maxmemory-policy"],
        "used": int(info.get("used_memory", 0)),
        "loading": info.get("loading") == "1",
        "seconds": median(seconds),
        "ahead": median(ahead),
    }


def fields_of(text: bytes) -> Mapping[str, str]:
    lines = (line.partition(":") for line in text.decode().splitlines())
    return {name: value for name, colon, value in lines if colon}


async def setting(link: Link, name: str) -> str:
    """A setting of the server; "" when it may not be read, as with a managed Redis."""
    try:
        answer = await link.command("CONFIG", "GET", name)
    except ResponseError:
        return ""
    return answer[1].decode() if len(answer) > 1 else ""


def main() -> None:
    try:
        settings = PoolSettings.load()
        found = facts(settings.redis_url, password=settings.redis_password, tls_dir=settings.tls_dir)
        print(json.dumps(asyncio.run(found)))
    except (OrcaError, ResponseError) as error:
        print(json.dumps({"error": str(error)}))


if __name__ == "__main__":
    main()
