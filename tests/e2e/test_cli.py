"""The commands that a new user types: serve, generate, demo, config, and those of the services."""

import asyncio
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

import psutil
import pytest
from openai import OpenAI
from processes import has_ended
from properties import first
from rich.console import Console
from stacks import running

from orca_cli import killing
from orca_cli.settings_command import settings_of
from orca_client import Accepted, OrcaClient
from orca_common.settings import flag
from orca_local.timed_model import make_timed_model

ORCA = str(Path(sys.executable).parent / "orca")
WIDE = {**os.environ, "COLUMNS": "160", "NO_COLOR": "1"}


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path, str]]:
    """`orca serve` with the demo model, ready. It has settings from flags, the environment and a file."""
    file = tmp_path / "orca.toml"
    file.write_text("max_waiting = 77\nmax_batch_size = 3\n")
    command = [ORCA, "serve", "--port", "0", "--http-port", "0", "--run-dir", str(tmp_path)]
    environment = WIDE | {"ORCA_CONFIG": str(file), "ORCA_MAX_BATCH_SIZE": "30"}
    with (
        open(tmp_path / "standard error", "w") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment) as process,
    ):
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            if "try: " in line:
                break
        else:
            pytest.fail("".join(said))
        try:
            yield process, tmp_path, "".join(said)
        finally:
            process.kill()


def roles(run_dir: Path) -> dict[str, dict[str, object]]:
    return {process["role"]: process for process in json.loads((run_dir / "processes.json").read_text())}


def test_serve_generate_and_ctrl_c(served: tuple[subprocess.Popen[str], Path, str]) -> None:
    process, run_dir, said = served
    until = time.monotonic() + 60
    shown = orca("status", "--run-dir", str(run_dir))
    while (shown.returncode or "ui-0" not in shown.stdout) and time.monotonic() < until:
        shown = orca("status", "--run-dir", str(run_dir))  # the live page starts behind the services
    found = roles(run_dir)
    assert set(found) == {"redis", "endpoint", "scheduler", "supervisor", "rank", "ui"}
    assert {"engine", "stage", "rank"} <= set(found["rank"])
    address = str(found["endpoint"]["address"])
    heading = json.loads(next(run_dir.glob("journal-*.jsonl")).read_text().splitlines()[0])
    assert heading["core"]["max_bs"] == 30, "a setting of the environment"

    def generate(*arguments: str) -> str:
        command = [ORCA, "generate", "--address", address, "--max-new-tokens", "6", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True, env=WIDE, timeout=60).stdout

    rank = next(line for line in shown.stdout.splitlines() if line.startswith("engine-0 rank 0 "))
    assert (shown.returncode, rank.split()[-1]) == (0, "yes"), shown.stdout
    assert "fill=stall-free" in shown.stdout, "the policy that `auto` became"
    assert f"try: {ORCA} generate " in said
    assert f", status {found['endpoint']['status']} (pid " in said

    events = [json.loads(line) for line in generate("--json", "import ").splitlines()]
    assert [next(iter(event.keys() - {"request_id"})) for event in events] == ["accepted", *["token"] * 6, "finished"]
    assert {"index", "token_id", "text", "iteration", "engine"} <= set(events[1]["token"])
    text = "".join(e["token"]["text"] for e in events if "token" in e) + events[-1]["finished"]["text"]
    assert generate("import ").rstrip("\n").endswith(text.rstrip("\n"))
    assert generate("def ", "class ").count("def ") >= 1

    door = re.search(r"http://\S+/v1", said)
    assert door
    client = OpenAI(base_url=door[0], api_key="none")
    with client:
        model = client.models.list().data[0].id
        answer = client.completions.create(model=model, prompt="import ", max_tokens=6, temperature=0)
        assert answer.choices[0].text == text

    assert process.stdout
    for role, sentence in (
        ("rank", "engine-0 rank 0 (pid {}) ended"),
        ("scheduler", "scheduler-0 (pid {}) was killed by SIGKILL"),
    ):
        pid = int(str(found[role]["pid"]))
        os.kill(pid, signal.SIGKILL)
        assert any(sentence.format(pid) in line for line in process.stdout)
        assert sentence.format(pid) in orca("logs", "serve", "--run-dir", str(run_dir)).stdout

    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= len(found)
    with OrcaClient([address]) as client:
        stream = client.generate("x", max_new_tokens=500, ignore_eos=True)
        assert isinstance(next(stream), Accepted)
        process.send_signal(signal.SIGINT)
        assert stream.finished is None
        stream.text()
        rest, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert re.search(r"^draining( 1 stream)?, 40 s at most$", rest, re.MULTILINE), "endpoints have 1 s to count them"
    assert (run_dir / "standard error").read_text() == "", "no noise, though processes died"
    assert rest.endswith(f"ended, nothing is left running; logs and journals: {run_dir}\n")
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not [one for one in alive if not has_ended(one)]
    assert json.loads((run_dir / "processes.json").read_text()) == []


