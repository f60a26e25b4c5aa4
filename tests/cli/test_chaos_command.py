"""What `orca chaos` refuses before it starts anything."""

from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from orca_cli.chaos import Plan, on_this_machine
from orca_cli.main import app
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


def test_a_redis_without_a_release() -> None:
    done = CliRunner().invoke(app, ["chaos", "--redis-url", "redis://127.0.0.1:1/0"])
    assert done.exit_code == 2
    assert "--release" in done.output
