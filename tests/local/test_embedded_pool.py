"""The embedded Redis keeps what it has acknowledged, and is for this machine alone."""

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