def test_a_killed_serve_is_followed_by_another(served: tuple[subprocess.Popen[str], Path, str]) -> None:
    """Its endpoint lived on beside the new one, on the same port, until it had drained: clients hung for 30 s. While an
    endpoint is away no other program gets its ports."""
    process, run_dir, said = served
    grpc, http = (re.findall(rf"{door}\D+127.0.0.1:(\d+)", said)[0] for door in ("gRPC", "http:"))
    pid = int(re.findall(r"endpoint-0 at .*\(pid (\d+)\)", said)[0])
    os.kill(pid, signal.SIGKILL)
    assert process.stdout is not None
    assert any(f"endpoint-0 (pid {pid}) was killed" in line for line in process.stdout)
    for port in (grpc, http):
        with pytest.raises(OSError, match="in use"):
            socket.create_server(("127.0.0.1", int(port))).close()
    with OrcaClient(f"127.0.0.1:{grpc}") as client:
        before = client.generate("def main(", max_new_tokens=400, ignore_eos=True, seed=7)
        next(before)
        children = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        _, alive = psutil.wait_procs(children, timeout=60)
        assert not [one for one in alive if not has_ended(one)]
        assert '"leaving"' not in (run_dir / "logs/endpoint-0.log").read_text(), "it drained"
        asked = client.generate("def main(", max_new_tokens=4, ignore_eos=True)  # while no endpoint is there
        command = [ORCA, "serve", "--port", grpc, "--http-port", http, "--run-dir", str(run_dir)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=WIDE) as other:
            try:
                assert other.stdout is not None
                told = list(takewhile(lambda line: "try: " not in line, other.stdout))
                assert "ready\n" in told, "".join(told)
                assert len(asked.text()) > 0
                whole = before.text()
                again = client.generate("def main(", max_new_tokens=400, ignore_eos=True, seed=7)
                assert whole == again.text()
            finally:
                other.kill()


def test_demo_shows_mixed_batches(tmp_path: Path) -> None:
    """On 80 columns: each row of the table is whole. Its run folder stays."""
    narrow = WIDE | {"COLUMNS": "80", "XDG_STATE_HOME": str(tmp_path)}
    shown = subprocess.run([ORCA, "demo"], capture_output=True, text=True, env=narrow, timeout=120, check=False)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    rows = [line for line in shown.stdout.splitlines() if "initiate " in line]
    assert rows, shown.stdout
    assert any("increment" in row for row in rows), "an initiation and an increment share an iteration"
    assert all(len(line) <= 80 for line in shown.stdout.splitlines() if line[:1] in "┃│╭╰┏┡└")
    assert len(list(tmp_path.glob("orca/runs/*/journal-engine-0-*.jsonl"))) == 1


