"""What `orca chaos` refuses before it starts anything."""

import asyncio
import io
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from orca_chaos.client import Violation
from orca_chaos.local_target import victims_of
from orca_cli import chaos as command
from orca_cli.chaos import Plan, on_this_machine
from orca_cli.main import _run, app
from orca_cli.settings_command import redis_url_of
from orca_common.errors import FailedPrecondition

PLAN = Plan(seed=1, rounds=1, first=1, streams=1, only=())


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("tls_dir", "certificates"),
        ("redis_url", "redis://127.0.0.1:1/0"),
        ("api_keys", "a sha256:" + 64 * "0"),
        ("api_keys_file", "keys"),
    ],
)
async def test_what_a_stack_under_chaos_cannot_have(setting: str, value: str, tmp_path: Path) -> None:
    arguments = [f"--{setting.replace('_', '-')}", value, "--run-dir", str(tmp_path / "run")]
    with pytest.raises(FailedPrecondition, match=rf"^{setting}: .* run it without"):
        await on_this_machine(PLAN, arguments, Console())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("url", ["redis://:secret@127.0.0.1:1/0", "redis://127.0.0.1:1/0?password=secret"])
@pytest.mark.parametrize("command", [["doctor"], ["chaos", "--release", "orca", "--address", "127.0.0.1:1"]])
def test_a_password_in_a_flag_is_refused(
    command: list[str], url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    done = CliRunner().invoke(app, [*command, "--redis-url", url])
    assert done.exit_code == 1
    said = done.output + str(done.exception)
    assert "--redis-url: everybody could read the password" in said
    assert "ORCA_REDIS_URL" in said
    assert "secret" not in said


def test_the_plan_of_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[Plan] = []

    async def run(plan: Plan, *_: object) -> None:
        plans.append(plan)

    monkeypatch.setattr("orca_cli.chaos.on_this_machine", run)
    words = ["chaos", "--seed", "2", "--rounds", "3", "--first", "4", "--streams", "5", "--only", "rank"]
    assert CliRunner().invoke(app, words).exit_code == 0
    assert plans == [Plan(seed=2, rounds=3, first=4, streams=5, only=("rank",))]


@pytest.mark.parametrize("given", [True, False])
async def test_a_stack_under_chaos(given: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each kind it has enough processes to miss one, unless the command says otherwise. After a violation its logs
    stay, and the command names the seed."""
    seen = list[Any]()

    @asynccontextmanager
    async def target(settings: Any, folder: Path, say: Callable[[str], None]) -> AsyncIterator[str]:
        seen.extend((settings, folder))
        say("started")
        yield "target"

    async def run(where: Any, **asked: Any) -> str:
        seen.append(asked)
        if len(seen) > 3:
            return "all is well"
        raise Violation("round 3: a token came twice")

    monkeypatch.setattr(command, "local_target", target)
    monkeypatch.setattr(command, "run", run)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    shown = io.StringIO()
    console = Console(file=shown, width=60)
    folder = ["--run-dir", str(tmp_path / "mine")] if given else []
    arguments = [*folder, "--pp", "1", "--http-port", "8001"]
    with pytest.raises(typer.Exit) as ended:
        await on_this_machine(PLAN, arguments, console)
    settings, kept, asked = seen
    assert ended.value.exit_code == 1
    names = ("endpoints", "schedulers", "engines", "pp", "max_batch_size", "port", "http_port")
    assert [settings.model_dump()[name] for name in names] == [2, 2, 2, 1, 6, 0, 8001]
    assert (kept.is_dir(), kept.parent, kept.name == "mine") == (True, tmp_path, given)
    assert (asked["seed"], asked["rounds"], asked["first"], asked["streams"]) == (1, 1, 1, 1)
    assert asked["chosen"](victims_of(settings)[0])
    assert shown.getvalue().splitlines() == [
        "started",
        "VIOLATION in round 3: a token came twice",
        "run it again: orca chaos --seed 1 with the same options",
        f"logs and journals: {kept}",
    ]
    await on_this_machine(PLAN, arguments, console)
    assert shown.getvalue().endswith("\nall is well\n")
    assert seen[4].exists() == given, "a folder of its own goes"


def test_a_redis_comes_from_the_flag_or_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    assert redis_url_of(None) is None
    monkeypatch.setenv("ORCA_REDIS_URL", "redis://:secret@a:1/0")
    assert redis_url_of(None) == "redis://:secret@a:1/0"
    assert redis_url_of("redis://b:1/0") == "redis://b:1/0"


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_command_that_is_interrupted_says_so_by_its_status(number: signal.Signals, status: int) -> None:
    async def body() -> None:
        os.kill(os.getpid(), number)
        await asyncio.Event().wait()

    with pytest.raises(typer.Exit) as ended:
        _run(body())
    assert ended.value.exit_code == status


async def test_a_role_that_is_none_is_refused_before_anything_starts(tmp_path: Path) -> None:
    """It started a whole stack, and ended with a traceback."""
    plan = Plan(seed=1, rounds=1, first=1, streams=1, only=("rank", "ranks"))
    with pytest.raises(FailedPrecondition) as refused:
        await on_this_machine(plan, ["--run-dir", str(tmp_path / "run")], Console())
    assert str(refused.value) == (
        "--only: 'ranks' is no role here; the roles are endpoint, scheduler, supervisor, rank, redis, fork server, "
        "endpoint > redis, scheduler > redis, scheduler > supervisor, scheduler > rank, rank > rank, all > redis"
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("same", "ends"), [(3600.0, "drained"), (0.0, "killed")])
def test_a_signal_that_comes_twice_is_one(same: float, ends: str) -> None:
    """timeout(1) signals the process and then its group; that killed the drain."""
    ended = []

    async def body() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            os.kill(os.getpid(), signal.SIGTERM)
            try:
                for _ in range(20):  # Python has written the signal into a pipe; some turns of the loop read it
                    await asyncio.sleep(0)
                ended.append("drained")
            except asyncio.CancelledError:
                ended.append("killed")
            raise

    with pytest.raises(typer.Exit) as status:
        _run(body(), same)
    assert ended == [ends]
    assert status.value.exit_code == 143


def test_a_redis_without_a_release() -> None:
    done = CliRunner().invoke(app, ["chaos", "--redis-url", "redis://127.0.0.1:1/0"])
    assert done.exit_code == 2
    assert "--release" in done.output
