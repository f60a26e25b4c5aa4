"""The programs that `orca doctor` runs in pods, run as it runs them there: their source comes on stdin."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from servers import KINDS, redis_server

from orca_cli.doctor.cluster import STARTER
from orca_cli.doctor.gather import answer_of
from orca_cli.doctor.inside.ask_redis import facts
from orca_cli.doctor.snapshot import Redis
from orca_common.errors import Unavailable
from orca_common.service import StatusPort
from orca_local.embedded_pool import keep_port
from orca_local.stack import DEMO_MODEL


def run(program: str, line: str = "", **variables: str) -> dict[str, Any]:
    source = files("orca_cli.doctor.inside").joinpath(program).read_text()
    command = [sys.executable, *STARTER[1:], str(len(source))]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ORCA_")} | variables
    ended = subprocess.run(
        command, input=f"{source}{line}\n", capture_output=True, text=True, timeout=60, check=False, env=environment
    )
    assert ended.returncode == 0, ended.stderr
    return answer_of(ended.stdout)


def reach(*targets: list[Any], status_port: int = 1, model: str = "", **variables: str) -> dict[str, Any]:
    return run("reach.py", json.dumps({"targets": targets, "status_port": status_port, "model": model}), **variables)


@contextmanager
def listening() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_what_is_reached() -> None:
    with listening() as port, keep_port() as closed:
        shut = closed.getsockname()[1]
        url = f"redis://:secret@127.0.0.1:{port}/0"
        said = reach(
            ["127.0.0.1", port], ["127.0.0.1", shut], ["localhost", None], ["no.such.invalid", None], ["", None],
            ORCA_REDIS_URL=url,
        )  # fmt: skip
    answers = [answer for answer, _ in said["answers"]]
    assert answers[:3] == ["open", "refused", "resolved"]
    assert answers[3] not in ("open", "resolved")
    assert answers[4] == "open"
    assert all(seconds >= 0 for _, seconds in said["answers"])
    assert said["now"] > 0


def test_one_sentinel_that_is_reached_is_enough() -> None:
    with listening() as port, keep_port() as closed:
        shut = closed.getsockname()[1]
        one = reach(["", None], ORCA_REDIS_URL=f"redis+sentinel://:secret@127.0.0.1:{shut},127.0.0.1:{port}/pool/0")
        none = reach(["", None], ORCA_REDIS_URL=f"redis+sentinel://127.0.0.1:{shut}/pool")
    assert [answer for answer, _ in one["answers"] + none["answers"]] == ["open", "refused"]


def test_a_sentinel_at_an_address_of_ipv6() -> None:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as server:
        port = server.getsockname()[1]
        said = reach(["", None], ORCA_REDIS_URL=f"redis+sentinel://one.invalid,[::1]:{port}/pool")
    assert [answer for answer, _ in said["answers"]] == ["open"]


def test_a_port_that_does_not_answer() -> None:
    """A full backlog drops what comes, as a NetworkPolicy does."""
    with (
        socket.create_server(("127.0.0.1", 0), backlog=0) as server,
        socket.socket() as first,
        socket.socket() as second,
    ):
        port = server.getsockname()[1]
        for caller in (first, second):
            caller.setblocking(False)
            caller.connect_ex(("127.0.0.1", port))
        said = reach(["127.0.0.1", port])
    assert [answer for answer, _ in said["answers"]] == ["silent"]


def test_why_a_service_is_not_ready() -> None:
    status = StatusPort("127.0.0.1", 0, lambda: "no engine has formed yet", lambda: True)
    try:
        assert reach(status_port=status.port)["unready"] == "no engine has formed yet"
    finally:
        status.close()
    assert reach()["unready"] == ""


def test_a_worker_says_how_its_weights_are_in_the_files(tmp_path: Path) -> None:
    for name, config in (
        ("plain", {}),
        ("gptq", {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}}),
    ):
        (tmp_path / name).mkdir()
        given = json.loads((DEMO_MODEL / "config.json").read_text()) | config
        (tmp_path / name / "config.json").write_text(json.dumps(given))
    assert reach(model=str(tmp_path / "plain"))["weights"] == "floating-point numbers"
    assert "gptq" in reach(model=str(tmp_path / "gptq"))["weights"].lower()
    assert reach(model="no/such/model")["weights"] == reach()["weights"] == ""


@pytest.mark.parametrize("kind", KINDS)
def test_redis_tells_about_itself(kind: str) -> None:
    with redis_server(kind) as server:
        told = Redis("here", **run("ask_redis.py", ORCA_REDIS_URL=server.url))
    assert told.server == kind
    assert (told.role, told.appendonly, told.appendfsync, told.last_append) == ("master", "yes", "always", "ok")
    assert (told.policy, told.loading) == ("noeviction", False)
    assert int(told.version.split(".")[0]) >= 7
    assert told.used > 0
    assert abs(told.ahead) < 60


async def test_redis_with_other_settings() -> None:
    """Also one that keeps its settings to itself, as managed ones do."""
    with redis_server() as server:
        lines = ["CONFIG SET appendonly no", "CONFIG SET maxmemory-policy allkeys-lru", "CONFIG SET maxmemory 64mb"]
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            for line in [*lines, "ACL SETUSER default -config"]:
                connection.sendall(f"{line}\r\n".encode())
                assert connection.recv(64) == b"+OK\r\n"
        told = Redis("here", **await facts(server.url))
    assert (told.appendonly, told.appendfsync) == ("no", "")
    assert (told.policy, told.maxmemory) == ("allkeys-lru", 64 * 2**20)


def test_redis_that_is_away() -> None:
    with listening() as port:
        pass
    with pytest.raises(Unavailable, match="the request pool is away"):
        run("ask_redis.py", ORCA_REDIS_URL=f"redis://127.0.0.1:{port}/0")