def orca(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = WIDE | variables
    return subprocess.run([ORCA, *arguments], capture_output=True, text=True, env=environment, timeout=60, check=False)


def test_config(tmp_path: Path) -> None:
    """It prints a file that gives the same settings again, and no password."""
    file = tmp_path / "orca.toml"
    file.write_text('max_waiting = 5\nlog_level = "debug"\n')
    secret = "redis://:secret@10.0.0.1:6379/0"
    shown = orca("config", "--tp", "2", "--config", str(file), ORCA_MAX_CALLS="6", ORCA_REDIS_URL=secret)
    assert shown.returncode == 0, shown.stderr
    lines = {line.split(" = ")[0]: re.split(r" +# ", line, maxsplit=1) for line in shown.stdout.splitlines()}
    assert lines["tp"] == ["tp = 2", "--tp"]
    assert lines["max_calls"] == ["max_calls = 6", "ORCA_MAX_CALLS"]
    assert lines["max_waiting"] == ["max_waiting = 5", str(file)]
    assert lines["log_level"] == ['log_level = "DEBUG"', str(file)]
    assert lines["pp"] == ["pp = 1", "default"]
    assert lines["redis_url"] == ['redis_url = "redis://***@10.0.0.1:6379/0"', "ORCA_REDIS_URL"]
    again = tmp_path / "again.toml"
    again.write_text(shown.stdout)
    assert tomllib.loads(shown.stdout) == tomllib.loads(orca("config", "--config", str(again)).stdout)


def test_config_of_a_service() -> None:
    wrong = orca("config", "foo")
    assert (wrong.returncode, wrong.stderr) == (
        1,
        "foo: is no service; serve, endpoint, scheduler, worker, ui have settings\n",
    )
    shown = orca("config", "scheduler", "--workers", "a:1")
    assert 'workers = "a:1"' in shown.stdout
    assert "max_waiting" not in shown.stdout


@pytest.mark.parametrize("service", first(2, ["serve", "worker", "endpoint", "scheduler"]))
def test_help_and_misspelt_settings(service: str) -> None:
    shown = orca(service, "--help")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert f"Usage: orca {service} [OPTIONS]" in shown.stdout
    assert "one of DEBUG, INFO, WARNING, ERROR, CRITICAL" in shown.stdout
    flags = {flag(name) for name in settings_of(service).model_fields}
    assert flags <= set(re.findall(r"--[a-z-]+", shown.stdout))
    wrong = orca(service, ORCA_MAX_BATCH_SIEZ="9")
    sentence = "ORCA_MAX_BATCH_SIEZ: there is no such setting; did you mean ORCA_MAX_BATCH_SIZE?\n"
    assert (wrong.returncode, wrong.stdout, wrong.stderr) == (1, "", sentence)


@pytest.mark.parametrize("service", ["endpoint", "worker"])
def test_a_variable_of_another_program_is_a_warning_in_the_log(service: str) -> None:
    ended = orca(service, "--model", "/nowhere", ORCA_HOME="/opt/other")
    warning, why = ended.stderr.splitlines()
    assert json.loads(warning)["event"] == "ORCA_HOME: there is no such setting, so it has no effect"
    assert why.endswith("--model: /nowhere: there is no such folder")


@pytest.mark.parametrize("command", ["serve", "topology"])
def test_errors_are_plain_sentences(command: str, tmp_path: Path) -> None:
    """Also where they hold what a terminal library would take for its markup."""
    folder = tmp_path / "[/bold]"
    wrong = orca(command, "--model", str(folder), ORCA_RUN_DIR=str(tmp_path))
    sentence = f"--model: {folder}: there is no such folder\n"
    assert (wrong.returncode, wrong.stderr) == (1, sentence)


def test_topology_has_the_settings_of_serve() -> None:
    shown = orca("topology", "--pp", "2", ORCA_TP="3")
    assert "tp 3 x pp 2, auto" in shown.stdout
    assert orca("topology", "--dtype", "float8").stderr.startswith("--dtype: must be 'auto', ")


async def test_the_demo_of_kills(tmp_path: Path) -> None:
    """Its commands are those that a reader would paste: each process is killed by one, and the stream is whole."""
    model = make_timed_model(tmp_path / "model", killing.SECONDS)
    shown = Console(file=io.StringIO(), width=120, force_terminal=True)
    async with running(tmp_path / "run", model, schedulers=2) as stack:
        playing = asyncio.create_task(killing.play([stack.grpc], stack.run_dir, shown, tokens=40))
        for name in ("rank 0", "scheduler", "endpoint"):
            found: list[re.Match[str]] = []

            def there(name: str = name, found: list[re.Match[str]] = found) -> bool:
                said = re.finditer(rf"({name}\S*)\s+(kill -9 (\d+))", shown.file.getvalue())  # type: ignore[attr-defined]
                found[:] = list(said)[-1:]
                return bool(found) or playing.done()

            await stack.until(there)
            before = int(found[0][3])
            os.kill(before, signal.SIGKILL)
            await stack.until(lambda before=before: before not in {row["pid"] for row in stack.processes()})
        watched = await playing
    assert (watched.tokens, watched.ended) == (40, "and whole")
    assert len(watched.killed) >= 2, watched.killed
