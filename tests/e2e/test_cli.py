"""The commands that a new user types: serve, generate, demo."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from openai import OpenAI

ORCA = str(Path(sys.executable).parent / "orca")
WIDE = {**os.environ, "COLUMNS": "160", "NO_COLOR": "1"}


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path, str]]:
    """`orca serve` with the demo model, ready."""
    command = [ORCA, "serve", "--port", "0", "--http-port", "0", "--run-dir", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=WIDE) as process:
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            if "try: orca generate" in line:
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
    found = roles(run_dir)
    assert set(found) == {"redis", "endpoint", "scheduler", "supervisor", "rank"}
    assert {"engine", "stage", "rank"} <= set(found["rank"])
    address = str(found["endpoint"]["address"])

    def generate(*arguments: str) -> str:
        command = [ORCA, "generate", "--address", address, "--max-new-tokens", "6", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True, env=WIDE, timeout=60).stdout

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

    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= len(found)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0
    _, alive = psutil.wait_procs(children, timeout=5)
    assert not alive
    assert json.loads((run_dir / "processes.json").read_text()) == []


def test_serve_killed_leaves_nothing(served: tuple[subprocess.Popen[str], Path, str]) -> None:
    process, _, _ = served
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive


def test_demo_shows_mixed_batches() -> None:
    shown = subprocess.run([ORCA, "demo"], capture_output=True, text=True, env=WIDE, timeout=120, check=False)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    rows = [line for line in shown.stdout.splitlines() if "initiate " in line]
    assert rows, shown.stdout
    assert any("increment" in row for row in rows), "an initiation and an increment share an iteration"
