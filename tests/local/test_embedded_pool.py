"""The embedded Redis keeps what it has acknowledged, and is for this machine alone."""

import time
from pathlib import Path

import redis

from orca_local import embedded_pool


def test_what_is_acknowledged_is_on_disk(tmp_path: Path) -> None:
    process, url = embedded_pool.start(tmp_path / "redis", None)
    try:
        with redis.Redis.from_url(url, decode_responses=True) as client:
            told = {name: client.config_get(name)[name] for name in ("appendonly", "appendfsync", "save", "bind")}
        assert told == {"appendonly": "yes", "appendfsync": "always", "save": "", "bind": "127.0.0.1"}
    finally:
        process.terminate()
        process.wait(20)
    assert (tmp_path / "redis").stat().st_mode & 0o777 == 0o700


def test_its_file_does_not_grow_beyond_what_a_start_reads_quickly(tmp_path: Path) -> None:
    """The file is rewritten at 4 MB: the pause of a server's death is the reading of all that was ever written.

    What is written while it is rewritten counts as if it were the beginning: then it is rewritten at twice that size,
    and so writes go on. By the server's own setting it would be at 64 MB.
    """
    process, url = embedded_pool.start(tmp_path / "redis", None)
    try:
        with redis.Redis.from_url(url) as client:
            for _ in range(24):
                client.set("key", bytes(1_000_000))
            while (said := client.info("persistence"))["aof_current_size"] > 4_200_000:
                assert said["aof_current_size"] < 60_000_000
                if not said["aof_rewrite_in_progress"]:
                    client.set("key", bytes(1_000_000))
                time.sleep(0.1)  # the server looks ten times a second
            assert client.strlen("key") == 1_000_000
    finally:
        process.terminate()
        process.wait(20)
